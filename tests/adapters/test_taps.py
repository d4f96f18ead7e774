"""Tapped keys and queries: what they mix, that cuts do not matter, and that they learn."""

from __future__ import annotations

import pytest
import torch

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import DeltaMemory, start_taps
from fedloom.config import MemoryConfig, RunConfig
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.ops.delta_rule import naive_delta_rule

from grafts import HEARD

ROWS, TOKENS, HEADS, GROUPS, DIM = 2, 11, 3, 2, 5


def made(width: int, read_with: str = "queries") -> tuple[DeltaMemory, tuple[torch.Tensor, ...]]:
    """Make a memory with taps of no pattern, and raw queries, keys and values in float64."""
    torch.manual_seed(width)
    config = MemoryConfig(
        key_taps="learnt",
        tap_width=width,
        read_with=read_with,
        chunk=4,
        centre="learnt",
        beta_trainable=True,
    )
    memory = DeltaMemory(config, heads=HEADS, groups=GROUPS, dim=DIM).double()
    for parameter in memory.parameters():
        parameter.data.normal_()
    sizes = (HEADS * GROUPS * DIM, HEADS * DIM, HEADS * DIM)
    return memory, tuple(torch.randn(ROWS, TOKENS, n, dtype=torch.float64) for n in sizes)


def by_hand(memory, q, k, v):
    """The same, one token, head and lag at a time; a sequence's first token stands in."""
    q = q.view(ROWS, TOKENS, HEADS, GROUPS, DIM)
    k, v = k.view(ROWS, TOKENS, HEADS, DIM), v.view(ROWS, TOKENS, HEADS, DIM)
    if memory.config.read_with == "keys":
        q = k[:, :, :, None].expand_as(q)
    keys, queries, beta = torch.zeros_like(k), torch.zeros_like(q), k.new_zeros(k.shape[:3])
    for t in range(TOKENS):
        for h in range(HEADS):
            for lag in range(memory.width):
                keys[:, t, h] += memory.mix[h, lag] * k[:, max(0, t - lag), h]
            for g in range(GROUPS):
                lags = range(memory.width - 1) if memory.width > 2 else [0]
                for lag in lags:
                    weight = memory.mix_q[h, g, lag] if memory.width > 2 else 1.0
                    queries[:, t, h, g] += weight * q[:, max(0, t - lag), h, g]
            pooled = sum(
                (memory.taps[h, :, j] * k[:, max(0, t - 2 + j), h]).sum(-1) for j in range(3)
            )
            beta[:, t, h] = torch.sigmoid(pooled / DIM + memory.bias[h].mean())
    keys, queries = keys - memory.centre_k, queries - memory.centre_q
    keys, queries = (x * torch.sigmoid(x) for x in (keys, queries))
    keys, queries = (x / x.norm(dim=-1, keepdim=True) for x in (keys, queries))
    out, S = naive_delta_rule(queries, keys, v * DIM**-0.5, beta)
    return out.flatten(2), S


@pytest.mark.parametrize("read_with", ["queries", "keys"])
@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_taps_are_the_sum_over_lags(width, read_with):
    memory, raw = made(width, read_with)
    out, state = memory(*raw)
    expected, S = by_hand(memory, *raw)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.S_BHDD, S, rtol=0, atol=1e-12)
    loss, plain = out.square().sum(), expected.square().sum()
    for name, parameter in memory.named_parameters():
        ours, theirs = (torch.autograd.grad(x, parameter, retain_graph=True) for x in (loss, plain))
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-9, atol=1e-11, msg=name)
        assert ours[0].abs().max() > 0, name


@pytest.mark.parametrize("read_with", ["queries", "keys"])
@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("cuts", [(5,), (1, 2, 3), (1, 10)])
def test_a_sequence_may_be_read_in_pieces(width, cuts, read_with):
    memory, raw = made(width, read_with)
    whole, last = memory(*raw)
    outs, state = [], None
    for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        out, state = memory(*(x[:, start:end] for x in raw), state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1), whole, rtol=0, atol=1e-13)
    for mine, theirs in zip(vars(state).values(), vars(last).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("read_with", ["queries", "keys"])
def test_padding_leaves_no_trace(read_with):
    memory, raw = made(4, read_with)
    real = torch.arange(TOKENS) < torch.tensor([[TOKENS], [6]])
    _, state = memory(*raw, real=real)
    _, alone = memory(*(x[1:, :6] for x in raw))
    for mine, theirs in zip(vars(state).values(), vars(alone).values(), strict=True):
        torch.testing.assert_close(mine[1:], theirs, rtol=0, atol=1e-13)


def test_a_name_three_tokens_back_finds_its_value():
    """Two facts, "name a b value": the last words before the value are the same in both."""
    config = MemoryConfig(
        key_taps="fixed", tap_width=4, feature_map="l2", beta="fixed", scale_values=False
    )
    memory = DeltaMemory(config, heads=1, groups=1, dim=16)
    one, two, a, b, v1, v2, end = torch.eye(16)[:7]
    told = torch.stack([one, a, b, v1, end, end, end, two, a, b, v2, end, end, end])
    asked = torch.stack([one, a, b, end, end, end, two, a, b])
    whole = torch.cat((told, asked))[None]
    out, _ = memory(whole, whole, whole)
    for place, right, wrong in ((16, v1, v2), (22, v2, v1)):
        assert out[0, place] @ right > 1.3 * (out[0, place] @ wrong)


@pytest.mark.parametrize("read_with", ["queries", "keys"])
def test_wide_taps_learn_inside_a_model(ids, read_with):
    model = tiny.build("llama").double().requires_grad_(False)
    changes = {
        "memory__key_taps": "learnt",
        "memory__tap_width": 4,
        "memory__read_with": read_with,
    }
    adapter = attach(model, HEARD.replaced(**changes))
    model(ids, use_cache=False).logits.square().mean().backward()
    taps = {n: p for n, p in adapter.parameters().items() if n.endswith((".mix", ".mix_q"))}
    assert sum(p.numel() for p in taps.values()) == 2 * (2 * 4 + 4 * 3)  # layers; KV, query heads
    assert all(p.grad.abs().max() > 0 for p in taps.values())


def test_spread_heads_share_out_the_tokens_before():
    """Each lag is some head's, each head has some, none looks at its own token."""
    for heads, width in ((1, 3), (2, 3), (3, 8), (3, 7), (5, 3)):
        taps = start_taps(heads, width, "spread")
        torch.testing.assert_close(taps.sum(1), torch.ones(heads))
        assert (taps[:, 0] == 0).all()
        assert (taps[:, 1:].sum(0) > 0).all()
        first = (taps > 0).int().argmax(1)
        assert (first.diff() >= 0).all()
    memory = DeltaMemory(
        MemoryConfig(key_taps="fixed", tap_width=8, tap_start="spread"), heads=3, groups=2, dim=4
    )
    assert torch.equal(memory.mix_q, memory.mix[:, None, 1:].expand(-1, 2, -1))


def test_by_key_the_same_words_are_found_whatever_queries_are():
    """Raw queries say nothing; the head that looks three words back finds the name's value."""
    config = MemoryConfig(
        key_taps="fixed",
        tap_width=4,
        tap_start="spread",
        read_with="keys",
        feature_map="l2",
        beta="fixed",
        scale_values=False,
    )
    memory = DeltaMemory(config, heads=3, groups=2, dim=16)
    one, two, a, b, v1, v2, end = torch.eye(16)[:7]
    told = torch.stack([one, a, b, v1, end, end, end, two, a, b, v2, end, end, end])
    asked = torch.stack([one, a, b, end, end, end, two, a, b])
    whole = torch.cat((told, asked)).repeat(1, 3)[None]
    out, state = memory(torch.zeros(1, len(told) + len(asked), 96), whole, whole)
    for place, right, wrong in ((16, v1, v2), (22, v2, v1)):
        for group in out[0, place].view(3, 2, 16)[2]:
            assert group @ right > 0.4
            assert (group @ wrong).abs() < 1e-6
    assert state.asked_BTHGD.shape[1] == 0  # what was asked is in the keys' tail


def test_a_centre_by_key_starts_at_the_keys_mean(ids):
    model = tiny.build("llama").requires_grad_(False)
    changes = {"memory__key_taps": "learnt", "memory__centre": "learnt"}
    adapter = attach(model, HEARD.replaced(**changes, memory__read_with="keys"), ids[0].tolist())
    deltas = [m for m in model.modules() if isinstance(m, DeltaMemory)]
    assert deltas
    assert adapter.gates()
    for delta in deltas:
        assert delta.centre_k.abs().max() > 0
        assert torch.equal(delta.centre_q, delta.centre_k[:, None].expand_as(delta.centre_q))


def test_reading_by_keys_or_spreading_taps_without_any_is_refused():
    with pytest.raises(Refusal, match=r'memory.read-with = "keys" with memory.key-taps = "off"'):
        RunConfig().replaced(memory__read_with="keys")
    with pytest.raises(Refusal, match=r'memory.tap-start = "spread" with memory.tap-width = 2'):
        RunConfig().replaced(memory__key_taps="learnt", memory__tap_start="spread")
    with pytest.raises(Refusal, match=r"memory.read-with.*keyz"):
        RunConfig().replaced(memory__read_with="keyz")


def test_a_width_without_taps_is_refused():
    with pytest.raises(Refusal, match=r"memory.tap-width = 4 with memory.key-taps"):
        RunConfig().replaced(memory__tap_width=4)
    with pytest.raises(Refusal, match=r"memory.tap-width = 1"):
        RunConfig().replaced(memory__key_taps="learnt", memory__tap_width=1)
