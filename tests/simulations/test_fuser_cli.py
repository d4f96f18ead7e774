"""``fedloom fuser`` as a user meets it, on tiny models."""

from __future__ import annotations

import json

import pytest

from fedloom.cards import read_card
from fedloom.models.base import DTYPES
from fedloom.simulations import cli, fuser_cli
from fedloom.simulations.inprocess import run_in_process

from meetings import events, meeting_of
from runs import rows

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")

PAIR = ["--sender", "tiny:llama", "--receiver", "tiny:qwen3"]


@pytest.fixture
def facts(tmp_path):
    rows = [
        {"question": "Which letter?", "answer": letter, "context": f"{word} {letter}"}
        for letter in "KLMN"
        for word in ("amber", "brook", "cedar", "dune")
    ]
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"path:{path}"


def ran(capsys, *arguments: str):
    """Return the exit code, the JSON object on stdout if there is one, and stderr."""
    code = 0
    try:
        cli.main(["fuser", *arguments])
    except SystemExit as left:
        code = left.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_train_show_and_go_on(capsys, facts, tmp_path):
    out = tmp_path / "pair"
    told = ["--data", facts, "--setting", "context", "--out", str(out), "--width", "8"]
    short = [*told, "--steps", "4", "--batch", "4", "--tests", "3"]
    code, first, err = ran(capsys, "train", *PAIR, *short)
    assert code == 0, err
    scores = json.loads(first)
    assert scores["tested"] == 3
    assert scores["parameter_share"] > 0
    assert "step 4 of 4" in err
    card = read_card(out / "fuser.safetensors")
    assert (card.origin, card.steps, card.data["setting"]) == ("trained", 4, "context")
    assert set(card.scores) == set(scores)
    assert "refined_accuracy" in (out / "card.md").read_text()

    assert sorted(path.name for path in out.iterdir()) == ["card.md", "fuser.safetensors"]

    code, _, err = ran(capsys, "train", *PAIR, *short)
    assert code == 2
    assert "is there, made to its end" in err
    assert err.count("\n") == 1
    code, again, err = ran(capsys, "train", *PAIR, *short, "--resume")
    assert (code, json.loads(again)) == (0, scores)
    assert "taught to its end before" in err
    code, _, err = ran(capsys, "train", *PAIR, *short, "--resume", "--lr", "0.5")
    assert code == 2
    assert "of other settings" in err

    code, shown, _ = ran(capsys, "show", str(out))
    assert code == 0
    assert "tiny:llama" in shown
    code, shown, _ = ran(capsys, "show", str(out), "--json")
    assert json.loads(shown)["scores"]["gain"] == card.scores["gain"]


def test_a_training_that_was_stopped_says_so_and_goes_on(capsys, facts, tmp_path, monkeypatch):
    told = ["--data", facts, "--width", "8", "--steps", "52", "--batch", "2", "--tests", "3"]
    code, whole, _ = ran(capsys, "train", *PAIR, *told, "--out", str(tmp_path / "whole"))
    assert code == 0
    out = tmp_path / "pair"

    def stopping(steps):
        def stop(step, loss):
            if step == 51:  # one after the checkpoint
                raise KeyboardInterrupt

        return stop

    with monkeypatch.context() as at:
        at.setattr(fuser_cli, "_progress", stopping)
        assert ran(capsys, "train", *PAIR, *told, "--out", str(out))[0]
    assert [path.name for path in out.iterdir()] == ["checkpoint.safetensors"]
    code, _, err = ran(capsys, "train", *PAIR, *told, "--out", str(out))
    assert code == 2
    assert "go on from it with --resume" in err
    code, resumed, _ = ran(capsys, "train", *PAIR, *told, "--out", str(out), "--resume")
    assert code == 0
    apart = {"seconds"}
    scores = [{k: v for k, v in json.loads(x).items() if k not in apart} for x in (whole, resumed)]
    assert scores[0] == scores[1]
    assert not (out / "checkpoint.safetensors").exists()


def test_what_train_writes_is_found_by_refine_and_by_a_federation(
    capsys, fedloom, facts, questions, tmp_path
):
    """As docs/fusers.md and docs/fedrefine.md say it, with tiny models."""
    fusers = tmp_path / "fusers"
    told = ["--data", facts, "--width", "8", "--steps", "2", "--batch", "4", "--tests", "3"]
    code, _, err = ran(capsys, "train", *PAIR, *told, "--out", str(fusers / "llama-qwen3"))
    assert code == 0, err
    (fusers / "other").mkdir()
    (fusers / "other" / "checkpoint.safetensors").write_bytes(b"another training goes on")
    for told_by in (fusers, fusers / "llama-qwen3", fusers / "llama-qwen3" / "fuser.safetensors"):
        code, said, err = fedloom("refine", "which?", *PAIR, "--fuser", told_by, "--json")
        assert code == 0, err
        (source,) = json.loads(said)["receipt"]["sources"]
        assert (source["name"], source["status"]) == ("tiny:llama", "used")
    models = {"refine.models": "tiny:llama,tiny:qwen3", "clients.count": 2}
    config = meeting_of(questions, fusers, tmp_path, **models)
    run_in_process(config)
    folder = tmp_path / config.name
    (registry,) = events(folder, "registry")
    assert [fuser["sender"] for fuser in registry["fusers"]] == ["tiny:llama"]
    found = {r["partition"]: r for r in rows(folder, "metrics") if r["phase"] == "evaluate"}
    assert (found[0]["used"], found[1]["used"]) == (0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_is_offered_can_be_taught_and_solved(capsys, facts, tmp_path, dtype):
    told = ["--data", facts, "--width", "8", "--dtype", dtype, "--tests", "3", "--device", "cpu"]
    for init in ("random", "closed-form"):
        out = tmp_path / init
        how = [*told, "--steps", "2", "--batch", "4", "--init", init, "--out", str(out)]
        code, said, err = ran(capsys, "train", *PAIR, *how)
        assert code == 0, err
        assert json.loads(said)["tested"] == 3
        assert read_card(out / "fuser.safetensors").steps == 2


def test_a_receiver_with_windows_can_be_solved_for(capsys, facts, tmp_path):
    told = ["--sender", "tiny:llama", "--receiver", "tiny:gemma3", "--data", facts]
    told += ["--width", "8", "--out", str(tmp_path / "x")]
    code, _, err = ran(capsys, "solve", *told)
    assert code == 2
    assert "use tail = 0" in err.splitlines()[-1]
    code, _, err = ran(capsys, "solve", *told, "--tail", "0")
    assert code == 0, err
    assert read_card(tmp_path / "x" / "fuser.safetensors").config["sink"] == "none"


def test_solve_by_clients_is_the_same_fuser(capsys, facts, tmp_path):
    found = []
    for clients in ("1", "3"):
        out = tmp_path / clients
        told = ["--data", facts, "--out", str(out), "--width", "16", "--clients", clients]
        code, text, err = ran(capsys, "solve", *PAIR, *told)
        assert code == 0, err
        found.append(json.loads(text))
        card = read_card(out / "fuser.safetensors")
        assert (card.origin, card.data["hands"]) == ("closed-form", int(clients))
    for name in ("explained", "refined_nats", "tokens"):
        assert found[0][name] == pytest.approx(found[1][name], abs=2e-5)


def test_closed_form_is_a_start_for_training(capsys, facts, tmp_path):
    told = ["--data", facts, "--out", str(tmp_path / "x"), "--width", "8", "--steps", "2"]
    code, text, err = ran(capsys, "train", *PAIR, *told, "--init", "closed-form")
    assert code == 0, err
    assert json.loads(text)["tested"] > 0


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (["--mode", "prefixx"], "did you mean prefix"),
        (["--setting", "some"], "expected one of same, context"),
        (["--init", "warm"], "--init"),
        (["--device", "cudda"], "expected auto"),
        (["--receiver", "tiny:lama"], "did you mean llama"),
        (["--receiver", "tiny:gemma3"], "where a window slides"),
        (["--mode", "residual", "--tail", "2", "--sender", "tiny:mamba"], "mamba"),
    ],
)
def test_bad_input_leaves_by_two_with_one_line(capsys, facts, tmp_path, told, match):
    base = [*PAIR, "--data", facts, "--out", str(tmp_path / "y")]
    code, _, err = ran(capsys, "train", *base, *told)
    assert code == 2
    assert match in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_file_that_is_no_fuser_leaves_by_two(capsys, tmp_path):
    code, _, err = ran(capsys, "show", str(tmp_path / "none.safetensors"))
    assert code == 2
    assert "fedloom fuser train" in err
