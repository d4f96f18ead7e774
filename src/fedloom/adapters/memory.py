# SPDX-License-Identifier: Apache-2.0
"""A delta-rule memory beside attention.

FedNL (arXiv 2605.16350, section 2.2, eq. 9, appendix B): the memory state ``S`` starts at zero for
every sequence, is rewritten by each token and read by each query.  Queries, keys and values are
those of the attention layer, before any rotary embedding; LoRA on their projections is how the
memory learns what to write.  ``S`` is a function of (parameters, context) and stays where the
context is.
"""

# Shapes: B sequence, T token, H KV head, G query heads a KV head, D head dim.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from fedloom.adapters.caches import Span, WindowLayer
from fedloom.config import MemoryConfig
from fedloom.ops.delta_rule import delta_rule
from fedloom.ops.kernels import SHORT, choose, fla_installed

_EPS = 1e-6
_POOLED = 3  # raw keys that the step size looks at
_OWN = 0.3  # a tapped key's share of its token's own; the rest is shared out among those before it


@dataclass(frozen=True)
class MemoryState:
    """All that a layer keeps of a context, whatever its length."""

    S_BHDD: Tensor
    tail_BTHD: Tensor
    """The last raw keys: two, which the next token's step size pools, or all that taps reach."""
    asked_BTHGD: Tensor
    """The last raw queries that taps reach; none with keys of one or two tokens."""
    seen_B: Tensor
    """Tokens so far; 0 for a row that was all padding, whose first key is still to come."""


class MemoryCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """Hugging Face's cache with a memory state for each layer, for decoding token by token.

    The states follow the rows of the cache when ``generate`` reorders, repeats or selects them.
    A write cannot be undone, so the cache cannot be cropped (assisted decoding needs that).  An
    adapter with a window narrows its layers at the first token (``slide``): the cache then has a
    constant size, whatever the context's length.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.memory: dict[int, MemoryState] = {}
        self.span: Span | None = None
        """What the windowed layers hold; ``None`` while all layers hold every key."""

    def slide(self, window: int, sinks: int, layers: Sequence[int]) -> None:
        """Let these layers hold no more than a window needs; a cache in use stays as it is.

        Raises
        ------
        ValueError
            If the cache belongs to an adapter with another window.
        """
        if self.span is None and self.get_seq_length() == 0:
            self.span = Span(window, sinks)
            for layer in layers:
                self.layers[layer] = WindowLayer(self.span)
        elif self.span and (self.span.window, self.span.sinks) != (window, sinks):
            raise ValueError(
                f"a cache of window {self.span.window} and {self.span.sinks} sinks, the adapter"
                f" has {window} and {sinks}: use a cache of its own"
            )

    def reset(self) -> None:
        """Forget all."""
        super().reset()
        self.memory.clear()
        if self.span is not None:
            self.span.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each beam continue the row that it came from."""
        super().reorder_cache(beam_idx)
        self._pick(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self._pick(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)
        counts = [state.seen_B for state in self.memory.values()]
        if self.span is not None and self.span.count_B is not None:
            counts.append(self.span.count_B)
        rows = len(counts[0]) if counts else 0
        self._pick(torch.arange(rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what the memory wrote cannot be taken back."""
        if tokens_to_remove:
            raise ValueError("a MemoryCache cannot be cropped: start again from the prompt")

    @property
    def is_croppable(self) -> bool:
        """Tell ``generate`` so."""
        return False

    def _pick(self, rows: Tensor) -> None:
        if self.span is not None:
            self.span.pick(rows)
        for layer, state in self.memory.items():
            at = rows.to(state.S_BHDD.device)
            self.memory[layer] = MemoryState(*(x[at] for x in vars(state).values()))


class DeltaMemory(nn.Module):
    """Write each token's (key, value), read with its queries.

    Parameters
    ----------
    heads, groups, dim : int
        KV heads, query heads for each of them, and head dimension.  One state a KV head serves
        all its query heads: with keys, values and steps shared, their states would be equal.
    """

    def __init__(self, config: MemoryConfig, *, heads: int, groups: int, dim: int) -> None:
        super().__init__()
        self.config, self.heads, self.groups, self.dim = config, heads, groups, dim
        train = config.beta_trainable and config.beta == "token"
        taps = torch.full((heads, dim, _POOLED), 1 / _POOLED)
        self.taps = nn.Parameter(taps, requires_grad=train)
        self.bias = nn.Parameter(torch.zeros(heads, dim), requires_grad=train)
        if config.centre == "learnt":
            self.centre_q = nn.Parameter(torch.zeros(heads, groups, dim))
            self.centre_k = nn.Parameter(torch.zeros(heads, dim))
        self.width = 1 if config.key_taps == "off" else config.tap_width
        self.kept = max(_POOLED, self.width) - 1
        """Raw keys before a stretch that it looks back at."""
        self.by_key = config.read_with == "keys"
        self.asked = 0 if self.by_key else max(0, self.width - 2)
        """And raw queries."""
        learnt = config.key_taps == "learnt"
        if self.width > 1:
            mix = start_taps(heads, self.width, config.tap_start)
            self.mix = nn.Parameter(mix, requires_grad=learnt)
        if self.width > 2:
            before = F.normalize(mix[:, None, 1:], p=1, dim=-1).repeat(1, groups, 1)
            self.mix_q = nn.Parameter(before, requires_grad=learnt)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: MemoryState | None = None,
        real: Tensor | None = None,
        truncate_chunks: int = 0,
    ) -> tuple[Tensor, MemoryState]:
        """Run the memory over a stretch of tokens.

        Parameters
        ----------
        q, k, v : Tensor
            Raw projections, [B, T, H * G * D], [B, T, H * D], [B, T, H * D].
        state : MemoryState, optional
            Where an earlier stretch of the same sequences ended; ``None`` is a fresh start.
        real : Tensor, optional
            [B, T], False beyond a sequence's end: such places write nothing.

        Returns
        -------
        Tensor
            What was read, [B, T, H * G * D], in float32 at least.
        MemoryState
            The state after the last real token.
        """
        compute = torch.promote_types(q.dtype, torch.float32)
        q_BTHGD = q.to(compute).unflatten(-1, (self.heads, self.groups, self.dim))
        k_BTHD = k.to(compute).unflatten(-1, (self.heads, self.dim))
        v_BTHD = v.to(compute).unflatten(-1, (self.heads, self.dim))
        window, asked = self._with_tails(k_BTHD, q_BTHGD, state)
        beta = self._step_size(window[:, self.kept - (_POOLED - 1) :])
        if real is not None:
            beta = beta * real[..., None]
        if self.config.scale_values:
            v_BTHD = v_BTHD * self.dim**-0.5
        if self.config.rule == "none":
            beta = torch.zeros_like(beta)
        rows, length = k.shape[:2]
        tokens = torch.full((rows,), length, device=k.device) if real is None else real.sum(1)
        seen = torch.zeros_like(tokens) if state is None else state.seen_B
        source, back = (window[..., None, :], self.kept) if self.by_key else (asked, self.asked)
        mixed = self._tapped("mix_q", source, back).expand(-1, -1, -1, self.groups, -1)
        reading = self._features(self._less(mixed, "centre_q"))
        writing = self._features(self._less(self._tapped("mix", window, self.kept), "centre_k"))
        kernel = chosen_kernel(self.config, q, self.dim, truncate_chunks, q.shape[1])
        narrow = q.dtype if kernel == "fla" else compute
        inputs = tuple(x.to(narrow) for x in (reading, writing, v_BTHD, beta))
        S = None if state is None else state.S_BHDD
        out, S = self._run(inputs, S, seen, tokens, truncate_chunks, kernel)
        tails = (_last(window, real, self.kept), _last(asked, real, self.asked))
        return out.flatten(2).to(compute), MemoryState(S, *tails, seen + tokens)

    def _run(
        self,
        inputs: tuple[Tensor, ...],
        S: Tensor | None,
        seen_B: Tensor,
        tokens_B: Tensor,
        truncate_chunks: int,
        kernel: str,
    ) -> tuple[Tensor, Tensor]:
        """Run the rule over (q, k, v, beta); with ``reset-every``, forget S at each boundary."""
        every, outs = self.config.reset_every, []
        for start, end in _stretches(seen_B, inputs[0].shape[1], every):
            if every and S is not None:  # padding past a row's end is no boundary
                kept = ((seen_B + start) % every != 0) | (start >= tokens_B)
                S = torch.where(kept[:, None, None, None], S, torch.zeros_like(S))
            q, k, v, beta = (x[:, start:end] for x in inputs)
            out, S = delta_rule(
                q,
                k,
                v,
                beta,
                S,
                rule="explicit" if self.config.rule == "none" else self.config.rule,
                read_before_write=self.config.read_before_write,
                chunk=self.config.chunk,
                truncate_chunks=truncate_chunks,
                kernel=kernel,
            )
            outs.append(out)
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)), cast(Tensor, S)

    def _features(self, x: Tensor) -> Tensor:
        if self.config.feature_map == "silu-l2":
            x = F.silu(x)
        return F.normalize(x, dim=-1, eps=_EPS)

    def _less(self, x: Tensor, centre: str) -> Tensor:
        return x - getattr(self, centre).to(x) if self.config.centre == "learnt" else x

    def _with_tails(self, k: Tensor, q: Tensor, state: MemoryState | None) -> tuple[Tensor, Tensor]:
        """Put what came before this stretch in front; a sequence's first token stands in."""
        tails = (None, None) if state is None else (state.tail_BTHD, state.asked_BTHGD)
        windows = []
        for x, tail, count in zip((k, q), tails, (self.kept, self.asked), strict=True):
            if not count:  # narrow taps: spare the queries a copy
                windows.append(x)
                continue
            first = x[:, :1].expand(-1, count, *x.shape[2:])
            if state is not None:
                begun = state.seen_B.view(-1, *[1] * (x.ndim - 1)) > 0
                first = torch.where(begun, cast(Tensor, tail), first)
            windows.append(torch.cat((first, x), dim=1))
        return windows[0], windows[1]

    def _tapped(self, taps: str, window: Tensor, back: int) -> Tensor:
        """Mix raw keys or queries with those before them; ``back`` of them precede the stretch.

        A token's own key finds the token itself; what a reader asks for is what came after it.
        Keys of ``w`` taps bind a value to the ``w - 1`` tokens that stood before it, and a query
        is a mix of as many, its own the last: where it stands, the value comes next.  DeltaNet's
        short convolutions do so for each channel, and for values; here it is a number a head.
        A pretrained head's queries are made to look for other things than the asking words: read
        with the keys' mix (``read-with``), the words of a name match themselves.
        """
        weights = getattr(self, taps).to(window)[..., None] if hasattr(self, taps) else None
        if weights is None:
            return window[:, back:]
        length = window.shape[1] - back
        lags = (window[:, back - j : back - j + length] for j in range(weights.shape[-2]))
        return cast(Tensor, sum(w * x for w, x in zip(weights.unbind(-2), lags, strict=True)))

    def _step_size(self, window: Tensor) -> Tensor:
        """Step ``beta`` [B, T, H]: sigmoid of the causal three-token pool of raw keys (TPTT).

        TPTT has one step a channel; a scalar a head, the channels' mean, keeps each transition a
        Householder-type factor as eq. (12) needs.
        """
        T = window.shape[1] - (_POOLED - 1)
        if self.config.beta == "fixed":
            beta = window.new_full((window.shape[0], T, self.heads), 0.5)
        else:
            each = torch.einsum("bthd,hdj->jbth", window, self.taps.to(window)) / self.dim
            pooled = sum(each[j, :, j : j + T] for j in range(_POOLED))
            beta = torch.sigmoid(pooled + self.bias.to(window).mean(-1))
        return 2 * beta if self.config.negative_eigenvalues else beta


def start_taps(heads: int, width: int, start: str) -> Tensor:
    """Return each head's weights at the start, [heads, width], own token first; rows sum to 1.

    >>> start_taps(1, 3, "even"), start_taps(2, 4, "spread")
    (tensor([[0.3000, 0.3500, 0.3500]]), tensor([[0.0000, 1.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]]))
    """
    before = width - 1
    if start == "even":
        return torch.tensor([_OWN, *[(1 - _OWN) / before] * before]).repeat(heads, 1)
    taps = torch.zeros(heads, width)
    for head in range(heads):
        first, end = head * before // heads, (head + 1) * before // heads
        run = slice(1 + first, 1 + max(end, first + 1))
        taps[head, run] = 1.0
    return F.normalize(taps, p=1, dim=1)


def _stretches(seen_B: Tensor, length: int, every: int) -> list[tuple[int, int]]:
    """Cut a stretch of tokens wherever some row has seen a multiple of ``every``; 0 never cuts."""
    if not every:
        return [(0, length)]
    offsets = {int(seen) % every for seen in seen_B}
    cuts = {cut for offset in offsets for cut in range(-offset % every, length, every)}
    edges = sorted({0, length} | cuts)
    return list(itertools.pairwise(edges))


def chosen_kernel(
    config: MemoryConfig, raw: Tensor, dim: int, truncate_chunks: int, tokens: int = SHORT + 1
) -> str:
    """Return ``torch`` or ``fla`` for projections like ``raw`` and a stretch of so many tokens.

    Raises
    ------
    Refusal
        If the recipe insists on fla and it cannot be had.
    """
    return choose(
        config.kernel,
        device=raw.device.type,
        dtype=raw.dtype,
        installed=fla_installed(),
        rule=config.rule,
        read_before_write=config.read_before_write,
        truncate_chunks=truncate_chunks,
        dim=dim,
        tokens=tokens,
    )


def _last(window: Tensor, real: Tensor | None, count: int) -> Tensor:
    """Return the raw keys or queries that end each sequence, [B, count, ...]."""
    if real is None:
        return window[:, window.shape[1] - count :]
    ends = real.sum(1)[:, None] + torch.arange(count, device=window.device)
    return window[torch.arange(len(window), device=window.device)[:, None], ends]
