# SPDX-License-Identifier: Apache-2.0
"""Fusers without a gradient: linear maps between two models' caches, solved from FAAST's sums.

Both models read the same texts.  For each layer of the receiver, its keys before RoPE and its
values at a token are regressed on the sender's at the token that holds the same character, taps and
a constant included.  All that the solution needs are sums over tokens (``rules.statistics.Gram``),
so clients that share a pair add their sums: one round, and the fuser of all their texts together,
however they were dealt.  Sums are over raw numbers; means and scales come out of them.

First tokens are left out on both sides: attention rests on them (arXiv 2309.17453), their keys and
values are like no other's, and a least-squares map would serve little else.  So a solved fuser has
``sink = "receiver"``: it never sees the sender's first token, and the receiver keeps its own.  A
receiver that slides windows cannot keep its own apart from the rest: then it is ``"none"``.

What comes out is the small fuser, its shared block silent: a rank no larger than its share of
parameters allows, cut where it costs least, and a start for training.  A small error in the cache
is not a small error in the answer: ``directions`` says which errors are seen by the attention.
"""

# Shapes: T token, I feature, O output (keys and values), R rank, D head dim.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.adapters.alignment import align
from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.adapters.projectors import SmallProjector
from fedloom.errors import Refusal
from fedloom.refining.hearing import Party, Shelf
from fedloom.refining.lessons import Encoded
from fedloom.rules.fuser_maps import (
    Build,
    Floats,
    arrays_of,
    grams_of,
    solve_maps,
    told_of,
    written,
)
from fedloom.rules.statistics import Gram
from fedloom.slices.geometry import Geometry
from fedloom.slices.slice import CacheSlice

_ROWS = 2048  # tokens that are summed at a time


def solvable(config: FuserConfig | None = None, receiver: Geometry | None = None) -> FuserConfig:
    """Return the build that a closed form fits: as asked for, without the sender's sink.

    Raises
    ------
    Refusal
        For residual or C2C-size fusers: they are no linear map of the sender's cache; and for a
        tail on a receiver that slides windows.
    """
    told = config or FuserConfig()
    if told.mode != "prefix" or told.size != "small":
        raise Refusal(
            f"a {told.mode} fuser of size {told.size} in closed form: expected prefix and small;"
            " train it instead"
        )
    if receiver is None or len(receiver.full) == receiver.layers:
        return replace(told, sink="receiver")
    if told.tail:
        raise Refusal(
            f"a {receiver.family} receiver with tail = {told.tail}: what it reads alone does not"
            " stay where a window slides; use tail = 0"
        )
    return replace(told, sink="none")


def build_of(fuser: CacheFuser) -> Build:
    """Describe a fuser to those who add sums for it."""
    return Build(
        sender=fuser.sender.to_json(),
        receiver=fuser.receiver.to_json(),
        config=asdict(fuser.config),
        sources=fuser.sources,
        sender_width=fuser.sender.width,
        receiver_width=fuser.receiver.width,
        numbers={name: float(x) for name, x in fuser.state_dict().items() if not x.ndim},
    )


@dataclass(frozen=True, eq=False)
class FuserSums:
    """Receiver layer -> sums over aligned tokens; the constant is the last feature."""

    grams: Mapping[int, Gram]

    @property
    def tokens(self) -> int:
        """How many aligned tokens were summed."""
        return int(next(iter(self.grams.values())).count)

    def __add__(self, other: FuserSums) -> FuserSums:
        if self.grams.keys() != other.grams.keys():
            raise ValueError("sums over different layers")
        return FuserSums({n: gram + other.grams[n] for n, gram in self.grams.items()})

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return what travels; ``tokens`` is the message's weight."""
        return arrays_of(self.grams)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], tokens: int) -> FuserSums:
        """Read what ``arrays`` returned."""
        return cls(grams_of(arrays, tokens))


def fuser_sums(
    sender: Shelf, receiver: Shelf, lessons: Iterable[Encoded], config: FuserConfig
) -> FuserSums:
    """Sum over the tokens of texts that both read: lessons with ends, in the setting ``same``.

    Raises
    ------
    Refusal
        If no two tokens go together.
    """
    with torch.device("meta"):
        sources = CacheFuser(sender.party.geometry, receiver.party.geometry, config).sources
    features: dict[int, list[Tensor]] = {n: [] for n in sources}
    targets: dict[int, list[Tensor]] = {n: [] for n in sources}
    total: FuserSums | None = None
    waiting = 0
    for lesson in lessons:
        ours, theirs = _pairs(lesson)
        if not ours:
            continue
        sent, own = sender.slice(lesson.shown_ids), receiver.slice(lesson.prompt_ids)
        for n, layers in sources.items():
            features[n].append(_flat(sent, layers, theirs))
            targets[n].append(_flat(own, [n], ours))
        waiting += len(ours)
        if waiting >= _ROWS:
            total, waiting = _summed(total, features, targets), 0
    if waiting:
        total = _summed(total, features, targets)
    if total is None:
        raise Refusal(
            "no token of the two models goes together: expected texts that both read, of two"
            " tokens or more"
        )
    return total


def _pairs(lesson: Encoded) -> tuple[list[int], list[int]]:
    """Return places of tokens that go together, the receiver's and the sender's; no first ones."""
    found = enumerate(align(lesson.prompt_ends, lesson.shown_ends))
    kept = [(j, i) for j, i in found if j > 0 and i > 0]
    return [j for j, _ in kept], [i for _, i in kept]


def _flat(piece: CacheSlice, layers: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return all keys, then all values, of some tokens: [T, 2 W layers]."""
    parts = [part[n][:, places] for part in (piece.keys, piece.values) for n in layers]
    return torch.cat([x.transpose(0, 1).flatten(1) for x in parts], dim=-1)


def _summed(
    total: FuserSums | None,
    features: dict[int, list[Tensor]],
    targets: dict[int, list[Tensor]],
) -> FuserSums:
    """Add what waits, and empty the lists."""
    grams = {}
    for n, rows in features.items():
        x = torch.cat(rows).double().cpu().numpy()
        y = torch.cat(targets[n]).double().cpu().numpy()
        grams[n] = Gram.of(np.concatenate((x, np.ones((len(x), 1))), axis=1), y)
        rows.clear()
        targets[n].clear()
    made = FuserSums(grams)
    return made if total is None else total + made


def solve_fuser(
    sums: FuserSums,
    sender: Geometry,
    receiver: Geometry,
    config: FuserConfig,
    *,
    ridge: float = 1e-2,
    weights: Mapping[int, Floats] | None = None,
    seed: int = 0,
) -> tuple[CacheFuser, dict[str, float]]:
    """Return the fuser of summed tokens, and how much of the receiver's caches it explains.

    Parameters
    ----------
    ridge
        Times the number of tokens, on features of variance one.
    weights
        Receiver layer -> ``M`` [O, O]: of an error e, what counts is ``|e M|``; ``directions``
        makes some.  They decide what a rank gives up; with no cut they would change nothing.
    """
    fuser = CacheFuser(sender, receiver, solvable(config, receiver), seed=seed)
    if sums.grams.keys() != fuser.sources.keys():
        raise Refusal(
            f"sums over {len(sums.grams)} layers for a fuser of {len(fuser.sources)}: make them"
            " with the same layer map"
        )
    rank = cast(SmallProjector, fuser.projector).down_NIR.shape[2]
    found = solve_maps(sums.grams, rank, ridge=ridge, weights=weights)
    fuser.load(written(fuser.arrays(), found, fuser.sources))
    return fuser.eval().requires_grad_(False), told_of(found)


@torch.no_grad()
def directions(receiver: Party, rows: Sequence[Sequence[int]]) -> dict[int, Floats]:
    """Return, by layer, which errors in keys and values are seen: ``M`` for ``solve_fuser``.

    A value's error reaches the residual stream through the output matrices of the query heads that
    share it.  A key's error is seen along queries; as distances differ, a pair of dimensions is
    turned against them by every angle, so what counts of the queries is their mean square in each
    pair.  Keys and values are brought to the same weight: which of them matters more is not known.

    Parameters
    ----------
    rows
        Texts in tokens, whose queries are looked at.
    """
    model, geometry = receiver.base.model, receiver.geometry
    seen = _queries(model, rows)
    found = {}
    for n in geometry.full:
        attention = cast(Any, model.get_decoder()).layers[n].self_attn
        out = attention.o_proj.weight.double()  # [hidden, query heads * D]
        heads = out.shape[1] // geometry.dim
        group = heads // geometry.heads
        parts = out.view(-1, geometry.heads, group, geometry.dim)
        values = torch.einsum("ohgd,ohge->hde", parts, parts)
        q = seen[n].view(geometry.heads, group, geometry.dim).mean(1)
        half = geometry.dim // 2
        pair = (q[:, :half] + q[:, half:]).repeat(1, 2) / 2
        blocks = [torch.diag(x) / x.sum() for x in pair] + [x / x.trace() for x in values]
        square = torch.block_diag(*blocks).cpu().numpy()
        values_, vectors = np.linalg.eigh(square)
        size = np.sqrt(np.clip(values_, 1e-4 * values_.mean(), None))
        found[n] = vectors @ np.diag(size) @ vectors.T
    return found


def _queries(model: Any, rows: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """Return each layer's mean square of queries before RoPE, [query heads * D] in float64."""
    sums: dict[int, Tensor] = {}
    hooks = []
    for n, layer in enumerate(model.get_decoder().layers):
        attention = layer.self_attn
        norm = getattr(attention, "q_norm", None)

        def look(_: Any, __: Any, made: Tensor, n: int = n, norm: Any = norm) -> None:
            if norm is not None:  # of each head, or of all; here, as models lay heads out otherwise
                made = norm(made.unflatten(-1, (-1, norm.weight.numel()))).flatten(-2)
            square = (made.detach().double().flatten(0, 1) ** 2).mean(0)
            sums[n] = sums.get(n, torch.zeros_like(square)) + square / len(rows)

        hooks.append(attention.q_proj.register_forward_hook(look))
    try:
        for row in rows:
            model.get_decoder()(input_ids=torch.tensor([list(row)], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return sums
