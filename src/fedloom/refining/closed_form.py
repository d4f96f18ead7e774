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
from dataclasses import dataclass, replace
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
from fedloom.rules.solving import solve
from fedloom.rules.statistics import Gram
from fedloom.slices.geometry import Geometry
from fedloom.slices.slice import CacheSlice

Floats = NDArray[np.float64]
_ROWS = 2048  # tokens that are summed at a time
_LEAST = 1e-6  # of a scale: a feature that never moves says nothing


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
        named = ((f"{n}.{k}", x) for n, g in self.grams.items() for k, x in g.arrays().items())
        return dict(named)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], tokens: int) -> FuserSums:
        """Read what ``arrays`` returned."""
        layers: dict[int, dict[str, NDArray[Any]]] = {}
        for name, x in arrays.items():
            layer, _, part = name.partition(".")
            layers.setdefault(int(layer), {})[part] = x
        return cls({n: Gram.from_arrays(parts, tokens) for n, parts in sorted(layers.items())})


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


@dataclass(frozen=True, eq=False)
class _Map:
    """One layer's solution: ``y = mean_O + ((x - mean_I) / scale_I) @ down @ up``."""

    mean_I: Floats
    scale_I: Floats
    mean_O: Floats
    scale_O: Floats
    down_IR: Floats
    up_RO: Floats
    explained: float
    kept: float
    """Share of the solution's (weighted) variance that the rank holds."""


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
    projector = cast(SmallProjector, fuser.projector)
    rank = projector.down_NIR.shape[2]
    found = {n: _solve(g, rank, ridge, (weights or {}).get(n)) for n, g in sums.grams.items()}
    with torch.no_grad():
        projector.block.out.weight.zero_()
        for at, (n, layers) in enumerate(fuser.sources.items()):
            made = found[n]
            _write(projector.down_NIR[at], made.down_IR)
            _write(projector.up_NRO[at], made.up_RO)
            _place(fuser, "sender", layers, sender.width, made.mean_I, made.scale_I)
            _place(fuser, "receiver", [n], receiver.width, made.mean_O, made.scale_O)
    told = {
        "explained": float(np.mean([m.explained for m in found.values()])),
        "explained_least": float(min(m.explained for m in found.values())),
        "rank_kept": float(np.mean([m.kept for m in found.values()])),
    }
    return fuser.eval().requires_grad_(False), told


def _solve(gram: Gram, rank: int, ridge: float, weight: Floats | None) -> _Map:
    """Centre and scale sums, solve by ridge, and cut to the rank (Izenman 1975)."""
    n, whole, cross = gram.count, gram.dense(), gram.cross
    mean_I, mean_O = whole[-1, :-1] / n, cross[-1] / n
    spread = whole[:-1, :-1] - n * np.outer(mean_I, mean_I)
    scale_I = np.sqrt(np.clip(np.diag(spread) / n, _LEAST**2, None))
    square = spread / np.outer(scale_I, scale_I)
    moved = (cross[:-1] - n * np.outer(mean_I, mean_O)) / scale_I[:, None]
    centred = Gram(
        square[np.triu_indices(len(square))],
        moved,
        max(gram.squares - n * float(mean_O @ mean_O), 0.0),
        n,
    )
    fast = solve(centred, alpha=None, ridge=max(ridge, _LEAST) * n)
    said = fast.weights.T @ square @ fast.weights / n  # covariance of what is predicted
    scale_O = np.sqrt(np.clip(np.diag(said), _LEAST**2, None))
    metric = np.diag(1 / scale_O) if weight is None else weight
    values, vectors = np.linalg.eigh(metric.T @ said @ metric)
    order = np.argsort(values)[::-1][:rank]
    size = np.sqrt(np.clip(values[order], _LEAST**2, None))  # so that the middle has variance one
    down = fast.weights @ metric @ vectors[:, order] / size
    up = size[:, None] * (vectors[:, order].T @ np.linalg.inv(metric)) / scale_O
    kept = float(np.clip(values[order], 0, None).sum() / max(values.sum(), _LEAST**2))
    return _Map(mean_I, scale_I, mean_O, scale_O, down, up, fast.explained, kept)


def _write(into: Tensor, x: Floats) -> None:
    """Write a matrix into the corner of one that may be larger; the rest is silent."""
    into.zero_()
    into[: x.shape[0], : x.shape[1]] = torch.from_numpy(x).to(into)


def _place(
    fuser: CacheFuser, side: str, layers: Sequence[int], width: int, mean: Floats, scale: Floats
) -> None:
    """Put means and scales where the fuser looks for them: keys of all layers come first."""
    for what, x in (("mean", mean), ("scale", scale)):
        buffer = cast(Tensor, getattr(fuser, f"{side}_{what}"))
        keys, values = x.reshape(2, len(layers), width)
        for at, layer in enumerate(layers):
            both = np.concatenate((keys[at], values[at]))
            buffer[layer] = torch.from_numpy(both).to(buffer)


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
