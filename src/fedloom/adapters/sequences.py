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

    @property
    def one_a_row(self) -> bool:
        """Whether sequence ``n`` is row ``n``, so that its memory can be carried on."""
        return len(self.take_NL) == len(self.back_BT)

    def gather(self, x: Tensor) -> Tensor:
        """Bring ``x`` [B, T, ...] to [N, L, ...]; places beyond a sequence's end hold zeros."""
        rows = x.flatten(0, 1)[self.take_NL]
        return rows * self.real_NL.reshape(*self.real_NL.shape, *[1] * (x.dim() - 2)).to(x.dtype)

    def scatter(self, x: Tensor) -> Tensor:
        """Bring ``x`` [N, L, ...] back to [B, T, ...]; padding receives zeros."""
        rows = x.flatten(0, 1)[self.back_BT]
        return rows * self.used_BT.reshape(*self.used_BT.shape, *[1] * (x.dim() - 2)).to(x.dtype)


def layout(
    rows: int, used_BT: Tensor | None = None, position_BT: Tensor | None = None
) -> Layout | None:
    """Find the sequences of a batch, or ``None`` when each row is one sequence without padding.

    A token starts a sequence if it is the first real one of its row or if its position does not
    follow the position of the real token before it (documents packed into one row).  A row without
    any real token is an empty sequence.

    Parameters
    ----------
    rows : int
        B.
    used_BT : Tensor, optional
        True for tokens, False for padding.
    position_BT : Tensor, optional
        Position ids, with a batch dimension of 1 or B.
    """
    packed = position_BT is not None and bool((position_BT.diff(dim=1) != 1).any())
    if not packed:
        if used_BT is None or bool(used_BT.all()):
            return None
        position_BT = None
    elif position_BT is not None:
        position_BT = position_BT.expand(rows, -1)
        used_BT = torch.ones_like(position_BT) if used_BT is None else used_BT
    assert used_BT is not None
    return _layout(used_BT.bool(), _starts(used_BT.bool(), position_BT))


def _starts(used_BT: Tensor, position_BT: Tensor | None) -> Tensor:
    """Mark the tokens that start a sequence; in a row without tokens, its first place."""
    first = used_BT & (used_BT.long().cumsum(1) == 1)
    first[~used_BT.any(1), 0] = True
    if position_BT is None:
        return first
    flat = used_BT.flatten().nonzero().squeeze(1)
    position = position_BT.flatten()[flat]
    follows = torch.zeros_like(used_BT.flatten())
    follows[flat[1:]] = position[1:] == position[:-1] + 1
    return first | (used_BT & ~follows.view_as(used_BT))


def _layout(used_BT: Tensor, starts_BT: Tensor) -> Layout:
    B, T = used_BT.shape
    id_BT = (starts_BT.flatten().long().cumsum(0) - 1).clamp_min(0).view(B, T)
    where = used_BT.flatten().nonzero().squeeze(1)
    ids = id_BT.flatten()[where]
    lengths = torch.bincount(ids, minlength=int(starts_BT.sum()))
    place = torch.arange(len(where), device=where.device) - (lengths.cumsum(0) - lengths)[ids]
    N, L = len(lengths), max(1, int(lengths.max()))
    take = torch.zeros(N, L, dtype=torch.long, device=where.device)
    real = torch.zeros(N, L, dtype=torch.bool, device=where.device)
    take[ids, place], real[ids, place] = where, True
    back = torch.zeros(B * T, dtype=torch.long, device=where.device)
    back[where] = ids * L + place
    return Layout(take, real, back.view(B, T), used_BT)
