"""``fedloom faast``: compile, evaluate and generate on a tiny model; bad input in one line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom import inference
from fedloom.adapters.fast_files import load_memory, read_manifest
from fedloom.adapters.fast_weights import ReadOut, hung_on
from fedloom.language.choosing import ALPHAS, SHARES
from fedloom.language.compiling import nats, windows
from fedloom.models.base import load_base
from fedloom.simulations import cli

TINY = ("--model", "tiny:llama")
TEXT = "the cat sat on the mat and the dog sat on the cat. " * 30


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def compiled(tmp_path, text, capsys):
    out = str(tmp_path / "m.safetensors")
    cli.app(
        ["faast", "compile", "--text", text, "--out", out, "--length", "64", *TINY],
        standalone_mode=False,
    )
    return out, json.loads(capsys.readouterr().out)


def told(capsys, *arguments):
    cli.app(["faast", *arguments, *TINY], standalone_mode=False)
    return capsys.readouterr()


def refused(capsys, *arguments):
    """Return the one line that a refusal leaves on stderr."""
    with pytest.raises(SystemExit) as left:
        cli.main(["faast", *arguments])
    err = capsys.readouterr().err
    assert left.value.code == 2
    assert err.count("\n") == 1
    return err


def test_compile_chooses_on_what_it_holds_out(compiled):
    path, said = compiled
    manifest = read_manifest(Path(path))
    curve = said["validation_perplexity"]
    best = f"alpha {said['alpha']:g}, r {said['r']:g}"
    assert len(curve) == len(ALPHAS) * len(SHARES)
    if said["r"]:
        assert curve[best] == min(curve.values()) < said["validation_base_perplexity"]
    else:
        assert min(curve.values()) >= said["validation_base_perplexity"]
    tokens = len(TEXT) + 1  # and bos
    sequences = [64] * (tokens // 64) + [tokens % 64]
    held = sequences[-(len(sequences) // 8) :]
    assert (
        manifest.pairs == said["pairs"] == sum(sequences) - sum(held) - len(sequences) + len(held)
    )
    assert (manifest.alpha, manifest.r, manifest.places) == (said["alpha"], said["r"], (2,))
    assert hung_on(load_base("tiny:llama").model) is None


def test_a_given_share_gets_the_alpha_that_is_best_with_it(tmp_path, text, capsys):
    """Also where no memory is better still: what was asked for is a memory with this share."""
    numbers, out = tmp_path / "numbers.txt", str(tmp_path / "given.safetensors")
    numbers.write_text(" ".join(str(i * i % 97) for i in range(600)))
    support = ("--text", str(numbers), "--validate", text, "--out", out, "--length", "64")
    said = json.loads(told(capsys, "compile", *support, "--r", "0.97").out)
    curve = said["validation_perplexity"]
    assert min(curve.values()) > said["validation_base_perplexity"]
    assert list(curve.values()).index(min(curve.values())) > 0  # not the first, the base's alpha
    assert f"alpha {said['alpha']:g}, r 0.97" == min(curve, key=curve.__getitem__)
    assert read_manifest(Path(out)).alpha == said["alpha"]


def test_evaluate_is_perplexity_with_and_without(compiled, text, capsys):
    path, said = compiled
    found = json.loads(told(capsys, "evaluate", "--memory", path, "--text", text).out)
    assert found["r"] == said["r"]
    assert found["memory_bytes"] == 64 * 64 * 4
    base = load_base("tiny:llama")
    total, tokens = nats(base, windows(TEXT, base.tokenizer, 512))
    assert found["tokens"] == tokens
    assert found["base_perplexity"] == pytest.approx(math.exp(total / tokens))
    assert hung_on(base.model) is None


def test_generate_reads_the_memory(compiled, capsys):
    path, _ = compiled
    asked = ("generate", "--memory", path, "--prompt", "the cat", "--max-new-tokens", "8")
    silent, heard = (told(capsys, *asked, "--r", r) for r in ("0", "0.9"))
    base = load_base("tiny:llama")
    plain = inference.generate(
        inference.Context(base.model), base.tokenizer, "the cat", max_new_tokens=8
    )
    assert silent.out == "".join(plain) + "\n"
    hashes = {"base": base.base_hash, "tokenizer": base.tokenizer_hash}
    memory = load_memory(Path(path), base.model, **hashes)
    memory.r = 0.9
    wanted = "".join(
        inference.generate(
            inference.Context(base.model, chunk=3), base.tokenizer, "the cat", max_new_tokens=8
        )
    )
    memory.detach()
    assert heard.out == wanted + "\n" != silent.out
    assert json.loads(heard.err)["r"] == 0.9


def test_pairs_of_sentences_are_compiled(tmp_path, capsys):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("Good day.\tGuten Tag.\n\nThank you.\tDanke.\n")
    out = str(tmp_path / "m.safetensors")
    chosen = ("--alpha", "1", "--r", "0.5", "--out", out, "--pairs", str(pairs))
    everything = json.loads(told(capsys, "compile", *chosen).out)
    answers = json.loads(told(capsys, "compile", *chosen, "--answers-only").out)
    assert answers["pairs"] == len(" Guten Tag.\n Danke.\n")
    prompts = len("English: Good day.\nGerman:English: Thank you.\nGerman:")
    assert everything["pairs"] == answers["pairs"] + prompts  # bos is a key, no value


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compile", "--out", "x"], "expected --text SOURCE or --pairs FILE"),
        (["compile", "--out", "x", "--text", "none.txt", *TINY], "none.txt: No such file"),
        (["compile", "--out", "x", "--text", "packaged:nothing", *TINY], "packaged:nothing"),
        (["compile", "--out", "x", "--text", "t", "--model", "tiny:lama"], "tiny:lama"),
        (["compile", "--out", "x", "--pairs", "none", *TINY], "none cannot be read"),
        (["compile", "--out", "x", "--pairs", "p", "--languages", "German"], "two names"),
        (["evaluate", "--memory", "none", "--text", "t", *TINY], "memory none: no such file"),
        (["generate", "--memory", "none", *TINY], "nothing to go on from"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *arguments)


def test_a_single_sequence_cannot_be_validated_on_itself(tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text("only this")
    out = str(tmp_path / "m")
    line = refused(capsys, "compile", "--out", out, "--text", str(path), *TINY)
    assert "give --validate TEXT, or --alpha and --r" in line


def test_another_model_is_refused(compiled, text, capsys):
    path, _ = compiled
    other = ("--text", text, "--model", "tiny:qwen2")
    assert "belongs to base" in refused(capsys, "evaluate", "--memory", path, *other)


def test_a_tsv_line_without_a_tab_is_refused(tmp_path, capsys):
    path = tmp_path / "p.tsv"
    path.write_text("one\ttwo\nthree\n")
    line = refused(capsys, "compile", "--out", "x", "--pairs", str(path), *TINY)
    assert "line 2 has 1 columns" in line


def test_a_coordinator_can_list_the_commands():
    """The command group loads without torch."""
    code = "import sys; from fedloom.simulations import cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def readouts(tmp_path, text, capsys):
    other = tmp_path / "other.txt"
    other.write_text("a bird sang in the tree and the tree stood by the river. " * 20)
    out = str(tmp_path / "p.safetensors")
    sources = ["--text", text, "--text", str(other), "--length", "64", "--max-steps", "4"]
    said = told(capsys, "train-readout", *sources, "--out", out, "--learning-rate", "0.01")
    return out, json.loads(said.out)


def test_a_trained_readout_is_heard_between_the_blocks(readouts, text, tmp_path, capsys):
    path, said = readouts
    width = load_base("tiny:llama").model.config.hidden_size
    assert (said["places"], said["steps"]) == ([1], 4)
    assert said["parameters"] == sum(math.prod(s) for s in ReadOut.shapes(width).values())
    out = str(tmp_path / "m.safetensors")
    chosen = ["--alpha", "1", "--r", "0", "--length", "64"]
    made = ["compile", "--text", text, "--readouts", path, "--out", out, *chosen]
    assert json.loads(told(capsys, *made).out)["middle_places"] == [1]
    assert read_manifest(Path(out)).places == (1, 2)
    found = json.loads(told(capsys, "evaluate", "--memory", out, "--text", text).out)
    assert found["perplexity"] < found["base_perplexity"]  # r = 0: all of it is the middle's


def test_readouts_of_another_model_or_cut_short_are_refused(readouts, text, tmp_path, capsys):
    path, _ = readouts
    made = ["compile", "--text", text, "--out", str(tmp_path / "m.safetensors"), "--readouts"]
    assert "belongs to base" in refused(capsys, *made, path, "--model", "tiny:qwen2")
    short = tmp_path / "short.safetensors"
    short.write_bytes(Path(path).read_bytes()[:-100])
    assert "cut short" in refused(capsys, *made, str(short), *TINY)
    memory = tmp_path / "memory.safetensors"
    told(capsys, *made[:-1], "--alpha", "1", "--r", "0.5", "--length", "64")
    (tmp_path / "m.safetensors").rename(memory)
    assert "expected one of fedloom faast train-readout" in refused(
        capsys, *made, str(memory), *TINY
    )
