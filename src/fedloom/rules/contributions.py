# SPDX-License-Identifier: Apache-2.0
"""What the rules of ``low_rank`` take: one client's factors, and a round of them that fit together.

A stack multiplies ``A_k`` by ``w_k s_k`` and leaves ``B_k`` as it came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal
from fedloom.rules.factors import Factors
from fedloom.wire import Arrays, Update

A, B = ".lora_A.weight", ".lora_B.weight"


def module_of(name: str) -> str | None:
    """Name the projection that a factor belongs to; None for arrays that are not LoRA."""
    return name[: -len(A)] if name.endswith((A, B)) else None


@dataclass(frozen=True, eq=False)
class LowRankUpdate:
    """One client's arrays as trained, with what a product needs and ``Update`` has summed away.

    ``Update`` carries the weight inside its sums, enough for every rule that is linear. A product
    needs the factors themselves, and ``s_k``. One number says it all: alpha over the rank, or over
    its root for rsLoRA; hence one rank for all projections. A rule that leaves one factor at home
    (``fedsa``, ``ffa``, ``rolora``) takes contributions without it.

    Raises
    ------
    Refusal
        For arrays no rule here can be right about: other LoRA parts than the two weights of a
        linear layer (embeddings, DoRA magnitudes, biases), ranks that do not fit together, values
        that are not finite, a weight or scale that is not positive.
    """

    arrays: Arrays
    """peft's names: ``....lora_A.weight`` is ``[r, in]``, ``....lora_B.weight`` ``[out, r]``."""
    weight: float  # examples, not batches
    scale: float
    """``s_k``: what the client multiplies ``B_k A_k`` by."""
    client: int
    """Partition id: fixes the order of stacks and names the client in a refusal."""

    def __post_init__(self) -> None:
        for what, number in (("weight", self.weight), ("scale", self.scale)):
            if not (number > 0 and math.isfinite(number)):
                raise Refusal(f"client {self.client}: {what} {number}; expected a positive number")
        for name, array in self.arrays.items():
            self._check(name, array)
        if len(self._ranks()) > 1:
            raise Refusal(
                f"client {self.client}: factors of ranks {sorted(self._ranks())};"
                " expected one rank, as there is one scale"
            )

    def _check(self, name: str, array: NDArray[Any]) -> None:
        if module_of(name) is None and "lora_" in name:
            raise Refusal(f"client {self.client}: {name} is LoRA, but neither *{A} nor *{B}")
        if module_of(name) is not None and (array.ndim != 2 or 0 in array.shape):
            raise Refusal(f"client {self.client}: {name} is {array.shape}; expected a matrix")
        if not np.isfinite(array).all():
            raise Refusal(f"client {self.client}: {name} holds a value that is not finite")

    def _ranks(self) -> set[int]:
        ranks = {array.shape[0] for name, array in self.arrays.items() if name.endswith(A)}
        return ranks | {array.shape[1] for name, array in self.arrays.items() if name.endswith(B)}

    @property
    def rank(self) -> int:
        """``r_k``; 0 if there is no LoRA among the arrays."""
        return max(self._ranks(), default=0)

    def modules(self) -> list[str]:
        """Name the adapted projections, sorted.

        Raises
        ------
        Refusal
            If one has only one of its factors.
        """
        found = sorted({module for name in self.arrays if (module := module_of(name)) is not None})
        for name in (module + side for module in found for side in (A, B)):
            if name not in self.arrays:
                raise Refusal(f"client {self.client}: {name} did not come; expected both factors")
        return found

    def pair(self, module: str) -> Factors:
        """Return a projection's factors as they came."""
        return Factors(self.arrays[module + B], self.arrays[module + A])


@dataclass(frozen=True, eq=False)
class Round:
    """The contributions of a round by projection; multiplied by weight and scale when stacked."""

    parts: dict[str, list[tuple[float, float, Factors]]]  # weight, scale, as they came
    sizes: dict[int, tuple[int, float]]
    dtypes: dict[str, np.dtype[Any]]
    linear: Update | None
    weight: float

    def products(self) -> Iterator[tuple[str, Factors]]:
        """Yield ``D`` a projection at a time."""
        for module, parts in self.parts.items():
            yield module, _stacked(parts, self.weight)

    def means(self) -> dict[str, NDArray[Any]]:
        """Average what is not LoRA."""
        means = self.linear.mean() if self.linear else {}
        return {name: mean.astype(self.dtypes[name]) for name, mean in means.items()}

    def named(self, module: str, pair: Factors) -> dict[str, NDArray[Any]]:
        """Round a pair to the dtypes that came, under peft's names."""
        a, b = module + A, module + B
        return {a: pair.a.astype(self.dtypes[a]), b: pair.b.astype(self.dtypes[b])}


def _stacked(parts: list[tuple[float, float, Factors]], weight: float) -> Factors:
    return Factors.joined([pair.times(w / weight * scale) for w, scale, pair in parts])


def gather(contributions: Iterable[LowRankUpdate], compress: bool) -> Round:
    """Collect a round by client, or by arrival with stacks that stay within a bound."""
    parts: dict[str, list[tuple[float, float, Factors]]] = {}
    sizes: dict[int, tuple[int, float]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    linear: Update | None = None
    for c in checked(contributions) if compress else in_order(contributions):
        sizes[c.client] = c.rank, c.scale
        dtypes = dtypes or {name: array.dtype for name, array in c.arrays.items()}
        rest = Update.of({n: x for n, x in c.arrays.items() if module_of(n) is None}, c.weight)
        linear = rest if linear is None else linear + rest
        for module in c.modules():
            mine = parts.setdefault(module, [])
            mine.append((c.weight, c.scale, c.pair(module)))
            if compress:
                _fold(mine)
    return Round(parts, sizes, dtypes, linear, linear.weight if linear else 0.0)


def _fold(parts: list[tuple[float, float, Factors]]) -> None:
    """Fold a stack twice as wide as it need be; at each overflow would cost too many products."""
    pairs = [pair for _, _, pair in parts]
    if sum(pair.width for pair in pairs) > 2 * min(pairs[0].shape):
        parts[:] = [(1.0, 1.0, _stacked(parts, 1.0).folded())]


def checked(
    contributions: Iterable[LowRankUpdate], rule: str | None = None
) -> Iterator[LowRankUpdate]:
    """Pass contributions that belong together; ``rule`` is named where it needs one rank."""
    ranks: dict[int, int] = {}  # by client, the first one first
    expected: dict[str, str] = {}
    for c in contributions:
        if c.client in ranks:
            raise Refusal(f"client {c.client} came twice; expected one contribution each")
        ranks[c.client] = c.rank
        first = next(iter(ranks))
        expected = expected or _listing(c)
        _check_alike(c, expected, first)
        if rule and c.rank != ranks[first]:
            raise Refusal(
                f"{rule} needs one rank: client {first} has {ranks[first]}, client {c.client}"
                f" has {c.rank}; use svd_refactor, flex or stack"
            )
        yield c
    if not ranks:
        raise ValueError("no contribution came: there is nothing to aggregate")


def in_order(
    contributions: Iterable[LowRankUpdate], rule: str | None = None
) -> list[LowRankUpdate]:
    """Collect contributions by client, whichever way they came."""
    return sorted(checked(contributions, rule), key=lambda c: c.client)


def _check_alike(c: LowRankUpdate, theirs: dict[str, str], first: int) -> None:
    mine = _listing(c)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise Refusal(
                f"client {c.client}: {name} is {mine.get(name, 'missing')},"
                f" but {theirs.get(name, 'missing')} at client {first}"
            )


def _listing(c: LowRankUpdate) -> dict[str, str]:
    """Describe arrays as far as clients must agree: the rank is left open."""
    listing = {}
    for name, x in c.arrays.items():
        shape: tuple[int | str, ...] = x.shape
        if name.endswith(A):
            shape = "r", x.shape[1]
        elif name.endswith(B):
            shape = x.shape[0], "r"
        listing[name] = f"({', '.join(map(str, shape))}) {x.dtype}"
    return listing
