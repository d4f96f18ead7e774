"""Secure sums through Flower's messages: a real Strategy, a real ClientApp, and a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedloom import border
from fedloom.clients.bridge import AdapterClient, serve
from fedloom.clients.secure import masked, serve_sums
from fedloom.errors import Refusal
from fedloom.rules.fixed_point import BITS, encode, limit
from fedloom.rules.statistics import CROSS, GRAM, SQUARES, Gram
from fedloom.secure import Session, decoded, messages
from fedloom.simulations.inprocess import InProcessGrid
from fedloom.strategies import Journal, ReplyStream, Roster
from fedloom.strategies.secure_sum import SecureSum, Summed

from summations import RUN, chi_square, plain_sum

FIRST_NODE = 1000
COUNT = "count"


def rows(partition: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(partition)
    return random.normal(size=(20 + partition, 30)), random.normal(size=(20 + partition, 4))


def statistics(partition: int) -> dict[str, np.ndarray]:
    gram = Gram.of(*rows(partition))
    return {**gram.arrays(), COUNT: np.array([float(gram.count)])}


class SumClient(AdapterClient):
    """Owns rows; hands in their sums, masked."""

    def __init__(self, context: Context, make: Callable[[int], dict[str, np.ndarray]]) -> None:
        super().__init__()
        self.context, self.make = context, make

    def fit(self, parameters, config):
        arrays = self.make(int(self.context.node_config["partition-id"]))
        words = masked(self.context, config, arrays)
        self.array_names = list(words)
        return list(words.values()), 1, {}


def client_app(make: Callable[[int], dict[str, np.ndarray]] = statistics) -> ClientApp:
    app = ClientApp()
    serve(app, lambda context: SumClient(context, make), action="sum")
    serve_sums(app)
    return app


class Listener(InProcessGrid):
    """Everything that the server receives, byte for byte; what clients know; and a weak network.

    ``lose(message type, partition, server round)`` says whose reply never comes, ``change`` what
    of a message down or up is not what its sender wrote.
    """

    def __init__(self, app: ClientApp, nodes: int, **network: Callable[..., Any]) -> None:
        super().__init__(app, nodes, {})
        self.network = network
        self.heard: list[tuple[str, int, bytes, Message]] = []
        self.secrets: set[bytes] = set()

    def _deliver(self, name: str, message: Message) -> Message:
        kind = message.metadata.message_type
        node = message.metadata.dst_node_id
        if "change" in self.network:
            self.network["change"](kind, node - FIRST_NODE, message)
        reply = super()._deliver(name, message)
        record = self._contexts[node].state.config_records.get("fedloom-secure-sum")
        if record:
            session = Session.from_bytes(record["session"])
            self.secrets |= {*session.secrets, session.own_seed} - {b""}
        if reply.has_content():
            data = recorddict_to_proto(reply.content).SerializeToString()
            self.heard.append((kind, node - FIRST_NODE, data, reply))
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = super().pull_messages(message_ids)
        lose = self.network.get("lose", lambda kind, partition: False)
        kept = [h for h in self.heard if any(h[3] is r for r in replies)]
        return [r for r in replies if not any(h[3] is r and lose(h[0], h[1]) for h in kept)]


class SumStrategy(Strategy):
    """The smallest strategy that learns a sum; replies stream in as they do in ours."""

    def __init__(self, nodes: int, **options: Any) -> None:
        self.roster = Roster({p: FIRST_NODE + p for p in range(nodes)}, {})
        self.journal = Journal()
        self.sums = SecureSum(self.roster, RUN, self.journal, seconds=1.0, **options)
        self.found: list[Summed] = []
        self.refused: list[str] = []

    def configure_train(self, server_round, arrays, config, grid: Grid):
        assert isinstance(grid, ReplyStream)
        built = []
        for p in self.sums.begin(grid, server_round, self.roster.partitions):
            records = border.content({}, self.sums.told(p))
            built.append(Message(records, self.roster.nodes[p], "train.sum"))
        return built

    def aggregate_train(self, server_round, replies: Iterable[Message]):
        for reply in replies:
            if reply.has_error():
                self.refused.append(border.failure_reason(reply)[0])
                continue
            partition = reply.metadata.src_node_id - FIRST_NODE
            self.sums.take(partition, border.arrays_of(reply.content))
        self.found.append(self.sums.finish())
        return ArrayRecord(), MetricRecord()

    def configure_evaluate(self, server_round, arrays, config, grid):
        return []

    def aggregate_evaluate(self, server_round, replies):
        return None

    def summary(self) -> None:
        """Say nothing."""


def run(grid: Grid, strategy: SumStrategy, rounds: int = 1) -> SumStrategy:
    stream = ReplyStream(grid, default_timeout=1.0)
    strategy.start(stream, ArrayRecord(), rounds, timeout=1.0, train_config=ConfigRecord())
    return strategy


def check_sum(found: Summed, partitions: Iterable[int], make=statistics) -> None:
    """Bit for bit what a trusted server would have added up."""
    parts = [make(p) for p in partitions]
    wanted = decoded(plain_sum(parts), BITS)
    assert found.partitions == list(partitions)
    assert found.arrays.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found.arrays[name], array)


def test_two_rounds_of_sums_are_the_plain_ones_bit_for_bit():
    strategy = run(Listener(client_app(), 5), SumStrategy(5), rounds=2)
    assert len(strategy.found) == 2
    for found in strategy.found:
        check_sum(found, range(5))
        assert found.lost == {}
    total = strategy.found[0].arrays
    pooled = Gram.of(*(np.concatenate(x) for x in zip(*map(rows, range(5)), strict=True)))
    got = Gram.from_arrays(total, float(total[COUNT][0]))
    np.testing.assert_allclose(got.packed, pooled.packed, atol=1e-10)
    np.testing.assert_allclose(got.cross, pooled.cross, atol=1e-10)
    assert got.count == pooled.count


def test_a_listener_at_the_server_hears_only_masked_integers():
    grid = Listener(client_app(), 4)
    run(grid, SumStrategy(4), rounds=2)
    kinds = {kind for kind, *_ in grid.heard}
    assert kinds == {"query.secure_keys", "query.secure_shares", "train.sum", "query.secure_unmask"}
    masked_words: list[np.ndarray] = []
    for kind, _, _, reply in grid.heard:
        arrays = border.arrays_of(reply.content)
        assert not reply.content.config_records  # no text from a client
        if kind != "train.sum":
            assert not reply.content.metric_records
            assert {a.dtype.str for a in arrays.values()} <= {"|u1", "<i8"}  # keys, shares, ids
            continue
        assert border.metrics_of(reply.content) == {"num-examples": 1}  # a constant, no count
        assert arrays.keys() == {GRAM, CROSS, SQUARES, COUNT}
        assert {a.dtype for a in arrays.values()} == {np.dtype(np.uint64)}
        masked_words.append(np.concatenate([a.ravel() for _, a in sorted(arrays.items())]))
    assert len(masked_words) == 8
    for words in masked_words:
        assert chi_square(words.tobytes()) < 6
    # Nor does it help to know other clients' numbers, all of them, or those of another round.
    known = [
        np.concatenate([encode(a).ravel() for _, a in sorted(statistics(p).items())])
        for p in range(4)
    ]
    for i, words in enumerate(masked_words):
        for other in (*known, *masked_words[:i], known[0] + known[1] + known[2]):
            assert chi_square((words - other).tobytes()) < 6


def test_no_number_and_no_secret_of_a_client_is_in_any_byte_that_the_server_receives():
    """Seven numbers in eight of a client are as they are in its memory, or in fixed point."""
    grid = Listener(client_app(), 4)
    run(grid, SumStrategy(4))
    heard = b"".join(data for _, _, data, _ in grid.heard)
    assert len(grid.secrets) == 12
    for secret in grid.secrets:
        assert secret not in heard
    for p in range(4):
        for array in (*statistics(p).values(), *rows(p)):
            for number in array.ravel():
                if abs(number) > 1e-3:  # eight bytes that mean something
                    assert np.float64(number).tobytes() not in heard
                    assert encode(np.array([number])).tobytes() not in heard


def test_the_same_listener_hears_an_unmasked_sum():
    """The check above can fail: a client that does not mask is heard."""

    class Careless(SumClient):
        def fit(self, parameters, config):
            words = {n: encode(a) for n, a in self.make(0).items()}
            masked(self.context, config, self.make(0))
            self.array_names = list(words)
            return list(words.values()), 1, {}

    app = ClientApp()
    serve(app, lambda context: Careless(context, statistics), action="sum")
    serve_sums(app)
    grid = Listener(app, 3)
    run(grid, SumStrategy(3))
    heard = b"".join(data for _, _, data, _ in grid.heard)
    assert encode(statistics(0)[CROSS][:1, 0]).tobytes() in heard
    words = [border.arrays_of(r.content)[GRAM] for kind, _, _, r in grid.heard if "train" in kind]
    assert chi_square(words[0].tobytes()) > 6


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("query.secure_keys", [0, 2, 3, 4, 5]),
        ("query.secure_shares", [0, 2, 3, 4, 5]),
        ("train.sum", [0, 2, 3, 4, 5]),
        ("query.secure_unmask", [0, 1, 2, 3, 4, 5]),  # its numbers were in already
    ],
)
def test_a_client_that_is_lost_at_any_step_is_named_and_the_sum_stands(kind, left):
    grid = Listener(client_app(), 6, lose=lambda k, p: (k, p) == (kind, 1))
    strategy = run(grid, SumStrategy(6))
    check_sum(strategy.found[0], left)
    assert list(strategy.found[0].lost) == [1]
    event = strategy.journal.rows["events"][-1]
    assert (event["event"], event["lost"], event["partitions"]) == ("secure-sum", [1], left)
    if kind != "train.sum":
        (failed,) = [e for e in strategy.journal.rows["events"] if e["event"] == "client-failed"]
        assert (failed["partition"], failed["reason"]) == (1, "no reply in time")


def test_clients_that_fail_after_their_shares_are_out_are_taken_out_of_the_masks():
    def make(partition: int) -> dict[str, np.ndarray]:
        if partition in (2, 5):
            raise RuntimeError("the disk is full")
        return statistics(partition)

    strategy = run(Listener(client_app(make), 7), SumStrategy(7))
    check_sum(strategy.found[0], [0, 1, 3, 4, 6])
    (reason,) = set(strategy.refused)
    assert reason.startswith("RuntimeError at test_secure_sum.py:")
    assert len(strategy.refused) == 2


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("query.secure_keys", "3 clients gave keys, at least 4 are needed"),
        ("query.secure_shares", "3 clients handed out shares, at least 4"),
        ("train.sum", "3 clients sent numbers, at least 4"),
        ("query.secure_unmask", "3 clients revealed shares, at least 4"),
    ],
)
def test_below_the_threshold_the_round_is_refused(kind, says):
    grid = Listener(client_app(), 5, lose=lambda k, p: k == kind and p in (0, 3))
    with pytest.raises(Refusal, match=says):
        run(grid, SumStrategy(5))


def test_a_number_too_large_for_the_sum_is_refused_by_its_client():
    def make(partition: int) -> dict[str, np.ndarray]:
        return {GRAM: np.full(3, limit() / 5 if partition == 2 else 1.0)}

    strategy = run(Listener(client_app(make), 5), SumStrategy(5))
    check_sum(strategy.found[0], [0, 1, 3, 4], make)
    (reason,) = strategy.refused
    assert "array gram: a number of size" in reason


def test_a_letter_that_was_changed_on_its_way_is_refused_by_its_receiver():
    def change(kind: str, partition: int, message: Message) -> None:
        if kind == "train.sum" and partition == 1:
            record = message.content.config_records["config"]
            data = bytearray(record["secure-bytes"])
            data[40] ^= 1
            record["secure-bytes"] = bytes(data)

    strategy = run(Listener(client_app(), 5, change=change), SumStrategy(5))
    check_sum(strategy.found[0], [0, 2, 3, 4])
    assert strategy.refused[0].startswith("client 1, from client 0: a sealed letter does not open")


def config_changer(kind: str, partition: int, **values: Any) -> Callable[..., None]:
    def change(k: str, p: int, message: Message) -> None:
        if (k, p) == (kind, partition):
            message.content.config_records["config"].update(values)

    return change


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("query.secure_shares", {"secure-round": 7}, "a message of summation 7"),
        ("train.sum", {"secure-run": "cd" * 16}, "a message of summation 1 of run cdcd"),
        ("query.secure_unmask", {"secure-round": 2}, "a message of summation 2"),
        ("query.secure_unmask", {"secure-clients": [0, 2, 2]}, "expected different clients"),
        ("query.secure_unmask", {"secure-clients": [0, 2, 3]}, "client 1 among them"),
        ("query.secure_shares", {"secure-clients": [0, 1, 1, 2, 3]}, "different numbers"),
        ("query.secure_shares", {"secure-threshold": 2}, "a threshold of 2 for 5 clients"),
        ("query.secure_shares", {"secure-bytes": b"short"}, "5 bytes for 5 clients"),
        ("query.secure_keys", {"secure-run": 5}, "secure-run: int came, str was expected"),
        ("query.secure_keys", {"secure-run": "../../etc"}, "hexadecimal"),
    ],
)
def test_a_message_that_is_not_of_this_summation_is_refused_by_the_client(kind, values, says):
    strategy = SumStrategy(5, threshold=0.5)
    run(Listener(client_app(), 5, change=config_changer(kind, 1, **values)), strategy)
    assert list(strategy.found[0].lost) == [1]
    failures = [e["reason"] for e in strategy.journal.rows["events"] if "reason" in e]
    assert any(says in reason for reason in [*failures, *strategy.refused])


def test_a_client_asked_for_both_kinds_of_shares_answers_once():
    grid = Listener(client_app(), 4)
    strategy = run(grid, SumStrategy(4))
    summation = strategy.sums._collector.summation
    again = messages.ask_unmask(summation, [0, 1, 2])  # now partition 3 is said to be lost
    asked = Message(border.content(config=again), FIRST_NODE, f"query.{messages.UNMASK}")
    (reply,) = grid.send_and_receive([asked])
    assert reply.has_error()
    assert "each step is taken once" in border.failure_reason(reply)[0]
    begun = Message(
        border.content(config=messages.ask_keys(summation)), FIRST_NODE, f"query.{messages.KEYS}"
    )
    (reply,) = grid.send_and_receive([begun])
    assert "began summation 1 of this run already" in border.failure_reason(reply)[0]


def test_a_node_that_was_started_anew_says_so():
    grid = Listener(client_app(), 3)
    run(grid, SumStrategy(3))
    grid._contexts[FIRST_NODE].state.clear()
    again = messages.ask_unmask(messages.Summation(RUN, 1), [0, 1, 2])
    asked = Message(border.content(config=again), FIRST_NODE, f"query.{messages.UNMASK}")
    (reply,) = grid.send_and_receive([asked])
    assert "this node is in no secure summation" in border.failure_reason(reply)[0]


def test_bytes_of_every_step_are_in_the_ledger():
    strategy = run(Listener(client_app(), 4), SumStrategy(4))
    weighed = {(r["phase"], r["direction"]) for r in strategy.journal.rows["ledger"]}
    steps = (messages.KEYS, messages.SHARES, messages.UNMASK)
    assert weighed == {(step, way) for step in steps for way in ("up", "down")}
    up = [r for r in strategy.journal.rows["ledger"] if r["phase"] == messages.KEYS]
    values = [r["bytes"] for r in up if r["dtype"] == "uint8"]
    assert values == [64] * 4
