# SPDX-License-Identifier: Apache-2.0
"""A federation's solved fuser is that of all texts together, through Flower's messages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import AggregationError
from safetensors.numpy import load_file

from fedloom import border
from fedloom.adapters.fuser_files import load_fuser
from fedloom.clients.bridge import serve
from fedloom.clients.fuser_sums import FuserSumsClient
from fedloom.config import RunConfig
from fedloom.data.partition import client_rows
from fedloom.errors import Refusal
from fedloom.holdings import holdings
from fedloom.models.base import load_base
from fedloom.refining import measured
from fedloom.refining.closed_form import fuser_sums
from fedloom.refining.hearing import Party, Shelf
from fedloom.refining.lessons import encode_lessons, question_lesson
from fedloom.rules.fuser_maps import DOWN, UP, LinearMap, grams_of, solve_maps
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on
from fedloom.simulations.report import write_report
from fedloom.strategies.registry import Registry

from meetings import events
from runs import METRICS_THAT_MAY_LEAVE, Recorder, rows

MODELS = ("tiny:llama", "tiny:qwen3")


@pytest.fixture
def solving(questions, tmp_path):
    def build(**changes) -> RunConfig:
        flat = {
            "method": "fedrefine",
            "name": "solved",
            "rounds": 1,
            "refine.solve": True,
            "refine.models": ",".join(MODELS),
            "refine.solve-share": 1.0,
            "refine.solve-least": 1,
            "refine.questions": 2,
            "model.dtype": "float64",
            "data.source": f"path:{questions}",
            "data.min-train": 4,
            "data.min-test": 2,
            "clients.count": 2,
            "output": str(tmp_path),
        }
        return RunConfig.from_flat({**flat, **changes})

    return build


def folder(config) -> Path:
    return Path(config.output) / config.name


def arrays_of_run(config) -> dict[str, np.ndarray]:
    return load_file(folder(config) / "fuser" / "fuser.safetensors")


def pooled(config, partitions):
    """Sum over all these clients' rows at once, without a message."""
    bases = [load_base(source, "float64") for source in MODELS]
    examples, dealt = holdings(config)
    rows = [q for p in partitions for q in client_rows(dealt, examples, p)[0]]
    shelves = [Shelf(Party.of(base)) for base in bases]
    tokenizers = [base.tokenizer for base in bases]
    lessons = encode_lessons([question_lesson(q) for q in rows], *tokenizers, ends=True)
    file = folder(config) / "fuser" / "fuser.safetensors"
    fuser, _ = load_fuser(file, *(measured(base) for base in bases))
    return fuser_sums(*shelves, lessons, fuser.config), fuser


def matrices(arrays, sources) -> dict[int, np.ndarray]:
    """Read the solved maps off a fuser's arrays: what neither rank nor signs hide."""
    found = {}
    for at, (n, layers) in enumerate(sources.items()):
        scale_I = np.concatenate(
            [arrays["sender_scale"][s].reshape(2, -1)[part] for part in (0, 1) for s in layers]
        )
        nothing = np.zeros(0)
        solved = LinearMap(
            nothing, scale_I, nothing, arrays["receiver_scale"][n],
            arrays[DOWN][at], arrays[UP][at], 0.0, 0.0,
        )  # fmt: skip
        found[n] = solved.matrix()
    return found


@pytest.mark.parametrize("count", [1, 4])
def test_sums_of_clients_are_pooled_sums_and_solve_to_the_same_maps(solving, count):
    config = solving(**{"clients.count": count})
    grid = Recorder(client_app.app, count, config.flat())
    serve_on(grid, server_app.app, config)
    sums, fuser = pooled(config, range(count))
    sent = [m for m in grid.answered if m.metadata.message_type == "train.fedrefine"]
    came = [border.arrays_of(m.content) for m in sent]
    assert len(came) == count
    for name, whole in sums.arrays().items():
        total = sum(arrays[name] for arrays in came)
        np.testing.assert_allclose(total, whole, rtol=1e-11, atol=1e-11 * np.abs(whole).max())
    ridge, rank = config.refine.solve_ridge, fuser.projector.down_NIR.shape[2]
    wanted = solve_maps(grams_of(sums.arrays(), sums.tokens), rank, ridge=ridge)
    got = matrices(arrays_of_run(config), fuser.sources)
    assert got.keys() == wanted.keys()
    for n, solved in wanted.items():
        whole = solved.matrix()
        assert np.abs(whole).max() > 1e-3
        np.testing.assert_allclose(got[n], whole, rtol=0, atol=1e-8 * np.abs(whole).max())
    (done,) = events(folder(config), "round")
    assert (done["text-tokens"], done["summed-clients"]) == (sums.tokens, count)


def test_the_order_of_replies_changes_no_bit(solving):
    class Backwards(InProcessGrid):
        def push_messages(self, messages):
            return super().push_messages(reversed(list(messages)))

    config = solving()
    run_in_process(config)
    other = solving(name="backwards")
    serve_on(Backwards(client_app.app, 2, other.flat()), server_app.app, other)
    one, two = arrays_of_run(config), arrays_of_run(other)
    assert all((one[name] == two[name]).all() for name in one)


def test_the_file_is_a_fuser_that_a_registry_hands_out(solving):
    config = solving(**{"model.dtype": "float32"})
    run_in_process(config)
    (entry,) = Registry(folder(config) / "fuser").entries.values()
    card = entry.card
    assert (card.origin, card.sender_name, card.receiver_name) == ("federated", *MODELS)
    assert (card.data["clients"], card.config["sink"]) == (2, "receiver")
    found = [r for r in rows(folder(config), "metrics") if r["phase"] == "evaluate"]
    tested = sum(r["num-examples"] for r in found)
    right = {side: sum(r[f"{side}correct"] for r in found) for side in ("", "alone-", "shuffled-")}
    assert card.scores["tested"] == tested
    assert card.scores["refined_accuracy"] == right[""] / tested
    assert card.scores["standalone_accuracy"] == right["alone-"] / tested
    assert card.scores["shuffled_accuracy"] == right["shuffled-"] / tested
    assert 0 < card.scores["explained"] <= 1
    frozen = {r["partition"]: r for r in rows(folder(config), "metrics") if r["phase"] == "frozen"}
    for row in found:
        assert row["alone-gold-ce-sum"] == frozen[row["partition"]]["gold-ce-sum"]
        assert row["gold-ce-sum"] != row["alone-gold-ce-sum"]
    assert "gold" in write_report(folder(config)).read_text().lower()
    told = json.loads((folder(config) / "summary.json").read_text())
    assert told["parameters"]["fuser"] > 0


def test_sums_and_numbers_leave_and_nothing_else(solving, questions):
    config = solving()
    grid = Recorder(client_app.app, 2, config.flat())
    serve_on(grid, server_app.app, config)
    texts = [json.loads(line)["question"].encode() for line in questions.read_text().splitlines()]
    allowed = METRICS_THAT_MAY_LEAVE | {
        f"{side}-{name}"
        for side in ("alone", "shuffled", "zeroed")
        for name in ("correct", "gold-ce-sum")
    }
    listing = {f"{n}.{part}" for n in (0, 1) for part in ("gram", "cross", "squares")}
    for message in grid.answered:
        for record in message.content.metric_records.values():
            assert set(record) <= allowed
        if message.metadata.message_type == "train.fedrefine":
            assert set(border.arrays_of(message.content)) == listing
        if message.metadata.message_type == "evaluate.fedrefine":
            assert not message.content.array_records or not border.arrays_of(message.content)
        data = b"".join(a.data for r in message.content.array_records.values() for a in r.values())
        assert not any(text in data for text in texts)
    down = [m for m in grid.sent if m.metadata.message_type == "train.fedrefine"]
    assert down
    assert not any(border.arrays_of(m.content) for m in down)


class _Liar(FuserSumsClient):
    """Partition 0 is honest; the others each try something."""

    def fit(self, parameters, config):
        arrays, tokens, metrics = super().fit(parameters, config)
        at = self.array_names.index("1.gram")
        if self.partition_id == 1:
            arrays[at] = 3 * arrays[at]
        if self.partition_id == 2:
            tokens += 1000
        if self.partition_id == 3:
            arrays[at] = arrays[at].copy()
            arrays[at][0] = -1.0
        return arrays, tokens, metrics


def test_what_cannot_be_sums_is_named_and_left_out(solving):
    app = ClientApp()
    serve(app, _Liar, action="fedrefine")
    config = solving(**{"clients.count": 4})
    serve_on(InProcessGrid(app, 4, config.flat()), server_app.app, config)
    failed = {e["partition"]: e["reason"] for e in events(folder(config), "client-failed")}
    assert failed.keys() == {1, 2, 3}
    assert "constant was counted" in failed[1]
    assert "constant was counted" in failed[2]
    assert "no numbers have these sums" in failed[3]
    sums, fuser = pooled(config, [0])
    rank = fuser.projector.down_NIR.shape[2]
    wanted = solve_maps(sums.grams, rank, ridge=config.refine.solve_ridge)
    for n, got in matrices(arrays_of_run(config), fuser.sources).items():
        whole = wanted[n].matrix()
        np.testing.assert_allclose(got, whole, rtol=0, atol=1e-8 * np.abs(whole).max())


def test_few_tokens_are_not_sent(solving):
    config = solving(**{"refine.solve-least": 10**6})
    with pytest.raises(AggregationError, match="0 usable replies"):
        run_in_process(config)
    reasons = [e["reason"] for e in events(folder(config), "client-failed")]
    assert len(reasons) == 2
    assert all("none were sent" in reason for reason in reasons)


def test_recipes_that_cannot_be_are_refused(solving):
    for change, said in (
        ({"refine.models": "tiny:llama"}, "a sender and a receiver"),
        ({"refine.solve-share": 0.0}, "above 0"),
        ({"refine.rephrase": True}, "asks nobody"),
        ({"refine.solve-least": 0}, "at least 1"),
    ):
        with pytest.raises(Refusal, match=said):
            solving(**change)
