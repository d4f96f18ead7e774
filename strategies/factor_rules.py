# SPDX-License-Identifier: Apache-2.0
"""The LoRA rules in a run: what a round's replies make of the global state.

``fedloom.rules`` has the algebra, ``fedloom.rules.exchange`` says what travels; here a recipe
chooses, and what LoRA of one rank cannot hold is added to the side adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import rules
from fedloom.config import RunConfig
from fedloom.rules.contributions import A, B
from fedloom.rules.exchange import SIDE_A, SIDE_B
from fedloom.rules.factors import Factors
from fedloom.wire import Arrays, Update

Folded = tuple[dict[str, NDArray[Any]], dict[str, float]]
"""The new global state, and facts for the round's event."""


def fold(config: RunConfig, server_round: int, updates: Iterable[Update], state: Arrays) -> Folded:
    """Make the next global state of a round's replies by ``server.rule``.

    ``agg-error`` among the facts is ``|D - made| / |D|`` as measured; ``fedsa`` has none, since its
    products stay with the clients.  ``truncation-error`` is what a rule cut off knowingly.
    """
    rule = config.server.rule
    if not any(name.endswith(A) for name in state):  # share = "memory"
        return rules.mean(updates, state), {}
    gap = rules.ProductGap(config.seed, state)
    if rule != "fedsa":
        updates = gap.watch(updates, config.lora.scale_of)
    made: dict[str, NDArray[Any]]
    facts: dict[str, float] = {}
    if rule == "mean":
        made = rules.mean(updates, state)
    else:
        stream = _contributions(config, updates, state)
        made, facts = _FOLDS[rule](config, server_round, stream, state)
    if rule != "fedsa":
        facts["agg-error"] = gap.relative(_change(config, made, state))
    return made, facts


def _contributions(
    config: RunConfig, updates: Iterable[Update], state: Arrays
) -> Iterator[rules.LowRankUpdate]:
    """Return single contributions' arrays: a whole weight goes out as exactly as it came in."""
    for update in updates:
        arrays = {name: array.astype(state[name].dtype) for name, array in update.mean().items()}
        scale = config.lora.scale_of(update.origin)
        yield rules.LowRankUpdate(arrays, update.weight, scale, update.origin)


def _change(config: RunConfig, made: Arrays, state: Arrays) -> dict[str, Factors]:
    """By projection, what the new state adds to where the round's clients began."""
    scale = config.lora.alpha / config.lora.rank
    change = {}
    for module in (name[: -len(A)] for name in made if name.endswith(A)):
        pair = Factors(made[module + B], made[module + A]).times(scale)
        sides = [_side(made, module), _side(state, module).times(-1.0)]
        change[module] = Factors.joined([pair, *sides])
    return change


Stream = Iterable[rules.LowRankUpdate]


def _nearest(config: RunConfig, server_round: int, stream: Stream, state: Arrays) -> Folded:
    """SVD refactor and FlexLoRA: the adapter of the global rank that is nearest to ``D``.

    A client of a smaller rank gets the same one cut further (``Exchange``).  The two rules differ
    in the gauge: FlexLoRA spreads the singular values over both factors; the refactor's A is
    orthonormal, as in FedSVD, which keeps the pace of the first round (``svd_refactor``).
    """
    lora, norm = config.lora, 1.0 if config.server.rule == "svd" else 0.0
    # Directions that nobody used keep the sent A, or no gradient would ever reach them again.
    scale = lora.alpha / lora.rank
    made, cut = rules.svd_refactor(stream, lora.rank, scale, fill=state, row_norm=norm)
    return _over(state, made.arrays), {"truncation-error": cut.error}


def _stacked(config: RunConfig, server_round: int, stream: Stream, state: Arrays) -> Folded:
    """FLoRA: the stack joins the side; LoRA's own place stays at the start, with ``B = 0``."""
    made = rules.stack(stream)
    rest = {name: array for name, array in made.arrays.items() if not name.endswith((A, B))}
    side, facts = _grown(config, state, made.products())
    return {**_over(state, rest), **side}, facts


def _with_residual(config: RunConfig, server_round: int, stream: Stream, state: Arrays) -> Folded:
    """FedEx: the mean of factors stays LoRA, their covariance joins the side."""
    made = rules.fedex(stream, config.lora.alpha / config.lora.rank)
    side, facts = _grown(config, state, made.residual)
    return {**_over(state, made.arrays), **side}, facts


def _frozen_a(config: RunConfig, server_round: int, stream: Stream, state: Arrays) -> Folded:
    made = rules.ffa(stream, config.lora.alpha / config.lora.rank, kept=state)
    return _over(state, made.arrays), {}


def _by_turns(config: RunConfig, server_round: int, stream: Stream, state: Arrays) -> Folded:
    made = rules.rolora(stream, server_round, config.lora.alpha / config.lora.rank, kept=state)
    return _over(state, made.arrays), {}


def _own_b(config: RunConfig, server_round: int, stream: Stream, state: Arrays) -> Folded:
    """FedSA: the state's B stays zero, which is what a client without one of its own has."""
    made = rules.fedsa(stream, config.lora.alpha / config.lora.rank)
    return _over(state, made.arrays), {}


_FOLDS: dict[str, Callable[[RunConfig, int, Stream, Arrays], Folded]] = {
    "svd": _nearest,
    "flex": _nearest,
    "flora": _stacked,
    "fedex": _with_residual,
    "ffa": _frozen_a,
    "rolora": _by_turns,
    "fedsa": _own_b,
}


def _over(state: Arrays, made: Arrays) -> dict[str, NDArray[Any]]:
    """Return the state with what was made in its place."""
    return {name: made.get(name, array) for name, array in state.items()}


def _side(arrays: Arrays, module: str) -> Factors:
    if module + SIDE_A in arrays:
        return Factors(arrays[module + SIDE_B], arrays[module + SIDE_A])
    out, inner = arrays[module + B].shape[0], arrays[module + A].shape[1]
    return Factors(np.zeros((out, 0)), np.zeros((0, inner)))


def _grown(config: RunConfig, state: Arrays, added: Mapping[str, Factors]) -> Folded:
    """Add to the side; at the width of the layer's shorter side it grows no more, and is exact.

    With ``server.side-rank`` it is cut to the nearest of that rank instead.
    """
    arrays: dict[str, NDArray[Any]] = {}
    lost = whole = 0.0
    rank = config.server.side_rank
    for module, more in added.items():
        side = Factors.joined([_side(state, module), more])
        if rank:
            spectrum = side.spectrum()
            side = spectrum.pair(rank, 1.0)
            lost, whole = math.hypot(lost, spectrum.tail(rank)), math.hypot(whole, spectrum.tail(0))
        side = side.folded().astype(state[module + A].dtype)
        arrays |= {module + SIDE_A: side.a, module + SIDE_B: side.b}
    return arrays, {"truncation-error": lost / whole if whole else 0.0} if rank else {}
