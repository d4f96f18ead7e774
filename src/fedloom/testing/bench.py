# SPDX-License-Identifier: Apache-2.0
"""A round with made-up clients: their replies are drawn from a seed, the messages are real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedloom import __version__, border, seeds
from fedloom.clients.bridge import AdapterClient, serve
from fedloom.config import RunConfig
from fedloom.rules.contributions import A, B
from fedloom.rules.exchange import travels
from fedloom.rules.statistics import GRAM, Gram
from fedloom.simulations.inprocess import InProcessGrid
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.wire import Arrays, Manifest

Named = dict[str, NDArray[Any]]
Contribute = Callable[[np.random.Generator, Manifest], Named]
"""Makes what one client sends, given what its reply will be held against."""

ROUND = 1
_FIRST_NODE = 1000  # as ``InProcessGrid`` numbers them
_SECONDS = 60.0
_ROWS, _CLASSES = 20, 3


class LawBroken(AssertionError):
    """A strategy does not keep a law; one line says how it showed."""


@dataclass(frozen=True)
class Member:
    """One made-up client: what it sends, and what is wrong with it."""

    number: int
    """Decides what it sends."""
    weight: float = 0.0
    """Examples; 0 draws a whole number from the seed."""
    fault: str = ""
    """``raises``, ``nan``, ``shape``, ``dtype``, ``name`` or ``weightless``; empty for none."""
    scale: float = 1.0
    """Multiplies what it sends."""


@dataclass(frozen=True)
class Outcome:
    """What was left after a round."""

    arrays: Named
    failed: dict[int, str]
    """Partition -> why its reply was dropped."""


@dataclass(frozen=True)
class Bench:
    """A strategy's class, a recipe, and a manifest of a small made-up adapter.

    Parameters
    ----------
    strategy
        The class that is looked at.
    config
        The recipe; who is sampled is the bench's own choice.
    seed
        Of all that is drawn.
    tolerance
        How far two results that must be the same may be apart, relative to their norm; 0 asks for
        the same bits.
    contribute
        What a client sends; normal numbers, or the sums of made-up rows if the method is faast.
    """

    strategy: type[AdapterStrategy]
    config: RunConfig
    seed: int = 0
    tolerance: float = 0.0
    contribute: Contribute | None = None
    shapes: tuple[tuple[int, int], ...] = field(default=((12, 9), (5, 9)))
    """Outputs and inputs of each adapted projection."""

    def manifest(self) -> tuple[Manifest, Named]:
        """Return what travels and the start of all that is trained."""
        if self.config.method == "faast":
            arrays = {"weights": np.zeros((self.shapes[0][1], _CLASSES))}
            return self._listed(arrays, {}), arrays
        random, rank = seeds.generator(self.seed, "start"), self.config.lora.rank
        arrays = {}
        for i, (out, inner) in enumerate(self.shapes):
            arrays[f"layers.{i}.q{A}"] = random.normal(size=(rank, inner)).astype(np.float32)
            arrays[f"layers.{i}.q{B}"] = random.normal(size=(out, rank)).astype(np.float32)
            arrays[f"layers.{i}.memory.gate"] = random.normal(size=out).astype(np.float32)
        sent = {name: array for name, array in arrays.items() if travels(self.config, name)}
        rest = {name: array for name, array in arrays.items() if name not in sent}
        return self._listed(sent, rest if self.config.share == "all" else {}), {**sent, **rest}

    def _listed(self, sent: Arrays, kept: Arrays) -> Manifest:
        made = {"method": self.config.method, "version": __version__, "base": "", "tokenizer": ""}
        return Manifest.of(sent, kept=kept or None, **made)

    def made(self, count: int, *, reverse_nodes: bool = False) -> AdapterStrategy:
        """Make a fresh strategy for so many clients."""
        nodes = {p: _FIRST_NODE + (count - 1 - p if reverse_nodes else p) for p in range(count)}
        told: dict[int, dict[str, Any]] = {p: {"name": f"client {p}"} for p in nodes}
        config = self.config.replaced(clients__count=count) if self._free else self.config
        roster = Roster(nodes, told)
        return self.strategy(config, self.manifest()[0], roster, Journal(), run_token="0" * 32)

    @property
    def _free(self) -> bool:
        """Whether the recipe leaves it to us how many clients there are."""
        return not self.config.lora.own_ranks()

    def app(self, strategy: AdapterStrategy, members: Sequence[Member]) -> ClientApp:
        """Return an app that answers training messages as these members do."""
        app = ClientApp()
        made = partial(_Client, self, strategy, members)
        serve(app, made, action=strategy.action)
        return app

    def grid(self, strategy: AdapterStrategy, members: Sequence[Member]) -> MemberGrid:
        """Return a grid whose nodes are these members."""
        return MemberGrid(self.app(strategy, members), len(members), self.config.flat())

    def round(self, members: Sequence[Member], order: Sequence[int] | None = None) -> Outcome:
        """Send one round to all members, fold what comes back, and return what is kept.

        Parameters
        ----------
        order
            Positions of the messages in the order in which they are answered.
        """
        strategy = self.made(len(members))
        grid = self.grid(strategy, members)
        grid.order = order
        arrays = self.play(strategy, ReplyStream(grid, _SECONDS))
        events = strategy.journal.rows["events"]
        failed = {e["partition"]: e["reason"] for e in events if e["event"] == "client-failed"}
        return Outcome(arrays, failed)

    def play(self, strategy: AdapterStrategy, grid: ReplyStream) -> Named:
        """Run one training round of a strategy on a grid."""
        start = border.pack_arrays(self.manifest()[1])
        messages = strategy.configure_train(ROUND, start, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages, timeout=_SECONDS)
        folded, _ = strategy.aggregate_train(ROUND, replies)
        if folded is None:
            raise LawBroken("aggregate_train made no arrays of good replies")
        return border.unpack_arrays(folded)

    def sends(self, member: Member, expected: Manifest) -> Named:
        """Draw what a member sends."""
        random = seeds.generator(self.seed, member.number, "sends")
        make = self.contribute or (_sums if self.config.method == "faast" else _normal)
        made = make(random, expected)
        return {name: (array * member.scale).astype(array.dtype) for name, array in made.items()}

    def weight(self, member: Member) -> float:
        """Return a member's examples."""
        if self.config.method == "faast":
            return _ROWS  # its keys have length one, so the sums tell how many they are
        drawn = seeds.generator(self.seed, member.number, "weight").integers(1, 500)
        return member.weight or int(drawn)

    def same(self, one: Arrays, other: Arrays) -> str:
        """Say where two results part; empty if they are the same."""
        if one.keys() != other.keys():
            return f"only one has {min(one.keys() ^ other.keys())}"
        for name, array in one.items():
            theirs = other[name]
            if array.shape != theirs.shape or array.dtype != theirs.dtype:
                return f"{name} is {array.shape} {array.dtype} and {theirs.shape} {theirs.dtype}"
            gap = float(np.linalg.norm(np.subtract(array, theirs, dtype=np.float64)))
            if not gap <= self.tolerance * float(np.linalg.norm(theirs.astype(np.float64))):
                return f"{name} differs by {gap:.3g}"
        return ""

    def with_keys(self, **keys: bool | int | float | str) -> Bench:
        """Return a bench whose recipe has other keys; ``__`` stands for a dot."""
        return replace(self, config=self.config.replaced(**keys))


class MemberGrid(InProcessGrid):
    """Answers in the order that a law wants."""

    order: Sequence[int] | None = None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages in, in ``order``."""
        listed = list(messages)
        return super().push_messages([listed[i] for i in self.order or range(len(listed))])


class _Client(AdapterClient):
    """Answers training messages as a ``Member`` says."""

    def __init__(
        self, bench: Bench, strategy: AdapterStrategy, members: Sequence[Member], context: Context
    ) -> None:
        super().__init__()
        self.config = bench.config
        self._bench, self._strategy = bench, strategy
        self._partition = int(context.node_config["partition-id"])
        self._member = members[self._partition]

    def fit(self, parameters: Any, config: dict[str, Any]) -> tuple[Any, int, dict[str, Any]]:
        """Send what was drawn, with the member's fault in it."""
        member, fault = self._member, self._member.fault
        if fault == "raises":
            raise RuntimeError("this made-up client is out of order")
        expected = self._strategy.expected_reply(int(config["round"]), self._partition)
        arrays = self._bench.sends(member, expected)
        name = next(iter(arrays))
        if fault == "nan":
            arrays[name] = np.full_like(arrays[name], np.nan)
        elif fault == "shape":
            arrays[name] = arrays[name][:1]
        elif fault == "dtype":
            arrays[name] = arrays[name].astype(np.float16)
        elif fault == "name":
            arrays[f"{name}.other"] = arrays.pop(name)
        self.array_names = list(arrays)
        weight = 0 if fault == "weightless" else self._bench.weight(member)
        told: dict[str, Any] = dict.fromkeys(self._strategy.train_metrics, 1)
        return list(arrays.values()), weight, told  # type: ignore[return-value]


def _normal(random: np.random.Generator, expected: Manifest) -> Named:
    return {
        name: random.normal(size=shape).astype(dtype)
        for name, (shape, dtype) in expected.arrays.items()
    }


def _sums(random: np.random.Generator, expected: Manifest) -> Named:
    """FAAST's sums over made-up rows of length one."""
    packed = expected.arrays[GRAM][0][0]  # d (d + 1) / 2
    keys = random.normal(size=(_ROWS, int((2 * packed) ** 0.5)))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    values = np.eye(_CLASSES)[random.integers(_CLASSES, size=_ROWS)]
    made = Gram.of(keys, values).arrays()
    return {name: made[name] for name in expected.arrays}
