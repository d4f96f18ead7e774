# SPDX-License-Identifier: Apache-2.0
"""When the delta rule goes by flash-linear-attention, and that it is laid out rightly on the way.

The choice is a function of facts and the layout is tested against a kernel written here from fla's
documented signature; the real kernel needs an NVIDIA GPU and is skipped elsewhere, aloud.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import DeltaMemory
from fedloom.config import MemoryConfig, RunConfig
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.ops.delta_rule import delta_rule, naive_delta_rule
from fedloom.ops.kernels import SHORT, choose, fla_installed, through_fla

CAN = {
    "device": "cuda",
    "dtype": torch.bfloat16,
    "installed": True,
    "rule": "explicit",
    "read_before_write": False,
    "truncate_chunks": 0,
    "dim": 64,
}
CANNOT = [
    ({"device": "cpu"}, "needs an NVIDIA GPU and the model is on cpu"),
    ({"device": "mps"}, "needs an NVIDIA GPU"),
    ({"installed": False}, "flash-linear-attention is not installed"),
    ({"dtype": torch.float32}, "half precision and the model is float32"),
    ({"dtype": torch.float64}, "half precision"),
    ({"rule": "hebbian"}, 'no memory.rule = "hebbian"'),
    ({"read_before_write": True}, "reads after the write"),
    ({"truncate_chunks": 2}, "does not cut the gradient"),
    ({"dim": 512}, "heads up to 256 wide and these are 512"),
]


@pytest.mark.parametrize("more", [{}, {"dtype": torch.float16}, {"rule": "proximal"}, {"dim": 256}])
def test_auto_and_fla_take_the_kernel_where_it_can_do_the_work(more):
    assert choose("auto", **{**CAN, **more}) == "fla"
    assert choose("fla", **{**CAN, **more}) == "fla"
    assert choose("torch", **{**CAN, **more}) == "torch"


@pytest.mark.parametrize(("lacking", "said"), CANNOT)
def test_elsewhere_auto_is_torch_and_fla_is_refused_in_one_line(lacking, said):
    facts = {**CAN, **lacking}
    assert choose("auto", **facts) == choose("torch", **facts) == "torch"
    with pytest.raises(Refusal, match=said) as caught:
        choose("fla", **facts)
    assert "\n" not in str(caught.value)
    assert 'memory.kernel = "fla"' in str(caught.value)


def test_short_stretches_go_by_torch():
    assert choose("fla", **CAN, tokens=SHORT) == "torch"
    assert choose("fla", **CAN, tokens=SHORT + 1) == "fla"
    with pytest.raises(Refusal):  # insisting is checked on short stretches too
        choose("fla", **{**CAN, "device": "cpu"}, tokens=1)
    with pytest.raises(ValueError, match="expected one of auto, torch, fla"):
        choose("triton", **CAN)


def kernel_of_fla(q, k, v, beta, scale=None, initial_state=None, output_final_state=False):
    """The explicit rule in fla's layout, [B, T, H, K] and one memory a head, token by token."""
    B, _, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(q.dtype)
    out = []
    for q_t, k_t, v_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, beta)), strict=True):
        error = v_t - torch.einsum("bhk,bhkv->bhv", k_t, S)
        S = S + torch.einsum("bhk,bhv->bhkv", beta_t[..., None] * k_t, error)
        out.append(scale * torch.einsum("bhk,bhkv->bhv", q_t, S))
    return torch.stack(out, 1), S.float() if output_final_state else None


def stream(T: int, G: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Draw q, k, v, beta and state with unit queries and keys."""
    random = torch.Generator().manual_seed(0)
    q, k, v, S = (
        torch.randn(*shape, generator=random, dtype=torch.float64)
        for shape in ((2, T, 3, G, 16), (2, T, 3, 16), (2, T, 3, 16), (2, 3, 16, 16))
    )
    beta = torch.rand(2, T, 3, generator=random, dtype=torch.float64)
    inputs = (normalize(q, dim=-1), normalize(k, dim=-1), v, beta)
    return [x.to(device, dtype).requires_grad_() for x in inputs] + [
        S.to(device, torch.float32).requires_grad_()
    ]


def results(out: Tensor, state: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return outputs and the gradients of a loss that weighs outputs and state."""
    loss = out.double().sin().sum() + state.double().cos().sum()
    return [out, state, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("rule", ["explicit", "proximal"])
def test_the_layout_for_fla_computes_our_rule(rule, G, begun):
    """Groups repeated and taken back, no scale, states carried: outputs, state, all gradients."""
    *tokens, S = stream(21, G, torch.float64)
    given, state = ([*tokens, S], S) if begun else (tokens, None)
    ours = results(*naive_delta_rule(*tokens, state, rule=rule), given)
    q, k, v, beta = tokens
    if rule == "proximal":  # one more factor of the step, and fla need not know
        beta = beta / (1 + beta * k.square().sum(-1))
    fla = results(*through_fla(q, k, v, beta, state, run=kernel_of_fla), given)
    for one, other in zip(fla, ours, strict=True):
        # the state crosses in float32, as fla keeps it
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=2e-6)
    assert fla[1].shape == (2, 3, 16, 16)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_on_the_cpu_auto_is_torch_to_the_bit(kernel):
    inputs = stream(70, 2, torch.bfloat16)
    plain, state = delta_rule(*inputs)
    again, same = delta_rule(*inputs, kernel=kernel)
    assert torch.equal(plain, again)
    assert torch.equal(state, same)


def test_insisting_on_fla_here_is_refused_before_anything_hangs():
    """On a float32 CPU model, whatever is installed."""
    model = tiny.build("llama")
    with pytest.raises(Refusal, match="needs an NVIDIA GPU and the model is on cpu"):
        attach(model, RunConfig().replaced(memory__kernel="fla"))
    assert not any("lora" in name for name, _ in model.named_modules())
    q, k, v = torch.randn(3, 1, 5, 32).unbind()
    memory = DeltaMemory(MemoryConfig(kernel="fla"), heads=2, groups=1, dim=16)
    with pytest.raises(Refusal, match="NVIDIA GPU"):
        memory(q, k, v)


HERE = "no NVIDIA GPU" if not torch.cuda.is_available() else "flash-linear-attention is missing"


@pytest.mark.skipif(
    not (torch.cuda.is_available() and fla_installed()),
    reason=f"{HERE}: fla's own kernel is NOT tested on this machine",
)
@pytest.mark.parametrize("rule", ["explicit", "proximal"])
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_real_kernel_is_close_to_ours(rule, G, dtype):
    inputs = stream(200, G, dtype, "cuda")
    fla = results(*delta_rule(*inputs, rule=rule, kernel="fla"), inputs)
    ours = results(*delta_rule(*inputs, rule=rule), inputs)
    for one, other in zip(fla, ours, strict=True):
        # half precision inside the kernel: 8 bits of bfloat16, summed over 200 tokens
        assert (one.double() - other.double()).norm() < 2e-2 * other.double().norm()
    assert fla[1].dtype == torch.float32
