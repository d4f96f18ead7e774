# SPDX-License-Identifier: Apache-2.0
"""Rules for LoRA that say what they compute: ``D = sum_k w_k s_k B_k A_k``, or how far from it.

Client k trains ``W0 + s_k B_k A_k`` with ``s_k = alpha_k / r_k``; ``w_k`` are its examples over
all examples. ``D`` is what the round should do to the model. The mean of factors misses it by their
covariance, ``sum w B A - Bbar Abar = sum w (B - Bbar)(A - Abar)``.

============  ====================  ===========================  ===============================
rule          result                unequal ranks                holds during the round
============  ====================  ===========================  ===============================
fedit         off by covariance     refused                      all factors, to know its error
ffa, rolora   ``D``                 refused                      one running sum
fedsa         mean of A             refused                      one running sum
fedex         ``D``, residual       refused                      all factors
stack         ``D``, rank grows     yes                          all factors
svd_refactor  best of given rank    yes                          all factors, one in float64
flex          best of each rank     yes                          the same, an adapter a size
============  ====================  ===========================  ===============================

FedIT arXiv 2305.05644, FFA 2403.12313, RoLoRA 2409.02346, FedSA 2410.01463, FedEx 2410.09432,
``stack`` is FLoRA 2409.05976, ``flex`` FlexLoRA 2402.11505. To average factors and hold no more
than a running sum, use ``mean``, and ``ProductGap`` to estimate its error as updates pass.

"All factors" is ``sum r_k (out + in)`` numbers a projection in the dtype that came.
``compress=True`` caps the width at twice ``min(out, in)`` plus one client's rank, exactly but for
float64 rounding. Rules that hold all factors sort them by client, so the order of arrival cannot
change a bit; compressed sums follow arrival, and differ by rounding. Running sums are
``Update``'s, order-free for whole weights; scales are folded in as each contribution passes.

Everything is computed in float64 and rounded once to the dtype that came. Arrays that are not LoRA
(gates, taps) are averaged by weight under every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal
from fedloom.rules.averaging import total
from fedloom.rules.contributions import (
    A,
    B,
    LowRankUpdate,
    Round,
    checked,
    gather,
    in_order,
    module_of,
)
from fedloom.rules.factors import Factors, Spectrum
from fedloom.wire import Arrays, Update

Side = Literal["A", "B"]


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What a rule makes of a round."""

    arrays: dict[str, NDArray[Any]]
    """The new adapter by peft's names, and the means of all other arrays."""
    scale: float
    """What to multiply ``B A`` of these arrays by. It need not be any client's alpha over rank."""
    residual: dict[str, Factors] = field(default_factory=dict)
    """By projection, what has to be added to the frozen weight as well, scale inside. Add it to a
    4-bit weight and it is rounded away: carry it as a side adapter."""

    def products(self) -> dict[str, Factors]:
        """By projection, the whole change to the frozen weight."""
        made = {}
        for name in self.arrays:
            if name.endswith(A):
                module = name[: -len(A)]
                pair = Factors(self.arrays[module + B], self.arrays[name]).times(self.scale)
                rest = [self.residual[module]] if module in self.residual else []
                made[module] = Factors.joined([pair, *rest])
        return made


@dataclass(frozen=True)
class Truncation:
    """What cutting ``D`` to a rank has cost, over all projections together."""

    error: float
    """``|D - s B A| / |D|`` of the arrays as returned, after rounding to their dtype."""
    optimum: float
    """The same for the best matrices of that rank, from the singular values."""
    dead: int
    """Directions of all pairs that ``D`` had no use for; see ``fill``."""


def target(contributions: Iterable[LowRankUpdate], *, compress: bool = False) -> dict[str, Factors]:
    """Return ``D`` by projection, exact, as stacked factors in float64.

    >>> ones = {"q.lora_A.weight": np.ones((1, 2)), "q.lora_B.weight": np.ones((2, 1))}
    >>> D = target([LowRankUpdate(ones, weight=1, scale=s, client=s) for s in (1, 3)])["q"]
    >>> D.b @ D.a
    array([[2., 2.],
           [2., 2.]])
    """
    return dict(gather(contributions, compress).products())


def relative_error(made: Mapping[str, Factors], wanted: Mapping[str, Factors]) -> float:
    """Return ``|wanted - made| / |wanted|`` over all projections, exactly, from thin factors."""
    gap = math.hypot(*(wanted[module].minus(made[module]).norm() for module in wanted))
    whole = math.hypot(*(factors.norm() for factors in wanted.values()))
    return gap / whole if whole else (math.inf if gap else 0.0)


def stack(contributions: Iterable[LowRankUpdate], *, compress: bool = False) -> Aggregate:
    """FLoRA: one adapter of rank ``sum r_k`` and scale 1 that is ``D``.

    Clients that were not asked need it too, and start a new adapter on top of it.
    """
    round_ = gather(contributions, compress)
    arrays = round_.means()
    for module, product in round_.products():
        arrays |= round_.named(module, product)
    return Aggregate(arrays, 1.0)


def svd_refactor(
    contributions: Iterable[LowRankUpdate],
    rank: int,
    scale: float,
    *,
    fill: Arrays | None = None,
    row_norm: float = 0.0,
    compress: bool = False,
) -> tuple[Aggregate, Truncation]:
    """Return the adapter of rank ``rank`` nearest to ``D`` in Frobenius norm.

    ``B = U S^(1/2) / scale^(1/2)`` and ``A = S^(1/2) V^T / scale^(1/2)``, or with ``row_norm = c``
    ``A = c V^T`` and ``B = U S / (c scale)``. The factors are in a gauge of their own: optimiser
    moments of the old ones mean nothing for them.

    Parameters
    ----------
    contributions
        Of any ranks and scales.
    rank, scale
        Of the adapter to return.
    fill
        Rows of A, by name, for directions that ``D`` does not use (the initial adapter's, say).
        Their columns of B stay zero, so the product is the same; without it both are zero and no
        gradient ever leaves that point.
    row_norm
        Of A's rows. An optimiser that moves every entry by about its rate, as Adam does, moves the
        product by that times the size of the other factor; early on, when ``D`` is small, A halved
        in size would halve the pace that it started with.
    compress
        Bound the width of the stack; see the module's text.
    """
    round_ = gather(contributions, compress)
    return _refactored(round_, [(rank, scale)], fill, row_norm)[rank, scale]


def flex(
    contributions: Iterable[LowRankUpdate],
    sizes: Mapping[int, tuple[int, float]] | None = None,
    *,
    fill: Arrays | None = None,
    compress: bool = False,
) -> dict[int, tuple[Aggregate, Truncation]]:
    """FlexLoRA: ``svd_refactor`` for each client at its own rank and scale, from one SVD.

    Parameters
    ----------
    contributions
        Of any ranks and scales.
    sizes
        Client -> (rank, scale), with those who were not asked; None is who came, as they came.
    fill, compress
        As in ``svd_refactor``; ``fill`` holds as many rows as the largest rank.

    Returns
    -------
    dict
        Client -> its adapter and what the cut cost. Clients of equal sizes share one object.
    """
    round_ = gather(contributions, compress)
    wanted = round_.sizes if sizes is None else dict(sizes)
    made = _refactored(round_, sorted(set(wanted.values())), fill)
    return {client: made[size] for client, size in wanted.items()}


def fedit(contributions: Iterable[LowRankUpdate], scale: float) -> tuple[Aggregate, float]:
    """FedIT: the mean of each factor, as the reference, and its exact relative error.

    Clients of another scale are first brought to ``scale``, half on either factor.
    """
    ordered = in_order(contributions, "fedit")
    _, arrays = _means(ordered, lambda c: _balanced(c, scale))
    made = Aggregate(arrays, scale)
    return made, relative_error(made.products(), target(ordered))


def fedex(contributions: Iterable[LowRankUpdate], scale: float) -> Aggregate:
    """FedEx: the mean of each factor, and the covariance that it misses as a thin residual.

    The residual is ``sum r_k`` wide, and every client needs it, those who were not asked too.
    """
    ordered = in_order(contributions, "fedex")
    exact, arrays = _means(ordered, lambda c: _balanced(c, scale))
    weight = math.fsum(c.weight for c in ordered)
    residual = {}
    for module in ordered[0].modules():
        parts = []
        for c in ordered:
            share, root = math.sqrt(c.weight / weight * scale), math.sqrt(c.scale / scale)
            off = [
                c.arrays[x].astype(np.float64) * root - exact[x] for x in (module + B, module + A)
            ]
            parts.append(Factors(share * off[0], share * off[1]))
        residual[module] = Factors.joined(parts).astype(arrays[module + A].dtype)
    return Aggregate(arrays, scale, residual)


def ffa(
    contributions: Iterable[LowRankUpdate], scale: float, kept: Arrays | None = None
) -> Aggregate:
    """FFA: A never moves, so the mean of B is exact.

    Parameters
    ----------
    contributions
        Of one rank; B, and A too unless ``kept`` is given.
    scale
        Of the adapter to return; a client of another scale has its B brought to it.
    kept
        The factors that stay, as the server knows them; None takes the first contribution's.

    Raises
    ------
    Refusal
        If a client's A differs at all from the others' or from ``kept``.
    """
    return _one_sided(contributions, "B", scale, kept, "ffa")


def rolora_side(server_round: int) -> Side:
    """Say which factor RoLoRA trains and averages in a round, counted from 1.

    B comes first: while it is zero, as LoRA starts it, A has no gradient.

    >>> [rolora_side(server_round) for server_round in (1, 2, 3)]
    ['B', 'A', 'B']
    """
    if server_round < 1:
        raise ValueError(f"round {server_round}: rounds count from 1")
    return "B" if server_round % 2 else "A"


def rolora(
    contributions: Iterable[LowRankUpdate],
    server_round: int,
    scale: float,
    kept: Arrays | None = None,
) -> Aggregate:
    """RoLoRA: average the round's factor; exact, as ``ffa``, while the other stays where it was."""
    return _one_sided(contributions, rolora_side(server_round), scale, kept, "rolora")


def fedsa(contributions: Iterable[LowRankUpdate], scale: float) -> Aggregate:
    """FedSA: average A as it came. B stays with its client and is not in the result."""
    _, arrays = _means(checked(contributions, "fedsa"), lambda c: _without(c, B))
    return Aggregate(arrays, scale)


def _refactored(
    round_: Round, sizes: list[tuple[int, float]], fill: Arrays | None, row_norm: float = 0.0
) -> dict[tuple[int, float], tuple[Aggregate, Truncation]]:
    """Cut every projection to every size, with one SVD each."""
    if bad := [size for size in sizes if not (size[0] >= 1 and size[1] > 0)]:
        raise Refusal(f"rank {bad[0][0]}, scale {bad[0][1]}: expected positive numbers")
    arrays = {size: round_.means() for size in sizes}
    costs = {size: _Cost() for size in sizes}
    for module, product in round_.products():
        spectrum = product.spectrum()
        for rank, scale in sizes:
            named = round_.named(module, spectrum.pair(rank, scale, row_norm))
            if fill is not None:
                _fill(named[module + A], fill[module + A], spectrum.rank)
            made = Factors(named[module + B], named[module + A]).times(scale)
            costs[rank, scale].add(spectrum, rank, spectrum.distance(made))
            arrays[rank, scale] |= named
    return {size: (Aggregate(arrays[size], size[1]), costs[size].truncation()) for size in sizes}


def _fill(a: NDArray[Any], rows: NDArray[Any], used: int) -> None:
    if len(rows) < len(a):  # numpy would repeat a single row without a word
        raise ValueError(f"fill holds {len(rows)} rows; expected at least {len(a)}")
    a[used:] = rows[used : len(a)]


@dataclass
class _Cost:
    error: float = 0.0
    optimum: float = 0.0
    whole: float = 0.0
    dead: int = 0

    def add(self, spectrum: Spectrum, rank: int, error: float) -> None:
        self.error = math.hypot(self.error, error)
        self.optimum = math.hypot(self.optimum, spectrum.tail(rank))
        self.whole = math.hypot(self.whole, spectrum.tail(0))
        self.dead += max(0, rank - spectrum.rank)

    def truncation(self) -> Truncation:
        whole = self.whole or 1.0  # D = 0 is met by zeros, without error
        return Truncation(self.error / whole, self.optimum / whole, self.dead)


def _means(
    stream: Iterable[LowRankUpdate], arrays_of: Callable[[LowRankUpdate], Arrays]
) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[Any]]]:
    """Average what ``arrays_of`` takes from each, in float64 and rounded to the first's dtypes."""
    dtypes: dict[str, np.dtype[Any]] = {}

    def updates() -> Iterator[Update]:
        for c in stream:
            dtypes.update({n: x.dtype for n, x in c.arrays.items()} if not dtypes else {})
            yield Update.of(arrays_of(c), c.weight)

    exact = total(updates()).mean()
    return exact, {name: mean.astype(dtypes[name]) for name, mean in exact.items()}


def _balanced(c: LowRankUpdate, scale: float) -> Arrays:
    """Bring both factors to another scale; the product with it stays."""
    root = math.sqrt(c.scale / scale)
    return {
        name: np.asarray(x, np.float64) * (1.0 if module_of(name) is None else root)
        for name, x in c.arrays.items()
    }


def _without(c: LowRankUpdate, suffix: str) -> dict[str, NDArray[Any]]:
    return {name: x for name, x in c.arrays.items() if not name.endswith(suffix)}


def _one_sided(
    contributions: Iterable[LowRankUpdate], side: Side, scale: float, kept: Arrays | None, rule: str
) -> Aggregate:
    moving, still = (A, B) if side == "A" else (B, A)
    frozen: dict[str, NDArray[Any]] = {}

    def scaled(c: LowRankUpdate) -> Arrays:
        if not frozen:
            frozen.update({n: x for n, x in (kept or c.arrays).items() if n.endswith(still)})
        _check_frozen(c, frozen, still, rule)
        ratio = c.scale / scale
        return {
            name: np.asarray(x, np.float64) * (ratio if name.endswith(moving) else 1.0)
            for name, x in _without(c, still).items()
        }

    _, arrays = _means(checked(contributions, rule), scaled)
    return Aggregate({**arrays, **frozen}, scale)


def _check_frozen(c: LowRankUpdate, frozen: Arrays, still: str, rule: str) -> None:
    """Refuse a frozen factor that moved, and a moving one whose frozen half nobody knows."""
    for name, array in c.arrays.items():
        if name.endswith(still) and not np.array_equal(array, frozen.get(name, ())):
            raise Refusal(
                f"client {c.client}: {name} is not what the others hold; {rule} is exact only"
                " while this factor is frozen: start all clients from one and do not train it"
            )
        module = module_of(name)
        if module is not None and module + still not in frozen:
            raise Refusal(
                f"client {c.client}: {module + still} did not come and is not in kept; {rule} needs"
                " it from one of them"
            )
