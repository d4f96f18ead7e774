"""FedNL's rounds under ``privacy`` without a model: strategy and messages are the real ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom import border, ciphers
from fedloom.ciphers import Source
from fedloom.clients.bridge import AdapterClient, serve
from fedloom.clients.private import update_to_send
from fedloom.clients.secure import serve_sums
from fedloom.config import RunConfig
from fedloom.rules.contributions import A, B
from fedloom.rules.exchange import Exchange, travels
from fedloom.simulations.inprocess import InProcessGrid
from fedloom.strategies import FedNL, Journal, ReplyStream, Roster
from fedloom.strategies.rounds import run_rounds
from fedloom.wire import Manifest

TOKENS = (f"{n:032x}" for n in itertools.count(1))  # a run of its own: nodes know old ones again
FIRST_NODE = 1000
SIZES = {
    "q" + A: (4, 30),
    "q" + B: (20, 4),
    "v" + A: (4, 30),
    "v" + B: (10, 4),
    "m.memory.g": (50,),
}


def start() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {n: random.normal(size=shape).astype(np.float32) for n, shape in SIZES.items()}


def change(partition: int, server_round: int) -> dict[str, np.ndarray]:
    """What a client learns in a round: about 7 long, in all arrays."""
    random = np.random.default_rng([partition, server_round])
    return {n: random.normal(size=shape) * 0.3 for n, shape in SIZES.items()}


def rows_of(partition: int) -> int:
    return 10 + 7 * partition


def recipe(**changes: Any) -> RunConfig:
    small = {"rounds": 2, "clients__count": 5, "lora__rank": 4, "lora__alpha": 8.0}
    small |= {"evaluation__every": 9, "sampling__reply_seconds": 0.2}  # of silence
    return RunConfig().replaced(**{**small, **changes})


def manifest_of(config: RunConfig) -> Manifest:
    memory = {n: a for n, a in start().items() if config.share == "all" or ".memory." in n}
    sent = {n: a for n, a in memory.items() if ".memory." in n or travels(config, n)}
    return Manifest.of(sent, method="fednl", version="v", base="b", tokenizer="t")


@functools.cache  # every message would build it anew
def config_of(items: tuple[tuple[str, Any], ...]) -> RunConfig:
    return RunConfig.from_flower(dict(items))


class Owner(AdapterClient):
    """Learns what ``learns`` says, and gives it away as a client of FedNL does."""

    learns: Callable[[int, int], dict[str, np.ndarray]] = staticmethod(change)
    source: Source = staticmethod(ciphers.system)

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.config = context, config_of(tuple(context.run_config.items()))
        self.partition = int(context.node_config["partition-id"])

    def send(self, told, begun, trained):
        source, mine = self.source, self.partition
        return update_to_send(
            self.config, self.context, told, begun, trained,
            examples=rows_of(mine), loss=1.0 + mine, source=source,
        )  # fmt: skip

    def fit(self, parameters, config):
        begun = dict(zip(self.array_names, parameters, strict=True))
        learnt = self.learns(self.partition, int(config["round"]))
        exchange = Exchange(self.config, manifest_of(self.config))
        names = exchange.expected(int(config["round"]), self.partition).arrays
        trained = {n: (begun[n] + learnt[n]).astype(np.float32) for n in names}
        if self.config.privacy.on:
            given, weight, metrics = self.send(config, begun, trained), 1, {}
        else:
            given, weight = trained, rows_of(self.partition)
            metrics = {"loss": 1.0 + self.partition}
        self.array_names = list(given)
        return list(given.values()), weight, metrics

    def evaluate(self, parameters, config):
        return 1.0, 2, {"gold-ce-sum": 2.0, "correct": 1}


class Network(InProcessGrid):
    """Keeps all replies; ``lose(kind, partition, round)`` says which never arrive."""

    def __init__(self, app, config: RunConfig, lose=lambda kind, partition, number: False) -> None:
        super().__init__(app, config.clients.count, config.flat())
        self.lose, self.heard = lose, []

    def _deliver(self, name: str, message: Message) -> Message:
        reply = super()._deliver(name, message)
        told = border.config_of(message.content)
        number = int(told.get("round", told.get("secure-round", 0)))
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        self.heard.append((kind, node - FIRST_NODE, number, reply))
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        while pulled := list(super().pull_messages(message_ids)):  # one at a time
            if not self.lose(*self.heard[-1][:3]):
                return pulled
        return []  # now the server waits for what is lost, as long as it likes

    def trained(self, server_round: int) -> dict[int, dict[str, np.ndarray]]:
        """By partition, the arrays of a round's training replies."""
        return {
            partition: border.arrays_of(reply.content)
            for kind, partition, number, reply in self.heard
            if kind == "train.fednl" and number == server_round and reply.has_content()
        }


class Rounds:
    """A run of all rounds; ``states`` has the global arrays after each, the start first."""

    def __init__(
        self,
        config: RunConfig,
        owner=Owner,
        source: Source | None = None,
        folder: Path | None = None,
        token: str = "",
        **network,
    ):
        app = ClientApp()
        serve(app, owner, action="fednl")
        serve_sums(app)
        self.states: list[dict[str, np.ndarray]] = [start()]
        self.grid = Network(app, config, **network)
        self.journal = Journal(folder)
        roster = Roster({p: FIRST_NODE + p for p in range(config.clients.count)}, {})
        keep = lambda number, arrays: self.states.append(arrays)  # noqa: E731
        named = token or next(TOKENS)
        strategy = FedNL(config, manifest_of(config), roster, self.journal, keep, named)
        if source is not None:
            strategy.private._source = source
        self.strategy = strategy

    def run(self) -> Rounds:
        told = self.strategy.config
        self.strategy.start(  # ``run`` would also score the frozen model
            ReplyStream(self.grid, default_timeout=1.0),
            border.pack_arrays(start()),
            told.rounds,
            timeout=told.sampling.reply_seconds,
        )
        return self

    def go_on(self, after: int) -> Rounds:
        """Carry out the rounds that come after a whole one."""
        config, stream = self.strategy.config, ReplyStream(self.grid, default_timeout=1.0)
        run_rounds(
            self.strategy, stream, border.pack_arrays(start()), after=after, rounds=config.rounds,
            timeout=config.sampling.reply_seconds, whole=lambda number, arrays: None,
        )  # fmt: skip
        return self

    def events(self, name: str) -> list[dict]:
        return [e for e in self.journal.rows["events"] if e["event"] == name]


def moved(rounds: Rounds, number: int) -> dict[str, np.ndarray]:
    """What a round added to the state."""
    before, after = rounds.states[number - 1], rounds.states[number]
    return {n: after[n].astype("f8") - before[n] for n in after}


def flat(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(a, "f8").ravel() for _, a in sorted(arrays.items())])
