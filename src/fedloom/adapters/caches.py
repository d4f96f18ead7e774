# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a windowed layer, held in constant memory: sinks and the last few tokens.

With ``memory.window = w`` a token sees itself, the ``w - 1`` tokens before it and, with
``memory.sinks``, its sequence's first ones (arXiv 2309.17453).  No later token will look at
anything else, so nothing else is held.  Keys are held after the rotary embedding, at the position
they had in the whole context.
"""

# Shapes: B row, T token of this pass, K held key, Q query, H KV head, D head dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True)
class _Pass:
    """What one forward pass does to the held keys; the same for each layer."""

    start: int
    tokens: int
    order_BK: Tensor | None
    """The window's columns with padding first; ``None`` leaves them as they are."""
    drop: int
    """So many of the window's first columns leave it."""
    rows: Tensor
    """Of the tokens that leave the window: those that are sinks, by row, column and slot."""
    columns: Tensor
    slots: Tensor


class Span:
    """Which tokens the windowed layers of one cache hold: ``[sink slots | last window - 1]``.

    The window is as wide as its longest row; padding stands on its left, wherever it stood in the
    batch.  A sink has a slot of its own, as rows reach their first token at different columns.

    Attributes
    ----------
    seen : int
        Columns read so far.
    count_B : Tensor or None
        Real tokens read so far.
    place_BK : Tensor or None
        Each held key's index in its own sequence; -1 for padding and for slots still empty.
    """

    def __init__(self, window: int, sinks: int) -> None:
        self.window, self.sinks = window, sinks
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.seen = 0
        self.count_B: Tensor | None = None
        self.place_BK: Tensor | None = None
        self.now = _Pass(0, 0, None, 0, *[torch.empty(0, dtype=torch.long)] * 3)

    def advance(
        self, rows: int, tokens: int, used_BT: Tensor | None, device: torch.device
    ) -> Tensor:
        """Take in the columns of a pass and return who may see whom, [B, 1, Q, K].

        ``K`` counts what was held and the new tokens, in this order.  The work does not depend on
        how long the context is.

        Parameters
        ----------
        used_BT : Tensor, optional
            False for padding among the new columns.
        """
        if self.count_B is None or self.place_BK is None:
            self.count_B = torch.zeros(rows, dtype=torch.long, device=device)
            self.place_BK = self.count_B.new_full((rows, self.sinks), -1)
        if len(self.count_B) != rows:
            raise ValueError(f"{rows} rows came, the cache holds {len(self.count_B)}")
        if used_BT is None:
            new_BT = self.count_B[:, None] + torch.arange(tokens, device=device)
        else:
            after = self.count_B[:, None] + used_BT.long().cumsum(1)
            new_BT = torch.where(used_BT.bool(), after - 1, -1)
        place_BK = torch.cat((self.place_BK, new_BT), dim=1)
        seen_BQK = in_sight(new_BT, place_BK, self.window, self.sinks)
        self._hold(place_BK, tokens, used_BT is not None and not bool(used_BT.all()))
        self.count_B = self.count_B + (tokens if used_BT is None else used_BT.long().sum(1))
        return seen_BQK[:, None]

    def _hold(self, place_BK: Tensor, tokens: int, padded: bool) -> None:
        """Decide what stays after this pass; a sink that leaves the window goes to its slot."""
        slots, window = place_BK.split([self.sinks, place_BK.shape[1] - self.sinks], dim=1)
        order = None
        if padded:
            order = (window >= 0).int().argsort(dim=1, stable=True)
            window = window.gather(1, order)
        drop = max(0, window.shape[1] - (self.window - 1))
        leaving = window[:, :drop]
        rows, columns = ((leaving >= 0) & (leaving < self.sinks)).nonzero().unbind(1)
        at = leaving[rows, columns]
        if len(at):
            slots = slots.clone()
            slots[rows, at] = at
        self.now = _Pass(self.seen, tokens, order, drop, rows, columns, at)
        self.place_BK = torch.cat((slots, window[:, drop:]), dim=1)
        self.seen += tokens

    def pick(self, rows: Tensor) -> None:
        """Keep these rows, in this order; one may come twice."""
        if self.count_B is not None and self.place_BK is not None:
            at = rows.to(self.count_B.device)
            self.count_B, self.place_BK = self.count_B[at], self.place_BK[at]


def in_sight(query_BQ: Tensor, key_BK: Tensor, window: int, sinks: int) -> Tensor:
    """Say which keys each query sees, [B, Q, K], from their indices in their sequence (-1: none).

    >>> in_sight(torch.tensor([[4]]), torch.arange(5)[None], window=2, sinks=1).int().tolist()
    [[[1, 0, 0, 1, 1]]]
    """
    key_B1K = key_BK[:, None]
    back = query_BQ[:, :, None] - key_B1K
    near = back < window
    if sinks:
        near = near | (key_B1K < sinks)
    return (back >= 0) & (key_B1K >= 0) & near


class WindowLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer's share of a ``Span``: sinks and the window's keys and values, [B, H, K, D].

    ``get_seq_length`` counts all tokens ever seen, so positions go on from there.
    """

    is_sliding = True
    is_croppable = False

    def __init__(self, span: Span) -> None:
        super().__init__()
        self.span = span
        self.cumulative_length = 0
        self.sink_keys = self.sink_values = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with empty slots and an empty window."""
        self.device = key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        B, H, _, D = key_states.shape
        self.sink_keys = key_states.new_zeros(B, H, self.span.sinks, D)
        self.sink_values = value_states.new_zeros(B, H, self.span.sinks, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what was held with the new keys and values behind it, then hold what stays."""
        now = self.span.now
        if (self.cumulative_length, key_states.shape[-2]) != (now.start, now.tokens):
            raise ValueError(
                f"a windowed cache at token {self.cumulative_length} was given tokens"
                f" {now.start} to {now.start + now.tokens}: an earlier pass broke off, start again"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += now.tokens
        keys = torch.cat((self.sink_keys, self.keys, key_states), dim=-2)
        values = torch.cat((self.sink_values, self.values, value_states), dim=-2)
        self.sink_keys, self.keys = self._kept(keys, self.sink_keys)
        self.sink_values, self.values = self._kept(values, self.sink_values)
        return keys, values

    def _kept(self, all_BHKD: Tensor, sinks_BHKD: Tensor) -> tuple[Tensor, Tensor]:
        now, window = self.span.now, all_BHKD[:, :, self.span.sinks :]
        if now.order_BK is not None:
            window = window.gather(2, now.order_BK[:, None, :, None].expand_as(window))
        if len(now.slots):
            sinks_BHKD = sinks_BHKD.clone()
            sinks_BHKD[now.rows, :, now.slots] = window[now.rows, :, now.columns]
        window = window[:, :, now.drop :]
        # After a long stretch a view would keep all of it alive.
        return sinks_BHKD, window.clone() if now.drop > 1 else window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Size transformers' own mask, which the adapter replaces by the span's."""
        held = min(self.cumulative_length, self.span.window - 1)
        return held + query_length, self.cumulative_length - held

    def get_seq_length(self) -> int:
        """Count the tokens seen, held or not."""
        return self.cumulative_length

    def reset(self) -> None:
        """Forget all."""
        super().reset()
        self.sink_keys = self.sink_values = torch.empty(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what left the window cannot come back."""
        if tokens_to_remove:
            raise ValueError("a windowed cache cannot be cropped: start again from the prompt")

    def pick(self, rows: Tensor) -> None:
        """Keep these rows, in this order; one may come twice."""
        if not self.is_initialized:
            return
        at = rows.to(self.keys.device)
        self.keys, self.values = self.keys[at], self.values[at]
        self.sink_keys, self.sink_values = self.sink_keys[at], self.sink_values[at]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each beam continue the row that it came from."""
        self.pick(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.pick(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.is_initialized:
            self.pick(torch.arange(len(self.keys)).repeat_interleave(repeats))
