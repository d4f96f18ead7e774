"""``fedloom generate`` and ``fedloom state``, as the commands that they are."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from fedloom.simulations import cli
from fedloom.simulations.inprocess import run_in_process

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")

TINY = ["--recipe", "fednl", "--set", "model.source=tiny:llama", "--set", "memory.window=8"]
WRITE = ["--temperature", "1", "--seed", "3"]  # a random model's greedy answers are dull


@pytest.fixture
def trained(recipe) -> Path:
    config = recipe(rounds=1, memory__window=8, memory__sinks=1)
    run_in_process(config)
    return Path(config.output) / config.name


def test_a_runs_adapter_writes_and_a_state_goes_on_as_if_never_put_away(fedloom, trained, tmp_path):
    kept, asked = tmp_path / "states" / "ann.safetensors", ["--prompt", "who are you?", *WRITE]
    code, whole, said = fedloom("generate", trained, *asked, "--max-new-tokens", 20)
    assert code == 0
    cost = json.loads(said)
    assert cost["tokens"] == cost["context"] == 1 + 12 + 20
    save = ["--save-state", kept, "--expires", "7d"]
    code, head, said = fedloom("generate", trained, *asked, "--max-new-tokens", 9, *save)
    assert (code, kept.stat().st_mode & 0o777) == (0, 0o600)
    assert f"state: {kept} (22 tokens, expires 20" in said
    code, tail, _ = fedloom(
        "generate", trained, "--state", kept, *WRITE, "--max-new-tokens", 11, "--save-state", kept
    )
    assert code == 0
    # cut in the middle of a character either part shows a replacement
    assert (head[:-1] + tail).replace("\ufffd", "") in whole.replace("\ufffd", "") + "\n"
    code, shown, _ = fedloom("state", "show", kept)
    facts = dict(line.split(None, 1) for line in shown.splitlines())
    assert (code, facts["tokens"], facts["expires"]) == (0, "33", "never")
    assert facts["layers"] == "2"

    code, out, said = fedloom("generate", *TINY, "--state", kept, "--max-new-tokens", 1)
    assert (code, out) == (2, "")
    assert "differs in adapter" in said


def test_the_untrained_adapter_of_the_start_is_not_the_trained_one(fedloom, trained):
    outs = []
    for setting in ([], ["--set", "seed=1"]):
        _, out, _ = fedloom("generate", trained, "--prompt", "a", *setting, "--max-new-tokens", 4)
        outs.append(out)
    assert outs[0] == outs[1]  # the file's arrays count, not the seed's
    weights = trained / "adapter" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 64
    weights.write_bytes(data)
    code, _, said = fedloom("generate", trained, "--prompt", "a")
    assert code == 2
    assert "digest.txt" in said


def test_a_file_or_stdin_is_read(fedloom, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("good morning", encoding="utf-8")
    answers = []
    for chosen in (["--prompt", "good morning"], ["--file", tmp_path / "text"], ["--file", "-"]):
        stdin = io.TextIOWrapper(io.BytesIO(b"good morning"))
        monkeypatch.setattr(sys, "stdin", stdin)
        answers.append(fedloom("generate", *TINY, *WRITE, *chosen, "--max-new-tokens", 6)[1])
    assert answers[0] == answers[1] == answers[2] != "\n"


def test_states_are_listed_expired_and_deleted(fedloom, tmp_path):
    folder = tmp_path / "states"
    for name, until in (("old", "1s"), ("new", "7d"), ("ever", None)):
        ends = ["--expires", until] if until else []
        file = ["--save-state", folder / f"{name}.safetensors", *ends]
        assert fedloom("generate", *TINY, "--prompt", "a", "--max-new-tokens", 1, *file)[0] == 0
    (folder / "other.safetensors").write_text("not ours")
    old = folder / "old.safetensors"
    while not cli.state_cli.states.read_header(old).expired():
        pass  # a second at most
    code, shown, _ = fedloom("state", "list", folder)
    assert code == 0
    assert shown.count("safetensors") == 3
    assert "(expired)" in shown
    code, _, said = fedloom("generate", *TINY, "--state", old)
    assert code == 2
    assert "expired at" in said
    assert fedloom("state", "expire", folder) == (0, f"deleted {old}\n", "")
    assert fedloom("state", "delete", folder)[0] == 2
    assert fedloom("state", "delete", folder / "new.safetensors")[0] == 0
    assert fedloom("state", "delete", folder, "--all")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["other.safetensors"]
    code, _, said = fedloom("state", "delete", folder / "other.safetensors")
    assert (code, said.count("\n")) == (2, 1)
    assert (folder / "other.safetensors").exists()


REFUSED = {
    "no prompt": (["--recipe", "fednl"], "nothing to go on from"),
    "two prompts": (["--recipe", "fednl", "--prompt", "a", "--file", "b"], "both came"),
    "no run": (["--prompt", "a"], "expected a run's folder or --recipe"),
    "not a run": (["none", "--prompt", "a"], "none has no config.toml"),
    "no file": (["--recipe", "fednl", "--file", "none.txt"], "--file none.txt: No such file"),
    "no state": (["--recipe", "fednl", "--state", "none"], "state none: no such file"),
    "no duration": (["--recipe", "fednl", "--prompt", "a", "--expires", "7"], "such as 90m"),
    "nothing kept": (["--recipe", "fednl", "--prompt", "a", "--expires", "7d"], "--save-state too"),
    "bad key": (["--recipe", "fednl", "--prompt", "a", "--set", "memory.windw=3"], "did you mean"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_refusal_is_one_line_and_code_2(fedloom, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = fedloom("generate", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("fedloom: ")
    assert said in err
