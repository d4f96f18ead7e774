"""``fedloom refine`` as the command that it is, in this process."""

from __future__ import annotations

import json

import pytest

from meetings import write_fusers

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")

ASK = ["refine", "what is it?", "--receiver", "tiny:qwen3", "--max-new-tokens", 5]
PAIRS = [("llama", "qwen3"), ("qwen2", "llama")]


@pytest.fixture(scope="module")
def fusers(tmp_path_factory):
    return write_fusers(tmp_path_factory.mktemp("fusers"), pairs=PAIRS)


def test_it_answers_and_says_who_was_heard(fedloom, fusers):
    two = ["--sender", "tiny:llama", "--sender", "tiny:qwen2", "--fuser", fusers]
    code, out, err = fedloom(*ASK, *two, "--json", "--compare", "--dtype", "int8")
    assert code == 0
    told = json.loads(out)
    sources = {s["name"]: s for s in told["receipt"]["sources"]}
    assert sources["tiny:llama"]["status"] == "used"
    assert sources["tiny:qwen2"]["cause"] == "no-fuser"
    assert told["receipt"]["fallback"] == "fewer"
    assert told["answer"] != told["standalone"]
    code, out, err = fedloom(*ASK, *two, "--compare")
    assert "alone: " in out
    assert "tiny:llama: used, 2 of 2 gates open" in err
    assert "tiny:qwen2: FALLBACK (no-fuser)" in err
    assert "on the wire" in err


def test_without_senders_it_is_the_receiver_alone(fedloom):
    code, out, _ = fedloom(*ASK, "--json", "--compare")
    told = json.loads(out)
    assert (code, told["answer"]) == (0, told["standalone"])
    assert told["receipt"]["mode"] == "standalone"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--sender", "tiny:llama"], "fedloom fuser train --sender tiny:llama"),
        (["--sender", "tiny:llama", "--fuser", "nowhere.safetensors"], "no such file"),
        (["--dtype", "int9"], "expected one of bf16, int8, int4"),
        (["--keep-tokens", "0"], "a share above 0"),
        (["--sender", "tiny:lama"], "did you mean"),
        (["--on", "lab"], "expected the partition that answers"),
        (["--on", "lab", "--sender", "tiny:llama"], "the federation's own senders"),
        (["--on", "lab", "--words", "5"], "leave --sender, --fuser, --shown, --words"),
        (["--select", "gains.toml", "--words", "5"], "gains.toml"),
        (["--device", "cudda"], "expected auto"),
    ],
)
def test_bad_input_is_one_line(fedloom, more, said):
    code, out, err = fedloom(*ASK, *more)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_cache_that_fell_away_is_asked_for_in_words(fedloom, fusers):
    """The text of one sender is too long for the other's terms; so neither cache comes."""
    long = ["refine", "what is it? " * 400, "--receiver", "tiny:qwen3", "--max-new-tokens", 3]
    one = [*long, "--sender", "tiny:llama", "--fuser", fusers, "--json"]
    code, out, _ = fedloom(*one, "--words", 5)
    assert code == 0
    receipt = json.loads(out)["receipt"]
    assert (receipt["mode"], receipt["fallback"]) == ("t2t", "t2t")
    kinds = sorted((s["way"], s["status"], s["cause"]) for s in receipt["sources"])
    assert kinds == [("bf16", "fallback", "failed"), ("text", "used", "")]
    assert receipt["sources"][1]["tokens"] <= 5
    code, out, err = fedloom(*one[:-1], "--words", 0)
    assert code == 0
    assert "fallback: none: alone" in err
    assert "standalone, " in err.splitlines()[-1]


def test_guards_are_options(fedloom, fusers):
    one = [*ASK, "--sender", "tiny:llama", "--fuser", fusers, "--json"]
    told = [json.loads(fedloom(*one, *more)[1])["receipt"] for more in ([], ["--max-norm", "1e-6"])]
    assert [r["sources"][0]["cause"] for r in told] == ["", "guard"]
    _, out, _ = fedloom(*one, "--vote")  # it needs three, so nobody is voted out
    assert json.loads(out)["receipt"]["sources"][0]["status"] == "used"


def test_two_fusers_of_one_pair_are_not_chosen_between(fedloom, fusers, tmp_path):
    write_fusers(tmp_path / "more", pairs=PAIRS[:1])
    twice = ["--fuser", fusers, "--fuser", tmp_path]
    code, _, err = fedloom(*ASK, "--sender", "tiny:llama", *twice)
    assert code == 2
    assert "are both of tiny:llama -> tiny:qwen3" in err


def test_a_fuser_of_other_models_is_named(fedloom, fusers):
    other = fusers / "qwen2-llama.safetensors"
    code, _, err = fedloom(*ASK, "--sender", "tiny:llama", "--fuser", other)
    assert code == 2
    assert "is of tiny:qwen2 -> tiny:llama" in err
