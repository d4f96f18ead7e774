# SPDX-License-Identifier: Apache-2.0
"""Where the sequences lie in a batch: padding on either side, several documents in one row.

The memory must start from zero at each sequence and must not see padding, and its step size pools
the last three *real* keys.  Instead of teaching all that to the recurrence, the tokens of each
sequence are moved to a row of their own, left-aligned, and moved back afterwards.
"""

# Shapes: B batch row, T token of a row, N sequence, L token of a sequence.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The map between rows of a batch and the sequences in them."""

    take_NL: Tensor
    """Flat position ``b * T + t`` of each sequence's token; 0 where ``real_NL`` is False."""
    real_NL: Tensor
    back_BT: Tensor
    """Flat position ``n * L + l`` of each row's token; 0 where ``used_BT`` is False."""
    used_BT: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """Bring ``x`` [B, T, ...] to [N, L, ...]; places beyond a sequence's end hold zeros."""
        rows = x.flatten(0, 1)[self.take_NL]
        return rows * self.real_NL.reshape(*self.real_NL.shape, *[1] * (x.dim() - 2)).to(x.dtype)

    def scatter(self, x: Tensor) -> Tensor:
        """Bring ``x`` [N, L, ...] back to [B, T, ...]; padding receives zeros."""
        rows = x.flatten(0, 1)[self.back_BT]
        return rows * self.used_BT.reshape(*self.used_BT.shape, *[1] * (x.dim() - 2)).to(x.dtype)


def layout(used_BT: Tensor | None, position_BT: Tensor | None) -> Layout | None:
    """Find the sequences of a batch, or ``None`` when each row is one sequence without padding.

    A token starts a sequence if it is the first real one of its row or if its position does not
    follow the position of the real token before it (documents packed into one row).

    Parameters
    ----------
    used_BT : Tensor, optional
        True for tokens, False for padding.
    position_BT : Tensor, optional
        Position ids, with a batch dimension of 1 or B.
    """
    packed = position_BT is not None and bool((position_BT.diff(dim=1) != 1).any())
    if used_BT is None and not packed:
        return None
    if used_BT is None:
        assert position_BT is not None
        used_BT = torch.ones_like(position_BT, dtype=torch.bool)
    used_BT = used_BT.bool()
    if bool(used_BT.all()) and not packed:
        return None
    return _layout(used_BT, _sequence_ids(used_BT, position_BT if packed else None))


def _sequence_ids(used_BT: Tensor, position_BT: Tensor | None) -> Tensor:
    """Number the sequences over the whole batch; the value at padding means nothing."""
    B, T = used_BT.shape
    flat = used_BT.flatten()
    row = torch.arange(B, device=flat.device).repeat_interleave(T)[flat]
    starts = torch.ones_like(row, dtype=torch.bool)
    starts[1:] = row[1:] != row[:-1]
    if position_BT is not None:
        position = position_BT.expand(B, T).flatten()[flat]
        starts[1:] |= position[1:] != position[:-1] + 1
    ids = torch.zeros(B * T, dtype=torch.long, device=flat.device)
    ids[flat] = starts.long().cumsum(0) - 1
    return ids.view(B, T)


def _layout(used_BT: Tensor, id_BT: Tensor) -> Layout:
    T = used_BT.shape[1]
    where = used_BT.flatten().nonzero().squeeze(1)
    ids = id_BT.flatten()[where]
    lengths = torch.bincount(ids)
    first = lengths.cumsum(0) - lengths
    place = torch.arange(len(where), device=where.device) - first[ids]
    N, L = len(lengths), int(lengths.max())
    take = torch.zeros(N, L, dtype=torch.long, device=where.device)
    real = torch.zeros(N, L, dtype=torch.bool, device=where.device)
    take[ids, place], real[ids, place] = where, True
    back = torch.zeros(used_BT.numel(), dtype=torch.long, device=where.device)
    back[where] = ids * L + place
    return Layout(take, real, back.view(-1, T), used_BT)
