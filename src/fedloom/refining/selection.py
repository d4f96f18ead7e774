# SPDX-License-Identifier: Apache-2.0
"""``select``: whose help to ask for, in which form, given links, time, memory and privacy.

FedRefine (arXiv 2603.28772) says that a device chooses by task and resources and not how.  Here a
candidate is one sender in one form, a cache in some precision or text; what is chosen is the set
with the largest sum of gains that fits, at most one form a sender.  No help is a candidate too.
Everything that the choice looked at, and why each candidate was taken or left, is in the decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from fedloom.errors import Refusal
from fedloom.intervals import Interval

TEXT, NONE, ANY = "text", "none", "any"
DIMINISH = 0.6
"""What the next best sender's gain counts beside the one before it."""
NODES = 200_000
"""Sets that are looked at; six senders in four forms need a tenth of it at worst."""
_FRAME = 400  # bytes of a layer's frame beside its numbers, about
_CLOSE = 1e-12  # values closer than this are equal


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One sender in one form, with what is known of it.

    Attributes
    ----------
    sender : str
        Its model hash, or another name that no other sender has.
    way : str
        ``bf16``, ``int8``, ``int4``, or ``text`` for a message in words (T2T).
    gains : mapping
        Task class -> held-out accuracy with its help less that without; ``any`` for all others.
    token_bytes, fixed_bytes : float
        On the wire: for each token of the context (all layers that are asked for), and besides.
    prefill, fuse : float
        Tokens a second: of the sender reading, of the receiver fusing or reading what came.
    decode_seconds : float
        What the sender takes to write a message.
    memory : float
        Bytes that its fuser and its slots take at the receiver.
    trust : int
        Highest privacy level of a question that this sender may be shown.
    """

    sender: str
    way: str
    gains: Mapping[str, Interval]
    token_bytes: float
    fixed_bytes: float = 0.0
    prefill: float = math.inf
    fuse: float = math.inf
    decode_seconds: float = 0.0
    memory: float = 0.0
    trust: int = 0

    def __post_init__(self) -> None:
        costs = (self.token_bytes, self.fixed_bytes, self.decode_seconds, self.memory)
        known = all(math.isfinite(x) and x >= 0 for x in costs)
        if not known or not min(self.prefill, self.fuse) > 0 or self.way == NONE:
            raise Refusal(
                f"candidate {self.sender[:12]} by {self.way} has costs {costs} and speeds"
                f" {self.prefill}, {self.fuse}: expected finite ones of 0 or more, and above 0"
            )

    def gain(self, task: str) -> Interval | None:
        """Return what is known of its help with a task class."""
        return self.gains.get(task, self.gains.get(ANY))


def cache_ways(
    sender: str,
    gains: Mapping[str, Mapping[str, Interval]],
    *,
    layers: int,
    heads: int,
    dim: int,
    **costs: float,
) -> list[Candidate]:
    """Return a sender's cache as a candidate in each scheme whose gains are known.

    Parameters
    ----------
    gains
        Scheme -> task class -> gain: what fewer bits cost is for a measurement to say.
    layers
        That the fuser looks at (``CacheFuser.sender_layers``), not all that the sender has.
    costs
        ``prefill``, ``fuse``, ``memory`` and ``trust`` of ``Candidate``.

    >>> [c.token_bytes for c in cache_ways("s", {"bf16": {}}, layers=24, heads=2, dim=64)]
    [12288.0]
    """
    numbers = 2 * heads * dim
    each = {
        "bf16": 2.0 * numbers,
        "int8": numbers + numbers / 128 + 2,  # codes, scales of keys, one scale of values
        "int4": numbers / 2 + numbers / 32 + 4 * heads,
    }
    if odd := sorted(gains.keys() - each.keys()):
        raise Refusal(f"gains of scheme {odd[0]}: expected some of {', '.join(each)}")
    shape = {"layers": layers, "heads": heads, "dim": dim}
    if min(shape.values()) < 1:
        raise Refusal(f"a cache of {shape}: expected 1 or more of each")
    trust = int(costs.pop("trust", 0))
    return [
        Candidate(
            sender=sender,
            way=scheme,
            gains=known,
            token_bytes=each[scheme] * layers,
            fixed_bytes=float(_FRAME * layers),
            trust=trust,
            **costs,
        )
        for scheme, known in gains.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one question may cost.

    Attributes
    ----------
    tokens : int
        Of the context that senders read.
    bandwidth, rtt : mapping
        Sender -> bits a second and seconds; ``any`` for all others.
    deadline : float
        Seconds until the answer must begin, of which ``own_seconds`` are the receiver's own prompt.
    privacy : int
        Level of the question: only senders trusted that far are asked.
    cautious : bool
        Count a gain at its interval's lower end: who has not been shown to help is not asked.
    senders : int
        At most so many.
    """

    tokens: int
    bandwidth: Mapping[str, float]
    deadline: float
    rtt: Mapping[str, float] = field(default_factory=dict)
    own_seconds: float = 0.0
    memory: float = math.inf
    privacy: int = 0
    cautious: bool = True
    senders: int = 8

    def __post_init__(self) -> None:
        links = [*self.bandwidth.values(), *self.rtt.values()]
        limits = (self.deadline, self.own_seconds, self.memory, self.senders, *links)
        if self.tokens < 1 or not all(x >= 0 for x in limits):
            raise Refusal(
                f"budget of {self.tokens} tokens, deadline {self.deadline} s, links {links}:"
                " expected at least one token, and nothing below 0"
            )


@dataclass(frozen=True)
class Decision:
    """What to ask for.

    Attributes
    ----------
    chosen : tuple of Candidate
        By sender; empty for no help.
    value : float
        The diminishing sum of their gains.
    seconds, nbytes : float
        Until the answer begins, and on the wire.
    exact : bool
        False if the search was cut short: the set fits, but a better one may exist.
    log : dict
        Inputs, every candidate's estimates, and why it was taken or left; JSON as it stands.
    """

    chosen: tuple[Candidate, ...]
    value: float
    seconds: float
    nbytes: float
    exact: bool
    log: dict[str, Any]

    @property
    def way(self) -> str:
        """Say in a word what happens: none, text, cache, or both."""
        ways = {TEXT if c.way == TEXT else "cache" for c in self.chosen}
        return {0: NONE, 1: next(iter(ways), NONE)}.get(len(ways), "both")


@dataclass(frozen=True)
class _Estimate:
    """One candidate under one budget."""

    candidate: Candidate
    gain: float
    arrival: float
    """Seconds until all of it has come."""
    work: float
    """Seconds that the receiver then needs: these add up over senders."""
    nbytes: float


def select(candidates: Iterable[Candidate], budget: Budget, task: str) -> Decision:
    """Choose senders and forms for one question.

    The set ``S`` maximises ``sum_k 0.6^(k-1) gain_(k)``, gains in falling order, subject to
    ``own + max arrival + sum work <= deadline``, ``sum memory <= memory`` and
    ``trust >= privacy``, where arrival is ``rtt + prefill + writing + 8 bytes / bandwidth``.  The
    search is exact for what a device can ask (``NODES``); equal sets go by fewer senders, then
    seconds, then bytes, then names.

    Raises
    ------
    Refusal
        If one sender comes twice in one form.
    """
    ordered = sorted(candidates, key=lambda c: (c.sender, c.way))
    keys = [(c.sender, c.way) for c in ordered]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise Refusal(f"sender {twice[0][0][:12]} comes twice by {twice[0][1]}: expected once")
    made = [_estimate(candidate, budget, task) for candidate in ordered]
    alone = [_unfit(estimate, budget, task) for estimate in made]
    usable = [estimate for estimate, why in zip(made, alone, strict=True) if not why]
    search = _Search(usable, budget)
    taken = search.best
    log = {
        "task": task,
        "budget": _plain(asdict(budget)),
        "candidates": [
            _row(estimate, why or _why(estimate, taken, budget), estimate in taken)
            for estimate, why in zip(made, alone, strict=True)
        ]
        + [_no_help(taken)],
        "exact": search.exact,
    }
    return Decision(
        tuple(estimate.candidate for estimate in taken),
        _value(taken),
        _seconds(taken, budget),
        sum(estimate.nbytes for estimate in taken),
        search.exact,
        log,
    )


class _Search:
    """Depth first over senders, one form of each or none, with an upper bound on what may come."""

    def __init__(self, usable: Sequence[_Estimate], budget: Budget) -> None:
        by_sender = groupby(usable, key=lambda estimate: estimate.candidate.sender)
        groups = [sorted(group, key=_cheapest) for _, group in by_sender]
        self._groups = sorted(groups, key=lambda group: -max(e.gain for e in group))
        self._tops = [max(e.gain for e in group) for group in self._groups]
        self._budget, self._left = budget, NODES
        self.best: tuple[_Estimate, ...] = ()
        self.exact = True
        self._visit(0, ())

    def _visit(self, at: int, taken: tuple[_Estimate, ...]) -> None:
        if self._left <= 0:
            self.exact = False
            return
        self._left -= 1
        if _rank(taken, self._budget) < _rank(self.best, self._budget):
            self.best = taken
        if at == len(self._groups) or len(taken) >= self._budget.senders:
            return
        room = self._budget.senders - len(taken)
        hoped = sorted([*(e.gain for e in taken), *self._tops[at : at + room]], reverse=True)
        if _diminishing(hoped) < _value(self.best) - _CLOSE:
            return
        for estimate in self._groups[at]:
            if not _breaks((*taken, estimate), self._budget):
                self._visit(at + 1, (*taken, estimate))
        self._visit(at + 1, taken)


def _estimate(candidate: Candidate, budget: Budget, task: str) -> _Estimate:
    known = candidate.gain(task)
    gain = -math.inf if known is None else known.low if budget.cautious else known.value
    nbytes = candidate.fixed_bytes + candidate.token_bytes * budget.tokens
    bandwidth = budget.bandwidth.get(candidate.sender, budget.bandwidth.get(ANY, 0.0))
    sending = 8 * nbytes / bandwidth if bandwidth else math.inf if nbytes else 0.0
    rtt = budget.rtt.get(candidate.sender, budget.rtt.get(ANY, 0.0))
    arrival = rtt + budget.tokens / candidate.prefill + candidate.decode_seconds + sending
    return _Estimate(candidate, gain, arrival, budget.tokens / candidate.fuse, nbytes)


def _unfit(estimate: _Estimate, budget: Budget, task: str) -> str:
    """Say why a candidate cannot be taken even by itself, or nothing."""
    candidate, known = estimate.candidate, estimate.candidate.gain(task)
    if candidate.trust < budget.privacy:
        return f"trusted to level {candidate.trust}, the question has {budget.privacy}"
    if known is None:
        return f"nothing is known of its gain on {task}"
    if not estimate.gain > 0 or known.high < 0:
        what = "lower end of its gain" if budget.cautious else "gain"
        return f"not shown to help: the {what} is {estimate.gain:.4g}"
    if not budget.senders:
        return "no senders wanted"
    return _breaks((estimate,), budget)


def _breaks(taken: Sequence[_Estimate], budget: Budget) -> str:
    """Say which limit a set breaks, or nothing."""
    if math.isinf(max(e.arrival for e in taken)):
        return "no bandwidth: it would never arrive"
    if (seconds := _seconds(taken, budget)) > budget.deadline:
        return f"{seconds:.3g} s, deadline {budget.deadline:.3g} s"
    if (memory := sum(e.candidate.memory for e in taken)) > budget.memory:
        return f"{memory:.3g} bytes of memory, {budget.memory:.3g} are free"
    return ""


def _why(estimate: _Estimate, taken: Sequence[_Estimate], budget: Budget) -> str:
    """Say why a candidate that would fit by itself was taken or left."""
    if estimate in taken:
        return "taken"
    sender = estimate.candidate.sender
    for other in taken:
        if other.candidate.sender == sender:
            return f"the same sender is taken by {other.candidate.way}"
    if len(taken) >= budget.senders:
        return f"{budget.senders} better senders are taken"
    broken = _breaks((*taken, estimate), budget)
    return f"beside those taken: {broken}" if broken else "adds nothing to those taken"


def _row(estimate: _Estimate, why: str, taken: bool) -> dict[str, Any]:
    candidate = estimate.candidate
    return {
        "sender": candidate.sender,
        "way": candidate.way,
        "gain": _finite(estimate.gain),
        "arrival_seconds": _finite(estimate.arrival),
        "work_seconds": _finite(estimate.work),
        "bytes": estimate.nbytes,
        "memory": candidate.memory,
        "trust": candidate.trust,
        "gains": {task: list(map(_finite, _limits(x))) for task, x in candidate.gains.items()},
        "taken": taken,
        "why": why,
    }


def _no_help(taken: Sequence[_Estimate]) -> dict[str, Any]:
    why = "help is worth more" if taken else "nothing fits that is worth more than none"
    told = {"sender": NONE, "way": NONE, "gain": 0.0, "arrival_seconds": 0.0, "work_seconds": 0.0}
    return {**told, "bytes": 0.0, "memory": 0.0, "taken": not taken, "why": why}


def _value(taken: Sequence[_Estimate]) -> float:
    return _diminishing(sorted((e.gain for e in taken), reverse=True))


def _diminishing(gains: Sequence[float]) -> float:
    return math.fsum(gain * DIMINISH**k for k, gain in enumerate(gains))


def _seconds(taken: Sequence[_Estimate], budget: Budget) -> float:
    arrival = max((e.arrival for e in taken), default=0.0)
    return budget.own_seconds + arrival + math.fsum(e.work for e in taken)


def _rank(taken: Sequence[_Estimate], budget: Budget) -> tuple[float, int, float, float, list[Any]]:
    """Order sets, the best first; values are rounded, or noise would decide between equals."""
    names = sorted((e.candidate.sender, e.candidate.way) for e in taken)
    value, nbytes = round(_value(taken), 12), sum(e.nbytes for e in taken)
    return -value, len(taken), _seconds(taken, budget), nbytes, names


def _cheapest(estimate: _Estimate) -> tuple[float, float, str]:
    return -estimate.gain, estimate.arrival + estimate.work, estimate.candidate.way


def _limits(x: Interval) -> tuple[float, float, float]:
    return x.value, x.low, x.high


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _plain(x: Any) -> Any:
    """Make JSON of it: there is no infinity in JSON."""
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    return _finite(x) if isinstance(x, float) else x
