# SPDX-License-Identifier: Apache-2.0
"""FAAST under masks and with noise, on the real apps: digits, whose pixels are the keys."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp.exception import AggregationError

from fedloom import border
from fedloom.clients.bridge import serve
from fedloom.clients.faast import FAASTClient
from fedloom.clients.keys import key_bench
from fedloom.clients.secure import serve_sums
from fedloom.clients.shares import sums_to_send
from fedloom.errors import Refusal
from fedloom.rules.fixed_point import encode, rounding_bound
from fedloom.rules.private import Accountant
from fedloom.rules.shares import COUNT, Noise
from fedloom.rules.statistics import CROSS, GRAM, SQUARES, Gram
from fedloom.simulations import client_app, server_app
from fedloom.simulations.forget_cli import without
from fedloom.simulations.inprocess import run_in_process, serve_on
from fedloom.simulations.report import write_report
from fedloom.strategies.faast import gram_of
from fedloom.strategies.shelf import SumsShelf

from fast import least_squares, off, rows_of, weights_bound, weights_of
from runs import Recorder, rows
from summations import chi_square

MODES = ("sums", "masked", "private", "masked-private")
NOISY = {"faast__epsilon": 4.0}


def shared(digits, mode: str, **changes):
    """A recipe in one mode: eight owners of digits, one filter."""
    noise = NOISY if mode.endswith("private") else {}
    small = {"clients__count": 8, "faast__alphas": "0.6", "name": mode, "faast__shares": mode}
    return digits(**{**small, **noise, **changes})


def events(config, name: str) -> list[dict]:
    folder = Path(config.output) / config.name
    return [e for e in rows(folder, "events") if e["event"] == name]


def shelf_of(config) -> SumsShelf:
    return SumsShelf(Path(config.output) / config.name / "sums")


def total_of(config) -> Gram:
    held, _ = shelf_of(config).restore()
    return gram_of(held.total)


def exact(config, partitions: Iterable[int]) -> Gram:
    return Gram.of(*rows_of(config, partitions))


class Weak(Recorder):
    """A network that loses some replies: ``lose(kind, partition, server round)``."""

    def __init__(self, *given, lose: Callable[[str, int, int], bool]) -> None:
        super().__init__(*given)
        self.lose = lose

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        kept = []
        for reply in super().pull_messages(message_ids):
            (asked,) = [m for m, r in zip(self.sent, self.answered, strict=True) if r is reply]
            config = border.config_of(asked.content)
            where = asked.metadata.message_type, asked.metadata.dst_node_id - 1000
            if not self.lose(*where, int(config.get("round", config.get("secure-round", 0)))):
                kept.append(reply)
        return kept


def lossy(config, lose: Callable[[str, int, int], bool]) -> Weak:
    config = config.replaced(sampling__reply_seconds=1.0)
    grid = Weak(client_app.app, config.clients.count, config.flat(), lose=lose)
    serve_on(grid, server_app.app, config)
    return grid


@pytest.mark.parametrize("alphas", ["0.6", "0.4,0.6,0.8,1.0"])
def test_masked_weights_are_the_plain_ones_to_one_rounding(digits, alphas):
    plain, masked = (shared(digits, m, faast__alphas=alphas) for m in ("sums", "masked"))
    for config in (plain, masked):
        run_in_process(config)
        assert events(config, "end")[-1]["status"] == "completed"
        assert not events(config, "client-failed")
    sums, ours = total_of(plain), total_of(masked)
    for name, array in sums.arrays().items():
        float_rounding = 1e-15 * np.abs(array).max() * 8
        assert np.abs(ours.arrays()[name] - array).max() <= rounding_bound(8) + float_rounding
    assert ours.count == sums.count  # a whole number loses nothing
    wanted, found = weights_of(plain), weights_of(masked)
    (round_told,), (plain_told,) = events(masked, "round"), events(plain, "round")
    assert round_told["alpha"] == plain_told["alpha"]
    assert np.abs(found - wanted).max() <= weights_bound(sums, round_told["alpha"], 8)
    bench = key_bench(masked)
    for p in range(8):
        keys = bench.side(p, "test").unit()
        assert ((keys @ found).argmax(1) == (keys @ wanted).argmax(1)).all()
    assert round_told["accuracy"] == plain_told["accuracy"] > 0.8
    assert round_told["rows"] == plain_told["rows"]


def test_fewer_bits_cost_what_they_say(digits):
    config = shared(digits, "masked", faast__bits=24)
    run_in_process(config)
    total, plain = total_of(config), exact(config, range(8))
    assert 1e-9 < np.abs(total.packed - plain.packed).max() <= rounding_bound(8, 24) + 1e-12
    assert total.count == plain.count


def told_of_rows(grid: Recorder) -> tuple[set[str], set[str]]:
    """Return the names of all numbers that came with train replies, and with roll calls."""
    trained, called = set(), set()
    for message in grid.answered:
        kind, content = message.metadata.message_type, message.content
        if kind == "train.faast":
            trained |= {name for record in content.metric_records.values() for name in record}
            trained -= {border.TICKET}  # the server works it out itself
            assert not content.config_records
        if kind == "query.properties":
            called |= set(border.config_of(content))
            assert border.config_of(content)["partition-json"] == ""
    return trained, called


@pytest.mark.parametrize("mode", ["masked", "masked-private"])
def test_the_server_hears_uniform_words_and_no_gram_count_or_histogram(digits, mode):
    config = shared(digits, mode)
    grid = Recorder(client_app.app, 8, config.flat())
    serve_on(grid, server_app.app, config)
    heard = [m for m in grid.answered if m.metadata.message_type == "train.faast"]
    names = {GRAM, CROSS} | ({SQUARES, COUNT} if mode == "masked" else set())
    seen = []
    for message in heard:
        arrays = border.arrays_of(message.content)
        assert arrays.keys() == names
        assert {a.dtype for a in arrays.values()} == {np.dtype(np.uint64)}
        assert border.metrics_of(message.content) == {"num-examples": 1, "revision": 1}
        seen.append(np.concatenate([a.ravel() for a in arrays.values()]))
    assert len(seen) == 8
    for i, words in enumerate(seen):
        assert chi_square(words.tobytes()) < 6
        for other in seen[:i]:
            assert chi_square((words - other).tobytes()) < 6
    trained, called = told_of_rows(grid)
    assert trained == {"num-examples", "revision"}
    assert "train" not in called
    wire = b"".join(recorddict_to_proto(m.content).SerializeToString() for m in grid.answered)
    for found in secrets(config):
        assert found not in wire


def secrets(config) -> Iterable[bytes]:
    """What must not be heard: sums in float64 and fixed point, histograms, each client's."""
    bench = key_bench(config)
    for p in range(8):
        side, gram = bench.side(p, "summed"), exact(config, [p])
        for number in gram.packed[gram.packed > 1e-3]:
            yield number.tobytes()
            yield encode(np.array([number])).tobytes()
        histogram = np.bincount(side.labels, minlength=10)
        yield from (histogram.astype(kind).tobytes() for kind in ("<i8", "<f8", "<i4"))
        yield side.labels.tobytes()


def test_the_same_recorder_hears_bare_sums(digits):
    """The check above can fail: without masks it finds every client's."""
    config = shared(digits, "sums")
    grid = Recorder(client_app.app, 8, config.flat())
    serve_on(grid, server_app.app, config)
    wire = b"".join(recorddict_to_proto(m.content).SerializeToString() for m in grid.answered)
    assert all(exact(config, [p]).packed.tobytes() in wire for p in range(8))
    (words, *_) = [m for m in grid.answered if m.metadata.message_type == "train.faast"]
    assert chi_square(border.arrays_of(words.content)[GRAM].tobytes()) > 6


def test_a_client_lost_after_the_shares_leaves_the_others_sums(digits):
    config = shared(digits, "masked")
    lossy(config, lambda kind, partition, _: (kind, partition) == ("train.faast", 3))
    left = [0, 1, 2, 4, 5, 6, 7]
    assert events(config, "end")[-1]["status"] == "completed"
    assert off(weights_of(config), least_squares(*rows_of(config, left), 0.6)) < 1e-8
    assert total_of(config).count == exact(config, left).count
    (told,) = events(config, "shares")
    assert told["lost"] == {"3": "numbers: they did not come"}
    assert (told["clients"], told["threshold"]) == (7, 6)
    write_report(Path(config.output) / config.name)
    page = (Path(config.output) / config.name / "report.html").read_text()
    assert "threshold: 6 clients had to stay to the end" in page
    assert "dirichlet 3 (numbers: they did not come)" in page
    assert "the sum over all clients, and of each client words that are uniform" in page


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("query.secure_keys", "5 clients gave keys, at least 6 are needed"),
        ("query.secure_shares", "5 clients handed out shares, at least 6"),
        ("train.faast", "5 clients sent numbers, at least 6"),
        ("query.secure_unmask", "5 clients revealed shares, at least 6"),
    ],
)
def test_below_the_threshold_the_run_fails_with_a_sentence(digits, kind, says):
    config = shared(digits, "masked")
    with pytest.raises(Refusal, match=says):
        lossy(config, lambda k, partition, _: k == kind and partition < 3)
    assert says in events(config, "refused")[-1]["reason"]
    assert not (Path(config.output) / config.name / "adapter").exists()


@pytest.mark.parametrize("mode", ["private", "masked-private"])
def test_what_a_private_run_spent_is_told_everywhere(digits, mode):
    config = shared(digits, mode)
    run_in_process(config)
    folder = Path(config.output) / config.name
    (done,), (shares,) = events(config, "round"), events(config, "shares")
    write_report(folder)
    told = json.loads((folder / "summary.json").read_text())["fast-weights"]
    assert done["epsilon-spent"] == pytest.approx(4.0, abs=1e-9)
    assert (shares["releases"], shares["protects"], shares["delta"]) == (1, "row", 1e-5)
    assert told["shares"]["epsilon-spent"] == shares["epsilon-spent"] == done["epsilon-spent"]
    page = (folder / "report.html").read_text()
    assert "epsilon 4 spent at delta 1e-05, in 1 release of epsilon 4" in page
    assert "alpha" not in done  # no filter is for noisy sums
    assert told["rank"] == 64
    assert done["accuracy"] > 0.6


@pytest.mark.parametrize(("mode", "parts"), [("private", 8.0), ("masked-private", 8 / 6)])
def test_the_total_has_the_noise_that_was_promised(digits, mode, parts):
    """Each client's whole, or parts sized for the six that had to stay."""
    config = shared(digits, mode)
    run_in_process(config)
    (told,) = events(config, "shares")
    sigma = Noise.of(config.faast).sigma
    assert told["total-sigma"] == pytest.approx(sigma * np.sqrt(parts))
    total, plain = total_of(config), exact(config, range(8))
    noise = (total.cross - plain.cross) / told["total-sigma"]
    # 640 normal numbers: their standard deviation is known to 2.8 percent; five times that.
    assert noise.std() == pytest.approx(1.0, abs=0.14)
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size)
    (done,) = events(config, "round")
    # The trace of 64 diagonal entries tells the count to 8 sigma.
    assert abs(done["rows"] - plain.count) < 5 * 8 * told["total-sigma"]
    assert done["rows"] != plain.count


def test_a_lost_reply_is_a_release_all_the_same_and_two_compose(digits):
    config = shared(digits, "private", rounds=2)
    lossy(config, lambda kind, p, n: (kind, p, n) == ("train.faast", 2, 1))
    once, twice = events(config, "round")
    both = Accountant()
    noise = Noise.of(config.faast)
    for _ in range(2):
        both.spend(noise.sensitivity, noise.sigma)
    assert once["epsilon-spent"] == pytest.approx(4.0, abs=1e-9)
    assert twice["epsilon-spent"] == both.epsilon(1e-5) > 5.5
    assert events(config, "shares")[-1]["releases"] == 2
    assert twice["summed-clients"] == 8


def test_what_was_asked_in_vain_is_spent_too(digits):
    """The reply of one client never comes, and no round after the first brings anything new."""
    config = shared(digits, "private", rounds=3)
    lossy(config, lambda kind, p, _: (kind, p) == ("train.faast", 2))
    assert [e["releases"] for e in events(config, "shares")] == [1, 2, 3]
    spent = [e["epsilon-spent"] for e in events(config, "round")]
    assert spent == [Noise.of(config.faast).spent(n) for n in (1, 2, 3)]
    assert events(config, "round")[-1].get("summed-clients") is None


def test_a_client_that_refused_gave_nothing_away(digits):
    class Shy(FAASTClient):
        def fit(self, parameters, config):
            if self.partition_id == 2 and config["round"] == 1:
                raise Refusal("not today")
            return super().fit(parameters, config)

    app = ClientApp()
    serve(app, Shy, action="faast")
    config = shared(digits, "private", rounds=2)
    run_in_process(config, app)
    assert events(config, "shares")[-1]["releases"] == 1
    assert events(config, "round")[-1]["summed-clients"] == 8


def test_those_who_were_lost_are_summed_by_themselves_later(digits):
    """Nobody is in two sums: under masks a later round is of newcomers, if there are two."""
    config = shared(digits, "masked", rounds=3)
    lossy(config, lambda kind, p, n: kind == "train.faast" and p in (1, 4) and n == 1)
    assert off(weights_of(config), least_squares(*rows_of(config, range(8)), 0.6)) < 1e-8
    sums = events(config, "secure-sum")
    assert [e["partitions"] for e in sums] == [[0, 2, 3, 5, 6, 7], [1, 4]]
    assert events(config, "shares")[-1]["lost"] == {}
    alone = shared(digits, "masked", rounds=2, name="alone")
    lossy(alone, lambda kind, p, n: kind == "train.faast" and p == 1 and n == 1)
    assert len(events(alone, "secure-sum")) == 1  # a sum of one would be its numbers
    assert events(alone, "round")[-1]["failed"] == 0


def test_noise_and_masks_come_from_the_operating_system(digits):
    assert inspect.signature(sums_to_send).parameters["source"].default is os.urandom
    assert inspect.signature(serve_sums).parameters["source"].default is os.urandom
    a, b = (shared(digits, "private", name=name) for name in "ab")
    run_in_process(a)
    run_in_process(b)
    same = total_of(a).cross == total_of(b).cross
    assert not same.any()  # one recipe, one seed, and no number twice


def test_whole_clients_can_be_protected(digits):
    config = shared(
        digits, "masked-private", faast__protects="client", faast__client_bound=50.0,
    )  # fmt: skip
    run_in_process(config)
    (told,) = events(config, "shares")
    assert (told["sensitivity"], told["protects"]) == (50.0, "client")
    assert told["sigma"] == pytest.approx(Noise.of(config.faast).sigma)
    assert told["epsilon-spent"] == pytest.approx(4.0, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_too_few_rows_stay_at_home_in_every_mode(digits, mode):
    config = shared(digits, mode, faast__min_count=10_000)
    grid = Recorder(client_app.app, 8, config.flat())
    with pytest.raises(AggregationError, match="0 usable replies"):
        serve_on(grid, server_app.app, config)
    replies = [m for m in grid.answered if m.metadata.message_type == "train.faast"]
    assert len(replies) == 8
    assert not any(m.has_content() for m in replies)
    reasons = [e["reason"] for e in events(config, "client-failed")]
    assert all("fewer than faast.min-count = 10000" in reason for reason in reasons)
    counted = {bool(re.search(r"has \d+ rows", reason)) for reason in reasons}
    assert counted == {mode == "sums"}  # the refusal tells no count that masks would hide


def test_a_client_never_sends_bare_sums_where_masks_are_agreed(digits):
    config = shared(digits, "masked")
    grid = Recorder(client_app.app, 8, config.flat())
    client = FAASTClient(grid._contexts[1000])
    with pytest.raises(Refusal, match="in no secure summation"):
        client.fit([], {"manifest": key_bench(config).manifest.digest(), "round": 1})


@pytest.mark.parametrize("mode", ["masked", "masked-private"])
def test_a_total_that_cannot_be_a_sum_of_sums_is_refused(digits, mode, monkeypatch):
    from fedloom.clients import faast

    honest = faast.own_sums

    def lying(given, keys, values):
        gram = honest(given, keys, values)
        packed = gram.packed.copy()
        packed[1] += 1e4  # off the diagonal: the trace stays
        return Gram(packed, gram.cross, gram.squares, gram.count)

    monkeypatch.setattr(faast, "own_sums", lying)
    config = shared(digits, mode)
    with pytest.raises(Refusal, match=r"the sum of 8 clients.* eigenvalue"):
        run_in_process(config)


def test_nobody_can_be_forgotten_from_a_masked_sum(digits):
    config = shared(digits, "masked")
    run_in_process(config)
    with pytest.raises(Refusal, match="it would have to send them again, bare"):
        without(shelf_of(config), 2, 1)
    held, _ = shelf_of(config).restore()
    with pytest.raises(Refusal, match="is in the sums under masks already"):
        held.add_together([2], held.total)
