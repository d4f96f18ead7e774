# SPDX-License-Identifier: Apache-2.0
"""Linear maps between two models' caches, solved from sums: what a coordinator can do of a fuser.

For each layer of the receiver there is one ``Gram`` over aligned tokens, whose keys are the
sender's features with a constant last and whose values are the receiver's keys and values
(``fedloom.refining.closed_form``).  Sums of clients are added (``rules.total``'s way) and solved
once, here, without a model and without torch; the arrays that come out are those of the small
fuser, its shared block silent.
"""

# Shapes: I feature, O output (keys and values), R rank, N receiver layer, W one model's KV width.

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal
from fedloom.rules.solving import solve
from fedloom.rules.statistics import CROSS, GRAM, SQUARES, Gram
from fedloom.wire import Arrays, Listing

Floats = NDArray[np.float64]
LEAST = 1e-6  # of a scale: a feature that never moves says nothing
DOWN, UP, SILENT = "projector.down_NIR", "projector.up_NRO", "projector.block.out.weight"


@dataclass(frozen=True, kw_only=True)
class Build:
    """What both ends must have alike before sums of a pair are added.

    Attributes
    ----------
    sender, receiver : str
        ``Geometry.to_json`` of the two models: shapes, hashes of weights and tokenizers.
    config : mapping
        Fields of the fuser's configuration.
    sources : mapping
        Receiver layer -> the sender's layers that it looks at, in the features' order.
    sender_width, receiver_width : int
        Keys of one layer and token: heads times their size.
    numbers : mapping
        The fuser's parameters that are single numbers, and no solution changes: no message has
        arrays without a dimension.
    """

    sender: str
    receiver: str
    config: Mapping[str, Any]
    sources: Mapping[int, Sequence[int]]
    sender_width: int
    receiver_width: int
    numbers: Mapping[str, float]

    def to_json(self) -> str:
        """Write it as one canonical line."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Build:
        """Read what ``to_json`` wrote.

        Raises
        ------
        Refusal
            If it is no build.
        """
        try:
            tree = json.loads(text)
            told = {int(n): [int(s) for s in x] for n, x in tree["sources"].items()}
            tree["sources"] = dict(sorted(told.items()))  # JSON sorts 10 before 2
            return cls(**tree)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refusal(f"a node described no fuser to solve: {error}"[:300]) from error

    def digest(self) -> str:
        """SHA-256 of ``to_json``."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def listing(self) -> Listing:
        """Return names, shapes and dtypes of one client's sums: the same for any texts."""
        listed: Listing = {}
        for n, layers in self.sources.items():
            keys, values = 2 * self.sender_width * len(layers) + 1, 2 * self.receiver_width
            listed[f"{n}.{GRAM}"] = ((keys * (keys + 1) // 2,), "float64")
            listed[f"{n}.{CROSS}"] = ((keys, values), "float64")
            listed[f"{n}.{SQUARES}"] = ((1,), "float64")
        return dict(sorted(listed.items()))


def grams_of(arrays: Arrays, tokens: float) -> dict[int, Gram]:
    """Read the sums of all layers off what travelled, or off a total of it."""
    layers: dict[int, dict[str, NDArray[Any]]] = {}
    for name, x in arrays.items():
        layer, _, part = name.partition(".")
        layers.setdefault(int(layer), {})[part] = x
    return {n: Gram.from_arrays(parts, tokens) for n, parts in sorted(layers.items())}


def arrays_of(grams: Mapping[int, Gram]) -> dict[str, NDArray[np.float64]]:
    """Return what travels; the number of tokens is the message's weight."""
    return {f"{n}.{part}": x for n, gram in grams.items() for part, x in gram.arrays().items()}


def check_sums(grams: Mapping[int, Gram], tokens: float) -> None:
    """Refuse what cannot be sums over so many tokens.

    Raises
    ------
    Refusal
        If the constant was not counted once a token, or a sum of squares is negative or larger
        than it can be for its mean.
    """
    if not float(tokens).is_integer() or tokens < 1:
        raise Refusal(f"sums over {tokens} tokens: expected a whole number from 1 up")
    for n, gram in grams.items():
        whole = gram.dense()
        if whole[-1, -1] != tokens:
            raise Refusal(
                f"layer {n}: the constant was counted {whole[-1, -1]:g} times over {tokens:g}"
                " tokens"
            )
        spread = np.diag(whole)[:-1] - whole[-1, :-1] ** 2 / tokens
        if (spread < -1e-9 * np.abs(np.diag(whole)[:-1])).any() or gram.squares < 0:
            raise Refusal(f"layer {n}: no numbers have these sums and these squares")


@dataclass(frozen=True, eq=False)
class LinearMap:
    """One layer's solution: ``y = mean_O + scale_O ((x - mean_I) / scale_I) @ down @ up``."""

    mean_I: Floats
    scale_I: Floats
    mean_O: Floats
    scale_O: Floats
    down_IR: Floats
    up_RO: Floats
    explained: float
    kept: float
    """Share of the solution's (weighted) variance that the rank holds."""

    def matrix(self) -> Floats:
        """Return the map itself, [I, O], without its means: what a rank and signs do not hide."""
        whole: Floats = (self.down_IR / self.scale_I[:, None]) @ self.up_RO * self.scale_O
        return whole


def solve_map(
    gram: Gram, rank: int, *, ridge: float = 1e-2, weight: Floats | None = None
) -> LinearMap:
    """Centre and scale sums, solve by ridge, and cut to the rank (Izenman 1975).

    Parameters
    ----------
    ridge
        Times the number of tokens, on features of variance one.
    weight
        ``M`` [O, O]: of an error e, what counts is ``|e M|``; it decides what a rank gives up.
    """
    n, whole, cross = gram.count, gram.dense(), gram.cross
    mean_I, mean_O = whole[-1, :-1] / n, cross[-1] / n
    spread = whole[:-1, :-1] - n * np.outer(mean_I, mean_I)
    scale_I = np.sqrt(np.clip(np.diag(spread) / n, LEAST**2, None))
    square = spread / np.outer(scale_I, scale_I)
    moved = (cross[:-1] - n * np.outer(mean_I, mean_O)) / scale_I[:, None]
    centred = Gram(
        square[np.triu_indices(len(square))],
        moved,
        max(gram.squares - n * float(mean_O @ mean_O), 0.0),
        n,
    )
    fast = solve(centred, alpha=None, ridge=max(ridge, LEAST) * n)
    said = fast.weights.T @ square @ fast.weights / n  # covariance of what is predicted
    scale_O = np.sqrt(np.clip(np.diag(said), LEAST**2, None))
    metric = np.diag(1 / scale_O) if weight is None else weight
    values, vectors = np.linalg.eigh(metric.T @ said @ metric)
    order = np.argsort(values)[::-1][:rank]
    size = np.sqrt(np.clip(values[order], LEAST**2, None))  # so that the middle has variance one
    down = fast.weights @ metric @ vectors[:, order] / size
    up = size[:, None] * (vectors[:, order].T @ np.linalg.inv(metric)) / scale_O
    kept = float(np.clip(values[order], 0, None).sum() / max(values.sum(), LEAST**2))
    return LinearMap(mean_I, scale_I, mean_O, scale_O, down, up, fast.explained, kept)


def solve_maps(
    grams: Mapping[int, Gram],
    rank: int,
    *,
    ridge: float = 1e-2,
    weights: Mapping[int, Floats] | None = None,
) -> dict[int, LinearMap]:
    """Solve every layer by itself."""
    given = weights or {}
    return {n: solve_map(g, rank, ridge=ridge, weight=given.get(n)) for n, g in grams.items()}


def told_of(maps: Mapping[int, LinearMap]) -> dict[str, float]:
    """Say how much of the receiver's caches the maps explain."""
    return {
        "explained": float(np.mean([m.explained for m in maps.values()])),
        "explained_least": float(min(m.explained for m in maps.values())),
        "rank_kept": float(np.mean([m.kept for m in maps.values()])),
    }


def written(
    arrays: Arrays, maps: Mapping[int, LinearMap], sources: Mapping[int, Sequence[int]]
) -> dict[str, NDArray[Any]]:
    """Return a small fuser's arrays with the maps in them, in the dtypes that they have."""
    made = {name: np.array(x) for name, x in arrays.items()}
    made[SILENT][...] = 0
    for at, (n, layers) in enumerate(sources.items()):
        solved = maps[n]
        _corner(made[DOWN][at], solved.down_IR)
        _corner(made[UP][at], solved.up_RO)
        _place(made, "sender", layers, solved.mean_I, solved.scale_I)
        _place(made, "receiver", [n], solved.mean_O, solved.scale_O)
    return made


def _corner(into: NDArray[Any], x: Floats) -> None:
    """Write a matrix into the corner of one that may be larger; the rest is silent."""
    into[...] = 0
    into[: x.shape[0], : x.shape[1]] = x


def _place(
    made: Mapping[str, NDArray[Any]], side: str, layers: Sequence[int], mean: Floats, scale: Floats
) -> None:
    """Put means and scales where the fuser looks for them: keys of all layers come first."""
    for what, x in (("mean", mean), ("scale", scale)):
        keys, values = x.reshape(2, len(layers), -1)
        for at, layer in enumerate(layers):
            made[f"{side}_{what}"][layer] = np.concatenate((keys[at], values[at]))
