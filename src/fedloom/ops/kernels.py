# SPDX-License-Identifier: Apache-2.0
"""When the delta rule may go by flash-linear-attention's GPU kernel, and how it gets there.

``chunk_delta_rule`` computes the same recurrence in half precision, about 1e-2 away from the exact
one, so that a choice is made in one place, by facts alone, and never without the recipe's leave.
"""

# Shapes: B batch, T token, H KV head, G query head of a KV head, K key dim, V value dim.

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import Refusal

KERNELS = ("auto", "torch", "fla")
SHORT = 64
"""Stretches of up to so many tokens (decoding) go by torch: one chunk, and exact."""
_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256  # key dim that the kernel's state fits on chip with


@functools.cache
def fla_installed() -> bool:
    """Whether flash-linear-attention is there; looked up once, not imported."""
    return importlib.util.find_spec("fla") is not None


def choose(
    kernel: str,
    *,
    device: str,
    dtype: torch.dtype,
    installed: bool,
    rule: str,
    read_before_write: bool,
    truncate_chunks: int,
    dim: int,
    tokens: int = SHORT + 1,
) -> str:
    """Return ``torch`` or ``fla``; a function of its arguments alone.

    Parameters
    ----------
    kernel
        ``auto`` takes fla where it can do the work, ``torch`` never, ``fla`` insists.
    device, dtype
        Type of device ("cuda", "cpu", ...) and dtype of the layer's raw keys.
    installed
        Whether flash-linear-attention can be imported.
    rule, read_before_write, truncate_chunks
        As in ``delta_rule``.
    dim
        Key dimension.
    tokens
        Length of the stretch; at most ``SHORT`` tokens go by torch whatever ``kernel`` says.

    Raises
    ------
    Refusal
        For ``fla`` where it cannot do the work.

    Examples
    --------
    >>> facts = {"rule": "explicit", "read_before_write": False, "truncate_chunks": 0, "dim": 64}
    >>> choose("auto", device="cuda", dtype=torch.bfloat16, installed=True, **facts)
    'fla'
    >>> choose("auto", device="cpu", dtype=torch.bfloat16, installed=True, **facts)
    'torch'
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel = {kernel!r}: expected one of {', '.join(KERNELS)}")
    if kernel == "torch":
        return "torch"
    problems = {
        f"it needs an NVIDIA GPU and the model is on {device}": device != "cuda",
        "flash-linear-attention is not installed": not installed,
        f"it takes half precision and the model is {dtype}".replace("torch.", ""): dtype
        not in _HALF,
        f'it has no memory.rule = "{rule}"': rule not in ("explicit", "proximal"),
        "it reads after the write (memory.read-before-write = false)": read_before_write,
        "it does not cut the gradient (train.truncate-chunks = 0)": truncate_chunks > 0,
        f"it takes heads up to {_WIDEST} wide and these are {dim}": dim > _WIDEST,
    }
    found = [problem for problem, holds in problems.items() if holds]
    if found and kernel == "fla":
        raise Refusal(f'memory.kernel = "fla": {found[0]}; set memory.kernel = "auto"')
    return "torch" if found or tokens <= SHORT else "fla"


def through_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None,
    run: Callable[..., tuple[Tensor, Any]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Lay the explicit rule's arguments out as fla wants them, and back.

    fla has one memory a head, [B, T, H, K] throughout, and would scale queries by ``K ** -0.5``;
    keys, values, steps and states are repeated for the queries of a group, whose states stay equal.

    Parameters
    ----------
    q, k, v, beta, state
        As in ``delta_rule``; the first four in half precision, the state in float32.
    run
        fla's ``chunk_delta_rule``, or what has its signature.

    Returns
    -------
    Tensor
        What the queries read, [B, T, H, G, V].
    Tensor
        The memory after the last token, [B, H, K, V] in float32.
    """
    if run is None:
        from fla.ops.delta_rule import chunk_delta_rule  # only here: it needs triton

        run = chunk_delta_rule
    assert run is not None
    heads, groups = q.shape[2:4]
    k, v, beta = (x.repeat_interleave(groups, dim=2) for x in (k, v, beta))
    if state is not None:
        state = state.float().repeat_interleave(groups, dim=1)
    out, after = run(
        q.flatten(2, 3),
        k,
        v,
        beta,
        scale=1.0,
        initial_state=state,
        output_final_state=True,
    )
    return out.unflatten(2, (heads, groups)), after[:, ::groups]
