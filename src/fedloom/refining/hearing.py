# SPDX-License-Identifier: Apache-2.0
"""How a batch of prompts is read among guests, and the shelf on which frozen slices lie.

One place decides what training, scoring and answering have in common: which part of its prompt the
receiver reads alone, and where that part is seated.
"""

# Shapes: B row, N token of a prompt, A token of an answer, V vocabulary.

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom.adapters.alignment import align
from fedloom.adapters.fused import FusedContext, pass_through
from fedloom.adapters.fuser import CacheFuser, FuserConfig, Guests
from fedloom.adapters.gates import Draw
from fedloom.models.base import Base
from fedloom.slices.geometry import Geometry, geometry_of
from fedloom.slices.slice import CacheSlice, SliceBatch, batch_of, export_cache


@dataclass(frozen=True)
class Party:
    """A frozen model that sends or receives."""

    base: Base
    geometry: Geometry

    @classmethod
    def of(cls, base: Base) -> Party:
        """Measure a model."""
        return cls(base, geometry_of(base.model, base.base_hash, base.tokenizer_hash))


def alone(config: FuserConfig, tokens: int) -> int:
    """Count the prompt's first tokens that the receiver reads without guests.

    >>> [alone(FuserConfig(tail=1), 9), alone(FuserConfig(sink="receiver"), 9)]
    [8, 1]
    """
    first = int(config.sink == "receiver")
    return min(max(tokens - config.tail if config.tail else first, first), tokens - 1)


def seated(config: FuserConfig, guests: Sequence[Guests], own: SliceBatch | None) -> list[Guests]:
    """Put what the receiver read alone behind its guests, or its first token before them."""
    if own is None:
        return list(guests)
    return [*guests, pass_through(own)] if config.tail else [pass_through(own), *guests]


class Shelf:
    """Slices of one frozen model's contexts, each read once, kept in the machine's own memory.

    They are rounded to ``dtype``, or to bfloat16 if it does not hold them, whether or not there was
    room to keep them, so that what is learnt does not depend on the room.

    Parameters
    ----------
    budget : int
        Bytes to keep in memory; contexts beyond are read each time, or from the folder.
    folder : Path, optional
        Where slices outlive the process.  A cache is as readable as its text: for public data.
    """

    def __init__(
        self,
        party: Party,
        *,
        budget: int = 1 << 30,
        dtype: torch.dtype = torch.float16,
        folder: Path | None = None,
    ) -> None:
        self.party, self._dtype, self._folder = party, dtype, folder
        self._left = budget
        self._kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def slice(self, ids: Sequence[int], ends: Sequence[int] = ()) -> CacheSlice:
        """Return the whole slice of a context, every layer and token."""
        keys, values = self._of(tuple(ids))
        model = self.party.base.model
        device, wide = model.device, torch.promote_types(model.dtype, torch.float32)
        return CacheSlice(
            self.party.geometry,
            dict(enumerate(keys.to(device, wide))),
            dict(enumerate(values.to(device, wide))),
            tuple(range(len(ids))),
            tuple(ends),
        )

    def _of(self, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if ids in self._kept:
            return self._kept[ids]
        found = self._from_disk(ids)
        size = sum(x.nbytes for x in found)
        if size <= self._left:
            self._left -= size
            self._kept[ids] = found
        return found

    def _from_disk(self, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if self._folder is None:
            return self._read(ids)
        told = f"{self.party.geometry.model}|{self._dtype}|{ids}"
        path = self._folder / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.safetensors"
        if not path.exists():
            keys, values = self._read(ids)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            save_file({"keys": keys, "values": values}, draft)
            os.replace(draft, path)
            return keys, values
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("keys"), file.get_tensor("values")

    def _read(self, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        piece = export_cache(self.party.base.model, self.party.geometry, ids)
        parts = [torch.stack([p[n] for n in piece.layers]) for p in (piece.keys, piece.values)]
        found = [x.to("cpu", self._dtype) for x in parts]
        if not all(bool(torch.isfinite(x).all()) for x in found):  # beyond float16's range
            found = [x.to("cpu", torch.bfloat16) for x in parts]
        return found[0], found[1]


@dataclass(frozen=True)
class Turn:
    """What the receiver reads in one row, and what follows.

    Attributes
    ----------
    answer : tuple of int
        Teacher-forced: its tokens are scored, the last one is not read.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ends: tuple[int, ...] = ()


def hear(
    shelf: Shelf,
    turns: Sequence[Turn],
    fuser: CacheFuser | None,
    slices: Sequence[CacheSlice],
    *,
    config: FuserConfig,
    draw: Draw | None = None,
) -> Tensor:
    """Return the logits at the answers' tokens, [B, A, V]; gradients reach the fuser.

    Parameters
    ----------
    shelf
        The receiver's own: what it read alone is taken from there.
    fuser
        None for the receiver without a guest, who reads in the same way.
    draw
        Gates of a training step.
    """
    model = shelf.party.base.model
    if config.mode == "residual":
        return _residual(shelf.party, turns, fuser, slices, draw)
    before = [alone(config, len(turn.prompt)) for turn in turns]
    own = None
    if max(before):
        own = batch_of([shelf.slice(t.prompt[:n]) for t, n in zip(turns, before, strict=True)])
    guests = []
    if fuser is not None:
        guests = [fuser(batch_of(slices, sink=config.sink == "sender"), draw=draw)]
    rest = [turn.prompt[n:] for turn, n in zip(turns, before, strict=True)]
    ids, used, most = _laid_out(rest, [turn.answer for turn in turns], model.device)
    context = FusedContext(model, seated(config, guests, own))
    return context.read(ids, used, keep=most)


def _laid_out(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """Pad prompts on the left and answers on the right, so that all answers begin in one column."""
    widest, most = max(map(len, prompts)), max(map(len, answers))
    ids, used = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        left, read = widest - len(prompt), answer[:-1]
        ids.append([*[0] * left, *prompt, *read, *[0] * (most - len(answer))])
        used.append([i >= left for i in range(widest + most - 1)])
    return torch.tensor(ids, device=device), torch.tensor(used, device=device), most


def _residual(
    receiver: Party,
    turns: Sequence[Turn],
    fuser: CacheFuser | None,
    slices: Sequence[CacheSlice],
    draw: Draw | None,
) -> Tensor:
    """Add to every token of the prompt but the last, which then reads what was added."""
    model = receiver.base.model
    ids, used, most = _laid_out([t.prompt for t in turns], [t.answer for t in turns], model.device)
    cut = ids.shape[1] - most
    context = FusedContext(model)
    with torch.no_grad():
        context.read(ids[:, :cut], used[:, :cut], keep=1)
        own = context.own(receiver.geometry)
    if fuser is not None:
        context.add([fuser(beside(slices, turns, cut), own, draw)])
    return context.read(ids[:, cut:], used[:, cut:], keep=most)


def beside(slices: Sequence[CacheSlice], turns: Sequence[Turn], tokens: int) -> SliceBatch:
    """Put each receiver token's counterpart in its column, or none: [B, H, tokens, D]."""
    made = []
    for piece, turn in zip(slices, turns, strict=True):
        found = align(turn.ends[:-1], piece.ends, piece.places)
        made.append(torch.tensor([*[-1] * (tokens - len(found)), *found]))
    at = torch.stack(made)
    first = slices[0]

    def taken(part: str, n: int) -> Tensor:
        rows = [getattr(piece, part)[n] for piece in slices]
        return torch.stack([x[:, i.clamp_min(0)] for x, i in zip(rows, at, strict=True)])

    keys, values = ({n: taken(part, n) for n in first.layers} for part in ("keys", "values"))
    real = (at >= 0).to(next(iter(keys.values())).device)
    return SliceBatch(first.geometry, keys, values, real)
