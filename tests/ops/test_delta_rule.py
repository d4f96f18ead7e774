# SPDX-License-Identifier: Apache-2.0
"""Laws of FedNL's memory, and the equality of the chunkwise rule with the recurrence as printed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize, pad

from fedloom.ops.delta_rule import RULES, delta_rule, naive_delta_rule

NAMES = ("out", "state", "q", "k", "v", "beta", "S0")
# Two orders of the same float64 sums; 1e-10 is the bound that the project set itself, and what is
# seen is below 1e-12.
EXACT = 1e-10


def stream(
    B: int = 2,
    T: int = 65,
    H: int = 2,
    G: int = 1,
    K: int = 8,
    V: int = 6,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    step: float = 1.0,
) -> list[Tensor]:
    """Return random q, k, v, beta, state with unit keys and beta in (0, step)."""
    random = torch.Generator().manual_seed(seed)
    q, k, v, S = (
        torch.randn(*shape, generator=random, dtype=torch.float64)
        for shape in ((B, T, H, G, K), (B, T, H, K), (B, T, H, V), (B, H, K, V))
    )
    beta = torch.rand(B, T, H, generator=random, dtype=torch.float64) * step
    return [x.to(dtype).requires_grad_() for x in (q, normalize(k, dim=-1), v, beta, S)]


def everything(rule_fn, inputs, **options) -> dict[str, Tensor]:
    """Return outputs, final state and the gradients of a loss that weighs all of both."""
    out, state = rule_fn(*inputs, **options)
    random = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=random, dtype=x.dtype)).sum() for x in (out, state)
    )
    values = (out, state, *torch.autograd.grad(loss, inputs))
    return dict(zip(NAMES, values, strict=True))


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    for name in NAMES:
        gap = (left[name] - right[name]).abs().max().item() if left[name].numel() else 0.0
        assert gap < tolerance, f"{name} differs by {gap:.1e}"


CASES = [
    pytest.param(
        T, C, G, rule, before, id=f"T{T}-C{C}-G{G}-{rule}-{'before' if before else 'after'}"
    )
    for T in (1, 7, 63, 64, 65, 130)
    for C in sorted({1, 7, 16, 64, T})
    for G in (1, 3)
    for rule in RULES
    for before in (False, True)
    if (before, rule, G) in {(False, "explicit", 1), (False, "explicit", 3), (True, "explicit", 3)}
    or (T in (7, 65) and C in (7, 16, 64) and G == 3)
]


@pytest.mark.parametrize(("T", "C", "G", "rule", "before"), CASES)
def test_chunks_equal_the_recurrence(T, C, G, rule, before):
    inputs = stream(T=T, G=G)
    options = {"rule": rule, "read_before_write": before}
    naive = everything(naive_delta_rule, inputs, **options)
    assert_same(everything(delta_rule, inputs, **options, chunk=C), naive, EXACT)


def test_many_parts_equal_the_recurrence():
    """More chunks than the cache-sized parts hold, so that states cross part borders."""
    inputs = stream(B=1, T=700, H=3, K=64, V=64)
    naive = everything(naive_delta_rule, inputs)
    assert_same(everything(delta_rule, inputs, chunk=16), naive, EXACT)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 40),
    H=st.integers(1, 3),
    G=st.integers(1, 3),
    K=st.integers(1, 9),
    V=st.integers(1, 9),
    chunk=st.integers(1, 45),
    rule=st.sampled_from(RULES),
    before=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_sizes_equal_the_recurrence(B, T, H, G, K, V, chunk, rule, before, seed):
    inputs = stream(B, T, H, G, K, V, seed=seed)
    options = {"rule": rule, "read_before_write": before}
    naive = everything(naive_delta_rule, inputs, **options)
    assert_same(everything(delta_rule, inputs, **options, chunk=chunk), naive, EXACT)


@pytest.mark.parametrize("rule", RULES)
def test_gradcheck(rule):
    inputs = stream(B=1, T=5, H=1, G=2, K=3, V=2)
    assert torch.autograd.gradcheck(lambda *x: delta_rule(*x, rule=rule, chunk=2), inputs)


def test_float32_stays_close_to_float64():
    """The same numbers rounded to float32; about 1e-6 is seen, 1e-5 leaves room for other BLAS."""
    inputs = stream(T=130, K=32, V=32)
    single = [x.detach().float().requires_grad_() for x in inputs]
    exact, rounded = everything(delta_rule, inputs), everything(delta_rule, single)
    for name in ("out", "state"):
        assert (rounded[name] - exact[name]).norm() < 1e-5 * exact[name].norm()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [1, 16, 33, 64])
def test_a_split_stream_equals_the_whole(cut, rule):
    *tokens, S = (x.detach() for x in stream(T=65, G=2))
    out, state = delta_rule(*tokens, S, rule=rule, chunk=16)
    head, middle = delta_rule(*(x[:, :cut] for x in tokens), S, rule=rule, chunk=16)
    tail, end = delta_rule(*(x[:, cut:] for x in tokens), middle, rule=rule, chunk=16)
    assert (torch.cat((head, tail), dim=1) - out).abs().max() < EXACT
    assert (end - state).abs().max() < EXACT


def test_decoding_token_by_token_equals_prefill():
    *tokens, S = (x.detach() for x in stream(T=20, G=3))
    out, state = delta_rule(*tokens, S, chunk=8)
    for t in range(20):
        o, S = delta_rule(*(x[:, t : t + 1] for x in tokens), S)
        assert (o[:, 0] - out[:, t]).abs().max() < EXACT
    assert (S - state).abs().max() < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 5), (16, 40)])
def test_padding_with_beta_zero_changes_nothing(left, right, rule):
    """Pads are shifted by chunk borders, so sums are cut elsewhere and agree up to rounding."""
    q, k, v, beta, S = (x.detach() for x in stream(T=30))
    out, state = delta_rule(q, k, v, beta, S, rule=rule, chunk=16)

    def padded(x: Tensor, value: float) -> Tensor:
        return pad(x, (0, 0) * (x.dim() - 2) + (left, right), value=value)

    noisy = [padded(x, value) for x, value in zip((q, k, v, beta), (3, 2, 9, 0), strict=True)]
    longer, same = delta_rule(*noisy, S, rule=rule, chunk=16)
    assert (longer[:, left : left + 30] - out).abs().max() < EXACT
    assert (same - state).abs().max() < EXACT


def test_no_token_is_no_change():
    *_, S = inputs = stream(T=0)
    out, state = delta_rule(*inputs)
    assert out.shape == (2, 0, 2, 1, 6)
    assert torch.equal(state, S)


def write(S: Tensor, k: Tensor, v: Tensor, beta: float, **options) -> Tensor:
    """Write one pair into one memory [K, V]."""
    step = torch.full((1, 1, 1), beta, dtype=S.dtype)
    key, value = k.view(1, 1, 1, -1), v.view(1, 1, 1, -1)
    return delta_rule(key[:, :, :, None], key, value, step, S[None, None], **options)[1][0, 0]


def pair(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    _, k, v, _, S = (x.detach() for x in stream(B=1, T=1, H=1, seed=seed))
    return S[0, 0], k[0, 0, 0], v[0, 0, 0]


def test_a_full_step_stores_the_value_and_a_rewrite_replaces_it():
    S, k, v = pair()
    stored = write(S, k, v, 1.0)
    # A few roundings of numbers near 1: 2e-16 each.
    assert (stored.T @ k - v).abs().max() < 2e-15
    assert (write(stored, k, 2 * v, 1.0).T @ k - 2 * v).abs().max() < 4e-15
    zero = torch.zeros_like(S)
    piled = write(write(zero, k, v, 1.0, rule="hebbian"), k, 2 * v, 1.0, rule="hebbian")
    assert (piled.T @ k - 3 * v).abs().max() < 4e-15


def test_an_explicit_step_is_a_gradient_step():
    S, k, v = pair()
    leaf = S.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(0.5 * (leaf.T @ k - v).square().sum(), leaf)
    assert (write(S, k, v, 0.3) - (S - 0.3 * gradient)).abs().max() < 1e-15  # one rounding


@pytest.mark.parametrize("length", [0.5, 1.0, 4.0])
def test_a_proximal_step_minimises_equation_2(length):
    """Where the gradient of eq. (2) is zero: (k k^T + I / eta) S = k v^T + S_before / eta."""
    S, k, v = pair()
    k, eta = length * k, 0.7
    system = torch.outer(k, k) + torch.eye(len(k), dtype=k.dtype) / eta
    minimiser = torch.linalg.solve(system, torch.outer(k, v) + S / eta)
    # The system's condition number is below 20, so rounding stays below 1e-13.
    assert (write(S, k, v, eta, rule="proximal") - minimiser).abs().max() < 1e-13


@pytest.mark.parametrize("seed", range(3))
def test_explicit_and_proximal_part_at_second_order(seed):
    S, k, v = pair(seed)
    eta = 2.0 ** -np.arange(4, 14)
    gap = [(write(S, k, v, e) - write(S, k, v, e, rule="proximal")).norm().item() for e in eta]
    slope, _ = np.polyfit(np.log2(eta), np.log2(gap), 1)
    assert slope == pytest.approx(2.0, abs=0.1)  # the next order bends it by 0.01 at eta = 1/16


@pytest.mark.parametrize(
    ("step", "is_stable"), [(0.5, True), (1.9, True), (2.0, True), (2.1, False)]
)
def test_stable_up_to_two(step, is_stable):
    """One key, written again and again: the error is multiplied by 1 - beta |k|^2 each time."""
    k = normalize(torch.ones(1, 1, 1, 8, dtype=torch.float64), dim=-1).expand(1, 400, 1, 8)
    v, beta = torch.ones(1, 400, 1, 6).double(), torch.full((1, 400, 1), step).double()
    _, state = delta_rule(k.unsqueeze(3), k, v, beta, chunk=16)
    assert (state.abs().max().item() < 10) == is_stable


@pytest.mark.parametrize("chunk", [16, 64, 128])
def test_float32_is_stable_for_nearly_parallel_keys(chunk):
    """Where a product of powers of L overflows."""
    random = torch.Generator().manual_seed(0)
    q, k, v, _, S = (x.detach() for x in stream(B=1, T=256, K=64, V=64))
    k = normalize(torch.ones_like(k) + 0.05 * torch.randn(k.shape, generator=random), dim=-1)
    beta = 1.9 * torch.rand(k.shape[:3], generator=random).double().sqrt()
    exact, _ = naive_delta_rule(q, k, v, beta, S)
    single, _ = delta_rule(*(x.float() for x in (q, k, v, beta, S)), chunk=chunk)
    assert (single - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("token", [0, 15, 16, 40, 64])
def test_no_token_sees_the_future(token):
    q, k, v, beta, S = (x.detach() for x in stream())
    out, _ = delta_rule(q, k, v, beta, S, chunk=16)
    q, k, v, beta = (x.clone() for x in (q, k, v, beta))
    for x in (q, k, v):
        x[:, token] = 7
    beta[:, token] = 0.1
    changed, _ = delta_rule(q, k, v, beta, S, chunk=16)
    # Later tokens are multiplied by exact zeros, but BLAS may add in another order.
    assert (changed[:, :token] - out[:, :token]).abs().max().item() < 1e-12 if token else True
    assert (changed[:, token] - out[:, token]).abs().max() > 1e-3


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_a_token_reads_its_own_write_only_after_it(before):
    inputs = stream(B=1, T=20, H=1)
    out, _ = delta_rule(*inputs, read_before_write=before, chunk=8)
    (by_value,) = torch.autograd.grad(out[:, 11].sum(), inputs[2])
    assert (by_value[:, 11] == 0).all() == before
    assert (by_value[:, 12:] == 0).all()
    assert (by_value[:, 10] != 0).all()


def test_batch_items_are_independent():
    inputs = [x.detach() for x in stream(B=3)]
    out, state = delta_rule(*inputs)
    for i in range(3):
        one, end = delta_rule(*(x[i : i + 1] for x in inputs))
        assert (one - out[i : i + 1]).abs().max() < 1e-12  # BLAS may block other sizes otherwise
        assert (end - state[i : i + 1]).abs().max() < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_late_loss_reaches_the_first_chunk_unless_truncated(rule):
    inputs = stream(T=128)
    for truncate in (0, 1):
        out, _ = delta_rule(*inputs, rule=rule, chunk=16, truncate_chunks=truncate)
        grads = torch.autograd.grad(out[:, -1].sum(), inputs)
        for gradient in (*(x[:, :16] for x in grads[1:4]), grads[4]):
            assert (gradient == 0).all() if truncate else (gradient != 0).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("truncate", [1, 2, 3])
def test_truncation_equals_a_detached_state(truncate, rule):
    """What ``truncate_chunks`` means, written out: calls of so many chunks, cut between them."""
    inputs = stream(T=70, G=2)

    def by_calls(*x: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, S = x
        outs = []
        for start in range(0, 70, 8 * truncate):
            piece = [y[:, start : start + 8 * truncate] for y in tokens]
            out, S = naive_delta_rule(*piece, S.detach() if start else S, rule=rule)
            outs.append(out)
        return torch.cat(outs, dim=1), S

    whole = everything(delta_rule, inputs, rule=rule, chunk=8, truncate_chunks=truncate)
    assert_same(whole, everything(by_calls, inputs), EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_in_half_precision_out(rule, dtype):
    half = stream(dtype=dtype)
    exact = everything(delta_rule, [x.detach().double().requires_grad_() for x in half], rule=rule)
    found = everything(delta_rule, half, rule=rule)
    assert (found["out"].dtype, found["state"].dtype) == (dtype, torch.float32)
    # Computed in float32, so only the last rounding shows: half a unit of bfloat16's 8 bits.
    assert (found["out"] - exact["out"]).norm() < 2.0**-8 * exact["out"].norm()
    assert all(found[name].dtype == dtype for name in NAMES[2:])


def test_autocast_does_not_lower_the_precision():
    inputs = stream(dtype=torch.float32)
    plain = everything(delta_rule, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = everything(delta_rule, inputs)
    assert all(torch.equal(plain[name], cast[name]) for name in NAMES)


def test_wrong_shapes_are_refused_in_one_line():
    q, k, v, beta, S = stream()
    for wrong, message in [
        ((q[..., 0], k, v, beta, S), r"expected q \[B,T,H,G,K\]"),
        ((q, k[:, :3], v, beta, S), r"k is \[2, 3, 2, 8\], expected \[2, 65, 2, 8\]"),
        ((q, k, v[:1], beta, S), "v is "),
        ((q, k, v, beta[..., None], S), "beta is "),
        ((q, k, v, beta, S.mT), "state is "),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            delta_rule(*wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="expected one of explicit, proximal, hebbian"):
        delta_rule(q, k, v, beta, S, rule="oja")
    with pytest.raises(ValueError, match="chunk"):
        delta_rule(q, k, v, beta, S, chunk=0)
