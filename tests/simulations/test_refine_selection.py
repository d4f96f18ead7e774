"""Selection through the command and through a federation's messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.secure.channel import EXPORT, KEEP
from fedloom.simulations import client_app, server_app
from fedloom.simulations.findings import report_data
from fedloom.simulations.inprocess import serve_on
from fedloom.simulations.report import summary, write_report

from meetings import events, meeting_of, write_fusers
from runs import Recorder, rows

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")

GAINS = """
[budget]
message-tokens = 5
[links.any]
mbit = 100
[[help]]
sender = "tiny:llama"
way = "int8"
prefill = 1e4
fuse = 1e4
gains.any = [0.1, 0.05, 0.15]
[[help]]
sender = "tiny:qwen2"
way = "text"
prefill = 1e4
fuse = 1e4
decode-seconds = 0.5
bytes = 40
trust = 1
gains.any = [0.08, 0.02, 0.12]
[[help]]
sender = "tiny:qwen3"
way = "int8"
prefill = 1e4
fuse = 1e4
gains.any = [-0.1, -0.2, -0.05]
"""


@pytest.fixture(scope="module")
def fusers(tmp_path_factory):
    return write_fusers(tmp_path_factory.mktemp("fusers"))


@pytest.fixture
def gains(tmp_path):
    (tmp_path / "gains.toml").write_text(GAINS)
    return tmp_path / "gains.toml"


@pytest.fixture
def meeting(questions, tmp_path, fusers):
    def build(**changes) -> RunConfig:
        return meeting_of(questions, fusers, tmp_path / "runs", **changes)

    return build


def serve(config) -> tuple[Recorder, Path]:
    grid = Recorder(client_app.app, config.clients.count, config.flat())
    serve_on(grid, server_app.app, config)
    return grid, Path(config.output) / config.name


def test_receivers_choose_and_nobody_else_is_asked(meeting, gains, questions):
    """Llama is asked for caches, Qwen2 for words, and Qwen3, which harms, for nothing."""
    grid, folder = serve(meeting(**{"refine.select": str(gains)}))
    found = {r["partition"]: r for r in rows(folder, "metrics") if r["phase"] == "evaluate"}
    chosen = {e["partition"]: e["selection"]["chosen"] for e in events(folder, "selection")}
    assert chosen == {
        0: {"2 tiny:qwen2": "text"},
        1: {"0 tiny:llama": "int8", "2 tiny:qwen2": "text"},
        2: {"0 tiny:llama": "int8"},
    }
    for partition, row in found.items():
        assert row["used"] == 2 * len(chosen[partition])
        assert row["lost"] == row["fallbacks"] == 0
        assert row["gold-ce-sum"] != row["alone-gold-ce-sum"]
        pairs = {key.split("-")[1] for key in row if key.startswith("pair-")}
        assert pairs == {name.split()[0] for name in chosen[partition]}
    asked = [m for m in grid.sent if m.metadata.message_type == f"query.{EXPORT}"]
    assert sorted(m.metadata.dst_node_id for m in asked) == [1000, 1000, 1002, 1002]
    texts = [json.loads(line)["question"] for line in questions.read_text().splitlines()]
    for message in [*grid.sent, *grid.answered]:
        words = str([dict(r) for r in message.content.config_records.values()])
        for record in message.content.array_records.values():
            words += "".join(a.data.decode("latin-1") for a in record.values())
        assert not any(text in words for text in texts)
    told = summary(report_data(folder))["refined"]["selections"]
    assert [row["partition"] for row in told] == [0, 1, 2]
    assert "not shown to help" in write_report(folder).read_text(encoding="utf-8")


def test_one_question_has_its_choice_in_the_receipt(meeting, gains):
    asked = {"refine.question": "what is cheese?", "refine.new-tokens": 3, "refine.receiver": 1}
    more = {"refine.select": str(gains), "refine.privacy-level": 1, "refine.task": "law"}
    _, folder = serve(meeting(**asked, **more))
    (told,) = events(folder, "answer")
    receipt = told["receipt"]
    assert receipt["mode"] == "t2t"
    assert [(s["name"], s["way"]) for s in receipt["sources"]] == [("2 tiny:qwen2", "text")]
    log = receipt["selection"]
    assert (log["task"], log["budget"]["privacy"]) == ("law", 1)
    why = {row["sender"]: row["why"] for row in log["candidates"]}
    assert "trusted to level 0" in why["0 tiny:llama"]
    assert "what is cheese?" not in json.dumps(log)


def test_an_answer_in_words_alone_needs_no_fuser(meeting, gains, tmp_path):
    (tmp_path / "none").mkdir()
    asked = {"refine.question": "what is cheese?", "refine.new-tokens": 3, "refine.receiver": 0}
    grid, folder = serve(
        meeting(**asked, **{"refine.select": str(gains), "refine.fusers": str(tmp_path / "none")})
    )
    (told,) = events(folder, "answer")
    assert told["receipt"]["mode"] == "t2t"
    assert not [m for m in grid.sent if m.metadata.message_type == f"query.{KEEP}"]


def test_a_quarter_of_the_bytes_is_a_key_of_the_recipe(meeting):
    asked = {"refine.question": "what is cheese? " * 30, "refine.new-tokens": 1}
    sizes = []
    for name, more in (("a", {}), ("b", {"refine.dtype": "int8", "refine.keep-bytes": 0.25})):
        _, folder = serve(meeting(name=name, **asked, **more))
        (told,) = events(folder, "answer")
        sizes.append([s["bytes"] for s in told["receipt"]["sources"]])
    assert all(small <= 0.25 * whole for whole, small in zip(*sizes, strict=True))


def test_gains_that_are_none_are_refused_before_anyone_is_asked(meeting, tmp_path):
    with pytest.raises(Refusal, match="No such file"):
        serve(meeting(**{"refine.select": str(tmp_path / "nowhere.toml")}))
    for change, said in (
        ({"refine.privacy-level": -1}, "at least 0"),
        ({"refine.keep-bytes": 1.5}, "0 to 1"),
        ({"refine.task": ""}, "a task class"),
    ):
        with pytest.raises(Refusal, match=said):
            meeting(**change)


ASK = ["refine", "what is it?", "--receiver", "tiny:qwen3", "--max-new-tokens", 3]
BOTH = ["--sender", "tiny:llama", "--sender", "tiny:qwen2"]


def test_the_command_says_whom_it_chose_and_whom_not(fedloom, fusers, gains):
    code, out, err = fedloom(*ASK, *BOTH, "--fuser", fusers, "--select", gains)
    assert code == 0
    assert "selected: tiny:llama by int8, tiny:qwen2 by text (task any, 12 tokens" in err
    (said,) = re.findall(r"tiny:qwen2: used, its message in words, (\d+) tokens", err)
    assert 1 <= int(said) <= 5  # a tiny model may stop before it must
    code, out, err = fedloom(*ASK, *BOTH, "--select", gains, "--privacy", 2, "--json")
    told = json.loads(out)
    assert (code, told["receipt"]["selection"]["way"]) == (0, "none")
    assert (told["receipt"]["mode"], told["receipt"]["fallback"]) == ("standalone", "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--select", "nowhere.toml"], "No such file"),
        (["--task", "law"], "go with --select"),
        (["--privacy", 1], "go with --select"),
        (["--keep-bytes", 2], "from 0 to 1"),
    ],
)
def test_bad_input_is_one_line(fedloom, more, said):
    code, out, err = fedloom(*ASK, *more)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_way_that_is_chosen_is_not_also_given(fedloom, gains):
    code, _, err = fedloom(*ASK, "--select", gains, "--dtype", "int8")
    assert (code, err.count("\n")) == (2, 1)
    assert "leave --dtype out" in err
