"""Fusers of any pair: small, bound to their pair, with gates that shut and gradients that reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fedloom.adapters.fused import FusedContext
from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.adapters.gates import Draw, LayerGates, temperature
from fedloom.errors import Refusal
from fedloom.slices.geometry import Geometry, geometry_of
from fedloom.slices.slice import batch_of, export_batch

from rooms import PAIRS, PROMPT, TEXT, fuser_of, piece_of, room, shut

SHAPES = {
    "smollm2-135m": {
        "family": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "gemma3-270m": {
        "family": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "qwen2.5-0.5b": {
        "family": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}
ORDERED = [(a, b) for a in SHAPES for b in SHAPES if a != b]


@pytest.fixture(scope="module")
def real() -> dict[str, Geometry]:
    """The real models' geometries, of modules that take no memory."""
    found = {}
    for name, told in SHAPES.items():
        shape = {k: v for k, v in told.items() if k != "family"}
        config = AutoConfig.for_model(told["family"], tie_word_embeddings=True, **shape)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        found[name] = geometry_of(model, name, "t")
    return found


def test_geometries_of_real_models(real):
    smol, gemma, qwen = real.values()
    assert (smol.layers, smol.heads, smol.dim, smol.parameters) == (30, 3, 64, 134_515_008)
    assert (gemma.heads, gemma.dim, gemma.full) == (1, 256, (5, 11, 17))
    assert (qwen.layers, qwen.heads, qwen.dim) == (24, 2, 64)


@pytest.mark.parametrize(("sender", "receiver"), ORDERED, ids=str)
@pytest.mark.parametrize("mode", ["prefix", "residual"])
def test_a_fuser_is_at_most_a_twentieth_of_its_receiver(real, sender, receiver, mode):
    with torch.device("meta"):
        fuser = CacheFuser(real[sender], real[receiver], FuserConfig(mode=mode))
    assert 0 < fuser.parameter_share <= 0.05
    assert fuser.projector.down_NIR.shape[2] >= 64  # small, not starved


def test_the_preset_is_as_large_as_c2cs(real):
    """477.8 million for Qwen3-0.6B from Qwen2.5-0.5B: as large as the sender."""
    qwen3 = replace(
        real["qwen2.5-0.5b"],
        layers=28,
        heads=8,
        dim=128,
        windows=(0,) * 28,
        bases=(1e6,) * 28,
        scalings=(1.0,) * 28,
    )
    with torch.device("meta"):
        config = FuserConfig(mode="residual", size="c2c")
        fuser = CacheFuser(real["qwen2.5-0.5b"], qwen3, config)
    assert sum(p.numel() for p in fuser.parameters()) == pytest.approx(477.8e6, rel=2e-4)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
@pytest.mark.parametrize("size", ["small", "c2c"])
def test_gradients_reach_every_parameter_through_the_frozen_receiver(sender, receiver, size):
    base, _ = room(receiver)
    fuser = fuser_of(sender, receiver, size=size).requires_grad_(True).train()
    before = [p.clone() for p in base.model.parameters()]
    source = export_batch(*room_of(sender), [TEXT, TEXT[:5]])
    draw = Draw(1.0, torch.Generator().manual_seed(0))
    context = FusedContext(base.model, [fuser(source, draw=draw)])
    logits = context.read(torch.tensor([PROMPT] * 2))
    torch.nn.functional.cross_entropy(logits[:, -1], torch.tensor([7, 9])).backward()
    assert reached(fuser) == []
    assert all(p.grad is None for p in base.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, base.model.parameters(), strict=True))


def room_of(family):
    base, geometry = room(family)
    return base.model, geometry


def reached(fuser) -> list[str]:
    """Parameters that no gradient has reached."""
    return [n for n, p in fuser.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("size", ["small", "c2c"])
def test_gradients_of_a_residual_fuser(size):
    base, geometry = room("qwen3")
    fuser = fuser_of("llama", "qwen3", mode="residual", size=size).requires_grad_(True).train()
    rows = torch.tensor([TEXT[:8], TEXT[4:12]])
    context = FusedContext(base.model)
    context.read(rows[:, :-1], keep=1)
    source = export_batch(*room_of("llama"), rows[:, :-1].tolist())
    draw = Draw(1.0, torch.Generator().manual_seed(0))
    context.add([fuser(source, context.own(geometry), draw)])
    context.read(rows[:, -1:])[:, -1].logsumexp(-1).sum().backward()
    assert reached(fuser) == []


@torch.no_grad()
def test_a_gate_of_one_is_open_and_one_of_zero_is_shut():
    """Training adds log g to the scores: its ends are what evaluation does exactly."""
    base, _ = room("qwen3")
    fuser, ids = fuser_of("llama", "qwen3"), torch.tensor([PROMPT])
    source = batch_of([piece_of("llama")])
    hard = FusedContext(base.model, [fuser(source)]).read(ids)
    guests = fuser(source)
    fixed = {n: torch.zeros(1) for n in fuser.layers}
    opened = FusedContext(base.model, [replace(guests, log_gate=fixed)]).read(ids)
    torch.testing.assert_close(opened, hard, rtol=0, atol=1e-10)
    fixed = {n: torch.full((1,), -80.0) for n in fuser.layers}
    closed = FusedContext(base.model, [replace(guests, log_gate=fixed)]).read(ids)
    alone = base.model(ids).logits
    torch.testing.assert_close(closed, alone, rtol=0, atol=1e-5)  # other float32 places


@torch.no_grad()
def test_each_sender_has_a_bias_of_its_own():
    base, _ = room("qwen3")
    fusers, ids = [fuser_of(s, "qwen3") for s in ("llama", "qwen2")], torch.tensor([PROMPT])
    sources = [batch_of([piece_of(s)]) for s in ("llama", "qwen2")]
    fusers[0].bias.fill_(-200.0)
    both = [f(s) for f, s in zip(fusers, sources, strict=True)]
    got = FusedContext(base.model, both).read(ids)
    only = FusedContext(base.model, both[1:]).read(ids)
    torch.testing.assert_close(got, only, rtol=0, atol=1e-5)


def test_gates_are_drawn_once_for_a_row_and_a_layer():
    gates = LayerGates(3, 0.0)
    random = torch.Generator().manual_seed(0)
    soft = gates.log_soft(4000, Draw(1.0, random)).exp()
    assert soft.shape == (4000, 3)
    # A logit of 0 is open half the time: with one Gumbel in place of two it would be 63 %.
    assert ((soft > 0.5).float().mean(0) - 0.5).abs().max() < 0.03
    cold = gates.log_soft(4000, Draw(temperature(10, 10), random)).exp()
    assert ((cold < 0.01) | (cold > 0.99)).float().mean() > 0.99


def test_shut_layers_need_not_be_sent():
    fuser = fuser_of("llama", "qwen3", taps=1)
    assert fuser.sender_layers == (0, 1)
    assert shut(fuser, 0).sender_layers == (1,)
    assert fuser.open_layers() == (1,)


def test_no_layer_of_a_receiver_that_a_prefix_would_leave():
    """tiny:gemma3 slides in layer 0 and sees all in layer 1."""
    assert fuser_of("llama", "gemma3").layers == (1,)
    sliding = replace(room("gemma3")[1], windows=(12, 12))
    with pytest.raises(Refusal, match="every layer that is fed slides a window"):
        CacheFuser(room("llama")[1], sliding, FuserConfig(width=8))


def test_calibration_undoes_the_features_scale():
    fuser = fuser_of("llama", "qwen3")
    source, target = (export_batch(*room_of(f), [TEXT, TEXT[:7]]) for f in ("llama", "qwen3"))
    fuser.calibrate([source], [target])
    keys, values = fuser._features(source, "sender", 1)
    flat = torch.cat((keys, values), -1)[source.real_BT]
    torch.testing.assert_close(flat.mean(0), torch.zeros(64).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(flat.std(0), torch.ones(64).double(), rtol=0, atol=1e-3)


def test_arrays_round_trip_and_others_are_refused():
    one, two = fuser_of("llama", "qwen3"), fuser_of("llama", "qwen3")
    with torch.no_grad():
        one.projector.shift_NR.fill_(3.0)
    arrays = one.arrays()
    two.load(arrays)
    assert all(np.array_equal(arrays[n], x) for n, x in two.arrays().items())
    for name, array, match in (
        ("bias", np.zeros(3), r"fuser array bias: \(3,\) came"),
        ("bias", np.array(np.nan), "finite"),
        ("other", np.zeros(1), "fuser array other"),
    ):
        with pytest.raises(Refusal, match=match):
            two.load({**arrays, name: array})


def test_same_seed_same_fuser():
    geometries = room("llama")[1], room("qwen3")[1]
    one, two, other = (CacheFuser(*geometries, FuserConfig(width=8), seed=s) for s in (1, 1, 2))
    assert torch.equal(one.projector.down_NIR, two.projector.down_NIR)
    assert not torch.equal(one.projector.down_NIR, other.projector.down_NIR)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"mode": "prefixed"}, "did you mean prefix"),
        ({"size": "big"}, "expected one of small, c2c"),
        ({"taps": 0}, "taps = 0"),
        ({"layer_map": "deep"}, "expected one of depth"),
        ({"share": 1e-4}, "not even a rank of 8 fits"),
    ],
)
def test_bad_choices_are_refused(told, match):
    with pytest.raises(Refusal, match=match):
        CacheFuser(room("llama")[1], room("qwen3")[1], FuserConfig(**told))
