"""``fedloom fuser`` as a user meets it, on tiny models."""

from __future__ import annotations

import json

import pytest

from fedloom.cards import read_card
from fedloom.simulations import cli

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

    code, _, err = ran(capsys, "train", *PAIR, *short)
    assert code == 2
    assert "--resume" in err
    assert err.count("\n") <= 2
    code, again, _ = ran(capsys, "train", *PAIR, *short, "--resume")
    assert code == 0
    assert {k: v for k, v in json.loads(again).items() if k != "seconds"} == {
        k: v for k, v in scores.items() if k != "seconds"
    }

    code, shown, _ = ran(capsys, "show", str(out))
    assert code == 0
    assert "tiny:llama" in shown
    code, shown, _ = ran(capsys, "show", str(out), "--json")
    assert json.loads(shown)["scores"]["gain"] == card.scores["gain"]


def test_solve_by_clients_is_the_same_fuser(capsys, facts, tmp_path):
    found = []
    for clients in ("1", "3"):
        out = tmp_path / clients
        told = ["--data", facts, "--out", str(out), "--width", "16", "--clients", clients]
        code, text, err = ran(capsys, "solve", *PAIR, *told)
        assert code == 0, err
        found.append(json.loads(text))
        assert read_card(out / "fuser.safetensors").origin == (
            "closed-form" if clients == "1" else "federated"
        )
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
