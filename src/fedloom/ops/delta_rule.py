# SPDX-License-Identifier: Apache-2.0
"""FedNL's memory: a matrix written by the delta rule and read by queries (arXiv 2605.16350).

``naive_delta_rule`` is equations (3) and (9) as printed, one token after another. ``delta_rule``
gives the same numbers a chunk at a time with matrix products only, forward and backward; its
derivation is in README.md beside this file.
"""

# Shape suffixes: B batch, T token, H KV head, G query head of a KV head, K key dim, V value dim,
# C token of a chunk, N chunk, M = B*H memory, P = N*M chunk of a memory, R = (G+1)*C reading row.
# The state is S_KV, the transpose of the paper's S.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedloom.ops.kernels import choose, fla_installed, through_fla

RULES = ("explicit", "proximal", "hebbian")
_PART = 1 << 17  # numbers an array of a part may hold, so that a part stays in cache (README.md)


def naive_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    rule: str = "explicit",
    read_before_write: bool = False,
) -> tuple[Tensor, Tensor]:
    """Write and read token by token: the truth that ``delta_rule`` is tested against.

    Takes and returns what ``delta_rule`` does.
    """
    _check(q, k, v, beta, state, rule)
    dtype, (q, k, v, beta, S) = q.dtype, _prepare(q, k, v, beta, state)
    out = []
    # unbind, as the gradient of an index q[:, t] is as long as all of q
    for q_t, k_t, v_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, beta)), strict=True):
        o, S = _step(q_t, k_t, v_t, beta_t, S, rule, read_before_write)
        out.append(o)
    return (torch.stack(out, dim=1) if out else q.new_zeros(*q.shape[:-1], v.shape[-1])).to(
        dtype
    ), S


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    rule: str = "explicit",
    read_before_write: bool = False,
    chunk: int = 64,
    truncate_chunks: int = 0,
    kernel: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Write ``v`` under key ``k`` with strength ``beta``, then read with ``q``; FedNL eq. (9).

    Parameters
    ----------
    q
        Queries [B, T, H, G, K]; the G queries of a KV head read one memory.
    k, v, beta
        Keys [B, T, H, K], values [B, T, H, V] and step sizes [B, T, H]. Stable while
        ``0 <= beta * |k|^2 <= 2``; ``beta = 0`` leaves the memory as it was (padding).
    state
        Memory before the first token [B, H, K, V]; zero if left out.
    rule
        ``explicit`` is eq. (3), one gradient step; ``proximal`` the minimiser of eq. (2);
        ``hebbian`` adds the value without taking off what the key already recalls.
    read_before_write
        Read ``S_{t-1}`` (eq. 5) instead of ``S_t`` (appendix B).
    chunk
        Tokens handled at once. Changes the speed, not the result.
    truncate_chunks
        Cut the gradient through the memory every so many chunks; 0 never cuts.
    kernel
        ``torch`` is exact; ``fla`` and ``auto`` are what ``kernels.choose`` says, half precision.

    Returns
    -------
    out, state
        What the queries read [B, T, H, G, V] in the dtype of ``q``, and the memory after the last
        token in the dtype of the computation (float32, or float64 if an input is).

    Examples
    --------
    >>> k, v, beta = torch.eye(2).view(1, 2, 1, 2), torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1)
    >>> out, state = delta_rule(k.unsqueeze(3), k, v, beta)
    >>> torch.equal(out.squeeze(3), v)
    True
    """
    _check(q, k, v, beta, state, rule)
    if chunk < 1 or truncate_chunks < 0:
        raise ValueError(
            f"expected chunk >= 1, truncate_chunks >= 0, got {chunk}, {truncate_chunks}"
        )
    (B, T, H, G, _), V, dtype = q.shape, v.shape[-1], q.dtype
    if kernel != "torch" and _goes_by_fla(kernel, q, rule, read_before_write, truncate_chunks):
        beta = _proximal(k.float(), beta.float()) if rule == "proximal" else beta
        return through_fla(q, k, v, beta.to(dtype), state)
    C = max(1, min(chunk, T))
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, beta, S = _prepare(q, k, v, beta, state)
        if rule == "proximal":
            beta = _proximal(k, beta)
        q_NBHGCK, v_NBHCV, beta_NBHC = _cut(q, C), _cut(v, C), _cut(beta, C)
        k_NBHCK = _cut(k, C)
        diagonal = -1 if read_before_write else 0
        run = _hebbian if rule == "hebbian" else _Chunkwise.apply
        out_NBHGCV, S_MKV = run(
            q_NBHGCK, k_NBHCK, v_NBHCV, beta_NBHC, S.flatten(0, 1), diagonal, truncate_chunks
        )
        out = out_NBHGCV.permute(1, 0, 4, 2, 3, 5).reshape(B, -1, H, G, V)[:, :T]
    return out.to(dtype), S_MKV.view_as(S)


def _goes_by_fla(
    kernel: str, q: Tensor, rule: str, read_before_write: bool, truncate_chunks: int
) -> bool:
    picked = choose(
        kernel,
        device=q.device.type,
        dtype=q.dtype,
        installed=fla_installed(),
        rule=rule,
        read_before_write=read_before_write,
        truncate_chunks=truncate_chunks,
        dim=q.shape[-1],
        tokens=q.shape[1],
    )
    return picked == "fla"


def _step(
    q_BHGK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    beta_BH: Tensor,
    S_BHKV: Tensor,
    rule: str,
    read_before_write: bool,
) -> tuple[Tensor, Tensor]:
    """Take one step of eq. (3), (2) or of Hebb."""
    if rule == "proximal":
        beta_BH = _proximal(k_BHK, beta_BH)
    recalled_BHV = (k_BHK.unsqueeze(-2) @ S_BHKV).squeeze(-2)
    error_BHV = v_BHV if rule == "hebbian" else v_BHV - recalled_BHV
    written = S_BHKV + k_BHK.unsqueeze(-1) * (beta_BH.unsqueeze(-1) * error_BHV).unsqueeze(-2)
    return q_BHGK @ (S_BHKV if read_before_write else written), written


def _proximal(k: Tensor, beta: Tensor) -> Tensor:
    """Step size that turns the explicit step into the exact minimiser of eq. (2)."""
    return beta / (1 + beta * k.square().sum(-1))


class _Chunkwise(torch.autograd.Function):
    """The chunkwise delta rule and its adjoint, serial over chunks in two matmuls each.

    All the rest is batched over the chunks of a part, which is small enough to stay in cache.
    Names follow README.md: ``j`` is the write key ``beta * k``, ``e`` the error that each token
    writes, ``X`` the inverse of ``I + tril(k j^T, -1)``, ``bar_x`` the gradient by ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NBHGCK: Tensor,
        k_NBHCK: Tensor,
        v_NBHCV: Tensor,
        beta_NBHC: Tensor,
        S_MKV: Tensor,
        diagonal: int,
        truncate: int,
    ) -> tuple[Tensor, Tensor]:
        N, B, H, G, C, K = q_NBHGCK.shape
        M, V = S_MKV.shape[0], S_MKV.shape[-1]
        out = q_NBHGCK.new_empty(B, N, C, H, G, V).permute(1, 0, 3, 4, 2, 5)
        errors, states = out.new_empty(N, M, C, V), out.new_empty(N + 1, M, K, V)
        inverses, eye = [], torch.eye(C, dtype=out.dtype, device=out.device)
        states[0] = S_MKV
        for part in _parts(N, M * C * K):
            q, k, j = _rows(q_NBHGCK[part], k_NBHCK[part], beta_NBHC[part])
            X = torch.linalg.solve_triangular(
                torch.bmm(k, j.mT), eye, upper=False, unitriangular=True
            )
            e = errors[part].flatten(0, 1)
            torch.bmm(X, v_NBHCV[part].reshape(-1, C, V), out=e)
            w = torch.bmm(X, k)
            w_NMCK, jT_NMKC = w.view(-1, M, C, K), j.view(-1, M, C, K).mT
            S, S_after = states[part], states[part.start + 1 : part.stop + 1]
            steps = zip(w_NMCK, jT_NMKC, errors[part], S, S_after, strict=True)
            for w_n, jT_n, e_n, S_n, S_next in steps:
                e_n.baddbmm_(w_n, S_n, alpha=-1)
                torch.baddbmm(S_n, jT_n, e_n, out=S_next)
            o = torch.bmm(q, S.flatten(0, 1)).baddbmm_(_scores(q, j, diagonal), e)
            out[part] = o.view(-1, B, H, G, C, V)
            inverses.append(X)
        ctx.save_for_backward(q_NBHGCK, k_NBHCK, beta_NBHC, errors, states, *inverses)
        ctx.diagonal, ctx.truncate = diagonal, truncate
        return out, states[N].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, bar_out: Tensor, bar_S: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(bar_out.device.type, enabled=False):
            return *_adjoint(ctx, bar_out, bar_S), None, None


def _adjoint(ctx: Any, bar_out: Tensor, bar_S: Tensor) -> tuple[Tensor, ...]:
    """Go through the parts from the last to the first, carrying dL/dS."""
    q_NBHGCK, k_NBHCK, beta_NBHC, errors, states, *inverses = ctx.saved_tensors
    (N, B, H, G, C, K), (M, V) = q_NBHGCK.shape, bar_S.shape[::2]
    bar_q, bar_k, bar_beta = (torch.empty_like(x) for x in (q_NBHGCK, k_NBHCK, beta_NBHC))
    bar_v = bar_k.new_empty(B, N, C, H, V).permute(1, 0, 3, 2, 4)
    for part, X in reversed(list(zip(_parts(N, M * C * K), inverses, strict=True))):
        q, k, j = _rows(q_NBHGCK[part], k_NBHCK[part], beta_NBHC[part])
        e, S = errors[part].flatten(0, 1), states[part].flatten(0, 1)
        bar_o = bar_out[part].reshape(-1, G * C, V)
        bar_e = torch.bmm(X.mT, torch.bmm(_scores(q, j, ctx.diagonal).mT, bar_o))
        z_NMCK, kT_NMKC = torch.bmm(X.mT, j).view(-1, M, C, K), k.view(-1, M, C, K).mT
        flow = S.new_empty(part.stop - part.start + 1, M, K, V)  # dL/dS at the chunks' borders
        torch.bmm(q.mT, bar_o, out=flow[:-1].flatten(0, 1))
        flow[-1] = bar_S
        numbers = range(part.start, part.stop)
        steps = zip(
            numbers, z_NMCK, kT_NMKC, bar_e.view(-1, M, C, V), flow[:-1], flow[1:], strict=True
        )
        for n, z_n, kT_n, bar_e_n, before, after in reversed(list(steps)):
            bar_e_n.baddbmm_(z_n, after)
            before.add_(after).baddbmm_(kT_n, bar_e_n, alpha=-1)
            if ctx.truncate and n and n % ctx.truncate == 0:
                before.zero_()
        bar_S = flow[0]
        bar_scores, bar_L = _scores(bar_o, e, ctx.diagonal), _scores(bar_e, e, -1)
        bar_j = torch.bmm(e, flow[1:].flatten(0, 1).mT)
        bar_j.baddbmm_(bar_scores.mT, q).baddbmm_(bar_L.mT, k, alpha=-1)
        bar_beta[part] = torch.linalg.vecdot(bar_j, k).view(-1, B, H, C)
        bar_rows = torch.bmm(bar_o, S.mT).baddbmm_(bar_scores, j)
        bar_q[part] = bar_rows.view(-1, B, H, G, C, K)
        bar_keys = bar_j.mul_(beta_NBHC[part].reshape(-1, C, 1))
        bar_keys.baddbmm_(bar_e, S.mT, alpha=-1).baddbmm_(bar_L, j, alpha=-1)
        bar_k[part] = bar_keys.view(-1, B, H, C, K)
        bar_v[part] = bar_e.view(-1, B, H, C, V)
    return bar_q, bar_k, bar_v, bar_beta, bar_S


def _parts(N: int, elements: int) -> list[slice]:
    """Slice N chunks into parts of about so many elements."""
    step = max(1, _PART // max(1, elements))
    return [slice(n, min(n + step, N)) for n in range(0, N, step)]


def _rows(q_NBHGCK: Tensor, k_NBHCK: Tensor, beta_NBHC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay queries, keys and write keys of each chunk on end."""
    C, K = k_NBHCK.shape[-2:]
    k = k_NBHCK.reshape(-1, C, K)
    return (
        q_NBHGCK.flatten(3, 4).reshape(-1, q_NBHGCK.shape[3] * C, K),
        k,
        k * beta_NBHC.reshape(-1, C, 1),
    )


def _scores(rows_PRK: Tensor, j_PCK: Tensor, diagonal: int) -> Tensor:
    """Match each row with the tokens that it may see: those before it, and itself on diagonal 0."""
    C = j_PCK.shape[1]
    scores = torch.bmm(rows_PRK, j_PCK.mT)
    scores.view(-1, C, C).tril_(diagonal)  # G queries are G triangles
    return scores


def _hebbian(
    q_NBHGCK: Tensor,
    k_NBHCK: Tensor,
    v_NBHCV: Tensor,
    beta_NBHC: Tensor,
    S_MKV: Tensor,
    diagonal: int,
    truncate: int,
) -> tuple[Tensor, Tensor]:
    """Sum up what is written: no residual, so no system to solve and autograd is quick enough."""
    N, B, H, G, C, K = q_NBHGCK.shape
    M, V = B * H, v_NBHCV.shape[-1]
    q = q_NBHGCK.reshape(N, M, G * C, K)
    j = (beta_NBHC.unsqueeze(-1) * k_NBHCK).reshape(N, M, C, K)
    v = v_NBHCV.reshape(N, M, C, V)
    states, S = [], S_MKV
    for n, write in enumerate((j.mT @ v).unbind()):
        S = S.detach() if n and truncate and n % truncate == 0 else S
        states.append(S)
        S = S + write
    before = torch.stack(states) if states else S.new_zeros(0, *S.shape)
    scores = (q @ j.mT).view(N, M, G, C, C).tril(diagonal).flatten(2, 3)
    out = q @ before + scores @ v
    return out.view(N, B, H, G, C, V), S


def _cut(x: Tensor, C: int) -> Tensor:
    """Cut [B, T, H, ...] into chunks [N, B, H, ..., C, dim]; a part chunk is filled with zeros."""
    T = x.shape[1]
    if T % C:
        x = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, -T % C))
    x = x.reshape(x.shape[0], x.shape[1] // C, C, *x.shape[2:]).movedim(1, 0)  # N, B, C, H, ...
    return x.movedim(2, 3) if x.dim() == 4 else x.movedim(2, -2)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring all to the dtype of the computation and make the empty memory if there is none."""
    given = [x for x in (q, k, v, beta, state) if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[-1], v.shape[-1], dtype=dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype), state.to(dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None, rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"rule = {rule!r}: expected one of {', '.join(RULES)}")
    if q.dim() != 5 or v.dim() != 4:
        raise ValueError(f"expected q [B,T,H,G,K] and v [B,T,H,V], got {[*q.shape]}, {[*v.shape]}")
    B, T, H, _, K = q.shape
    wanted = {"k": (k, (B, T, H, K)), "v": (v, (B, T, H, v.shape[-1])), "beta": (beta, (B, T, H))}
    if state is not None:
        wanted["state"] = (state, (B, H, K, v.shape[-1]))
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ValueError(
                f"{name} is {[*x.shape]}, expected {[*shape]} to go with q {[*q.shape]}"
            )
