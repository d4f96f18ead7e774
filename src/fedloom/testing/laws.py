# SPDX-License-Identifier: Apache-2.0
"""The laws of federation, each as a function that a bench is put through.

A law's docstring is what a report says of it.  Some rules do not promise all of them: a median is
no sum (``grouping-free``), a stack of factors grows with the clients (``streaming``), and one that
turns factors hands nobody's own back (``one-client``, ``consensus``).
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from flwr.app import ConfigRecord, Message

from fedloom import border
from fedloom.rules.exchange import is_side_array
from fedloom.strategies.roster import ReplyStream
from fedloom.testing.bench import ROUND, Bench, LawBroken, Member, MemberGrid, Named
from fedloom.wire import Arrays, Update

_MANY = 12
_GOOD = tuple(Member(number) for number in range(5))
_FAULTS = ("raises", "nan", "shape", "dtype", "name")


def order_free(bench: Bench) -> None:
    """Replies in any order give the same arrays."""
    first = bench.round(_GOOD)
    for order in ((4, 3, 2, 1, 0), (2, 0, 4, 1, 3)):
        _same(bench, bench.round(_GOOD, order).arrays, first.arrays, f"order {order}")


def repeatable(bench: Bench) -> None:
    """The same replies to a fresh strategy give the same arrays."""
    _same(bench, bench.round(_GOOD).arrays, bench.round(_GOOD).arrays, "the second time")


def grouping_free(bench: Bench) -> None:
    """Updates may be added up beforehand, in any groups: ``fold`` sees sums alone."""
    start = bench.manifest()[1]

    def folded(groups: Iterable[Update]) -> Named:
        strategy = bench.made(len(_GOOD))
        strategy.server_round = ROUND
        return strategy.fold(iter(groups), start)

    manifest = bench.made(len(_GOOD)).expected_reply(ROUND, 0)
    updates = [Update.of(bench.sends(m, manifest), bench.weight(m), m.number) for m in _GOOD]
    whole = folded(updates)
    a, b, c, d, e = updates
    for said, groups in (("(a+b), c, (d+e)", [a + b, c, d + e]), ("one sum", [a + b + c + d + e])):
        _same(bench, folded(groups), whole, said)


def streaming(bench: Bench) -> None:
    """Replies are folded as they come: memory does not grow with their number."""
    wide = _wide(bench)
    members = [Member(number) for number in range(_MANY)]
    strategy = wide.made(_MANY)
    grid = _Watched(wide.app(strategy, members), _MANY, wide.config.flat())
    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start()
    try:
        wide.play(strategy, ReplyStream(grid, 60.0))
    finally:
        if ours:
            tracemalloc.stop()
    reply = strategy.expected_reply(ROUND, 0).nbytes()
    late = (grid.held[-1] - grid.held[_MANY // 2]) / (_MANY - 1 - _MANY // 2)
    if late > reply / 4:
        raise LawBroken(f"every reply leaves {late:.0f} bytes behind; one has {reply}")


def one_client(bench: Bench) -> None:
    """One client's round is what that client sent."""
    member = Member(7)
    manifest = bench.made(1).expected_reply(ROUND, 0)
    sent = bench.sends(member, manifest)
    made = bench.round([member]).arrays
    _same(bench, {name: made[name] for name in sent if name in made}, sent, "one client")


def consensus(bench: Bench) -> None:
    """Clients that send the same get the same back, whatever their weights."""
    members = [Member(7, weight) for weight in (3, 50, 411, 1)]
    _same(bench, bench.round(members).arrays, bench.round(members[:1]).arrays, "four of one mind")


def finite(bench: Bench) -> None:
    """Finite replies give finite arrays: also all equal, all zero, large or tiny ones."""
    cases = {
        "drawn": _GOOD,
        "equal": [Member(7)] * 3,
        "zero": [Member(number, scale=0.0) for number in range(3)],
        "large": [Member(number, scale=1e12) for number in range(3)],
        "tiny": [Member(number, scale=1e-30) for number in range(3)],
        "one": [Member(7)],
    }
    only_drawn = bench.config.method == "faast"  # its sums are held against what sums can be
    for said, members in cases.items():
        if only_drawn and any(member.scale != 1.0 for member in members):
            continue
        for name, array in bench.round(members).arrays.items():
            if not np.isfinite(array).all():
                raise LawBroken(f"{said} replies: {name} is not finite")


def listing(bench: Bench) -> None:
    """Names, shapes and dtypes are those of the start; a side adapter may come beside them."""
    _, start = bench.manifest()
    made = bench.round(_GOOD).arrays
    for name in sorted(start.keys() | made.keys()):
        if name not in start and not is_side_array(name):
            raise LawBroken(f"array {name} was made and is nowhere in the start")
        if name not in made:
            raise LawBroken(f"array {name} is lost")
        if name in start:
            came, wanted = made[name], start[name]
            if (came.shape, came.dtype) != (wanted.shape, wanted.dtype):
                raise LawBroken(
                    f"{name} is {came.shape} {came.dtype}, started as {wanted.shape} {wanted.dtype}"
                )


def sent_untouched(bench: Bench) -> None:
    """``fold`` reads what was sent and what came, and changes neither."""
    start = bench.manifest()[1]
    strategy = bench.made(3)
    before = {name: array.copy() for name, array in start.items()}
    strategy.server_round = ROUND
    held: list[tuple[Named, Update]] = []

    def stream() -> object:
        for member in _GOOD[:3]:
            arrays = bench.sends(member, strategy.expected_reply(ROUND, member.number))
            held.append((arrays, Update.of(arrays, 2.0, member.number)))
            yield held[-1][1]

    if bench.config.method != "faast":  # its fold takes sums that its own messages brought
        strategy.fold(stream(), start)  # type: ignore[arg-type]
    exact = Bench(bench.strategy, bench.config)
    _same(exact, start, before, "what was sent")
    for arrays, update in held:
        _same(
            exact, update.whole(), {n: 2.0 * a.astype("f8") for n, a in arrays.items()}, "a reply"
        )


def zero_weight(bench: Bench) -> None:
    """A reply of no examples is named and dropped."""
    _without(bench, [Member(9, fault="weightless")])


def drop_outs(bench: Bench) -> None:
    """Clients that fail or send what cannot be read leave the round as if never drawn."""
    _without(bench, [Member(10 + i, fault=fault) for i, fault in enumerate(_FAULTS)])


def same_nodes(bench: Bench) -> None:
    """Who works depends on seed, round and partition ids, and not on node ids or on chance."""
    half = bench.with_keys(sampling__fraction=0.5)
    drawn = [_asked(half, reverse_nodes=turned) for turned in (False, True)]
    for server_round, (one, other) in enumerate(zip(*drawn, strict=True), 1):
        if one != other:
            raise LawBroken(f"round {server_round}: {one} worked, then {other}")
        if not one or len(set(one)) != len(one):
            raise LawBroken(f"round {server_round}: {one} are to work")


LAWS: dict[str, Callable[[Bench], None]] = {
    "order-free": order_free,
    "repeatable": repeatable,
    "grouping-free": grouping_free,
    "streaming": streaming,
    "one-client": one_client,
    "consensus": consensus,
    "finite": finite,
    "listing": listing,
    "sent-untouched": sent_untouched,
    "zero-weight": zero_weight,
    "drop-outs": drop_outs,
    "same-nodes": same_nodes,
}
"""Name -> law."""


class _Watched(MemberGrid):
    """Notes how much memory is held each time that a client is about to work."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.held: list[int] = []

    def _deliver(self, name: str, message: Message) -> Message:
        if len(self.held) in (_MANY // 2, _MANY - 1):
            gc.collect()
        self.held.append(tracemalloc.get_traced_memory()[0])
        return super()._deliver(name, message)


def _wide(bench: Bench) -> Bench:
    """Return a bench whose replies outweigh what a round writes down about each of them."""
    width = 64 if bench.config.method == "faast" else 1024
    return Bench(
        bench.strategy,
        bench.config,
        bench.seed,
        bench.tolerance,
        bench.contribute,
        ((width, width),),
    )


def _without(bench: Bench, bad: Sequence[Member]) -> None:
    """Compare a round of good and bad members with one of the good alone."""
    members = [*_GOOD, *bad]
    made = bench.round(members)
    wanted = set(range(len(_GOOD), len(members)))
    if odd := wanted ^ made.failed.keys():
        fault = members[min(odd)].fault or "good"
        said = "was not named" if min(odd) in wanted else f"was dropped: {made.failed[min(odd)]}"
        raise LawBroken(f"a client whose reply is {fault} {said}")
    _same(bench, made.arrays, bench.round(_GOOD).arrays, "with those who failed")


def _asked(bench: Bench, *, reverse_nodes: bool, count: int = 8) -> list[list[int]]:
    strategy = bench.made(count, reverse_nodes=reverse_nodes)
    grid = ReplyStream(bench.grid(strategy, [Member(n) for n in range(count)]), 60.0)
    start, found = border.pack_arrays(bench.manifest()[1]), []
    partition = {node: p for p, node in strategy.roster.nodes.items()}
    for server_round in range(1, 7):
        messages = strategy.configure_train(server_round, start, ConfigRecord(), grid)
        found.append(sorted(partition[m.metadata.dst_node_id] for m in messages))
    return found


def _same(bench: Bench, made: Arrays, wanted: Arrays, said: str) -> None:
    if gap := bench.same(made, wanted):
        raise LawBroken(f"{said}: {gap}")
