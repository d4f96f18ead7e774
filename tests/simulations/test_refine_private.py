"""Private mode through messages and through the command: other words, or nobody is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.clientapp import ClientApp

from fedloom.clients.bridge import serve, serve_questions
from fedloom.clients.refine import FedRefineClient
from fedloom.config import RunConfig
from fedloom.data.questions import Question, load_questions
from fedloom.errors import Refusal
from fedloom.refining.rephrasing import Attempt, Rephrased, Standalone
from fedloom.secure import channel
from fedloom.secure.channel import EXPORT
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import serve_on

from meetings import events, meeting_of, write_fusers
from runs import Recorder, rows

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")
READ: list[str] = []


@pytest.fixture(scope="module")
def fusers(tmp_path_factory):
    return write_fusers(tmp_path_factory.mktemp("fusers"))


@pytest.fixture
def meeting(questions, tmp_path, fusers):
    def build(**changes) -> RunConfig:
        return meeting_of(questions, fusers, tmp_path, **{"refine.rephrase": True, **changes})

    return build


def scripted(base, question, *, seed, tries, **_):
    """Pass, after one attempt in vain, every question but those whose number is even."""
    if int(question.question.split()[0]) % 2 == 0:
        return Standalone((), (Attempt("x", "copied"),) * tries)
    other = Question(question.subject, "in other words?", question.choices, question.gold)
    return Rephrased(other, (), (Attempt("x", "copied"), Attempt("in other words?", "")))


class Scripted(FedRefineClient):
    """A node whose model rewords as it is told to; what it is shown as a sender is written down."""

    reword = staticmethod(scripted)

    def export_cache(self, arrays, config):
        public = bytes.fromhex(config["public"])
        line = self._channel(public, config["exchange"], int(config["asker"]), self.partition_id)
        READ.extend(json.loads(line.open("question", arrays["letter"].tobytes(), 0))["texts"])
        return super().export_cache(arrays, config)


def run(config, app) -> tuple[Recorder, dict[int, dict]]:
    grid = Recorder(app, config.clients.count, config.flat())
    serve_on(grid, server_app.app, config)
    found = rows(Path(config.output) / config.name, "metrics")
    return grid, {r["partition"]: r for r in found if r["phase"] == "evaluate"}


def test_senders_read_other_words_and_questions_that_find_none_stay_home(meeting, questions):
    app = ClientApp()
    serve(app, Scripted, action="fedrefine")
    serve_questions(app, Scripted, channel.ACTIONS)
    READ.clear()
    _, found = run(meeting(**{"refine.questions": 6, "data.test-share": 0.5}), app)
    assert sorted(found) == [0, 1, 2]
    asked = 0
    for row in found.values():
        passed, home = row["rephrase-rephrased"], row["rephrase-standalone"]
        assert passed + home == row["num-examples"]
        assert row["rephrase-retries"] == passed + 3 * home
        assert row["used"] == 2 * passed
        assert (row["lost"], row["fallbacks"]) == (0, home)
        asked += 2 * passed
    assert 0 < asked < 2 * sum(row["num-examples"] for row in found.values())
    assert len(READ) == asked
    assert all(text.startswith("in other words?\nA. ") for text in READ)
    own = [q.question for q in load_questions(f"path:{questions}")]
    assert not any(text in read for text in own for read in READ)


def test_a_model_that_rewords_badly_asks_nobody_and_answers_alone(meeting):
    config = meeting(**{"refine.rephrase-tries": 1})
    grid, found = run(config, client_app.app)
    assert not [m for m in grid.sent if m.metadata.message_type.endswith(EXPORT)]
    for row in found.values():
        assert row["rephrase-standalone"] == row["fallbacks"] == row["num-examples"]
        assert row["gold-ce-sum"] == row["alone-gold-ce-sum"]
        assert row["used"] == 0
    assert events(Path(config.output) / config.name, "end")[-1]["status"] == "completed"


def test_a_question_that_every_node_can_read_is_not_rephrased(meeting):
    with pytest.raises(Refusal, match="every node of the run reads"):
        meeting(**{"refine.question": "what is cheese?"})


ASK = ["refine", "what is it?", "--receiver", "tiny:qwen3", "--max-new-tokens", 5, "--rephrase"]


def test_the_command_asks_nobody_where_no_rewording_passes(fedloom, fusers):
    told = [*ASK, "--sender", "tiny:llama", "--fuser", fusers, "--compare"]
    code, out, err = fedloom(*told, "--json")
    assert code == 0
    found = json.loads(out)
    receipt = found["receipt"]
    assert receipt["rephrasing"] == {
        "rephrased": False, "retries": 4, "standalone": True, "removed": 0,
    }  # fmt: skip
    assert (receipt["sources"], receipt["fallback"]) == ([], "standalone")
    assert found["answer"] == found["standalone"]
    code, _, err = fedloom(*told)
    assert "the question stayed at home: 4 attempts were turned down" in err


@pytest.mark.parametrize("more", [["--shown", "x"], ["--on", "lab"]])
def test_words_of_ones_own_and_rephrasing_do_not_go_together(fedloom, more):
    code, out, err = fedloom(*ASK, *more)
    assert (code, out) == (2, "")
    assert "leave --shown and --on out" in err
