"""What a server knows of its fusers: pairs, sizes, hashes; and of two for one pair, nothing."""

from __future__ import annotations

import hashlib
import shutil

import pytest

from fedloom.errors import Refusal
from fedloom.strategies.registry import Registry

from meetings import write_fusers
from rooms import room


@pytest.fixture
def folder(tmp_path):
    return write_fusers(tmp_path / "fusers", pairs=[("llama", "qwen3"), ("qwen3", "llama")])


def test_it_tells_what_there_is_by_hash(folder):
    registry = Registry(folder)
    llama, qwen3 = (room(family)[0].base_hash for family in ("llama", "qwen3"))
    (entry,) = registry.among([llama, "0" * 64], qwen3)
    data = (folder / "llama-qwen3.safetensors").read_bytes()
    assert entry.data().tobytes() == data
    told = entry.told()
    assert told["digest"] == hashlib.sha256(data).hexdigest()
    assert (told["sender"], told["receiver"]) == ("tiny:llama", "tiny:qwen3")
    assert (told["bytes"], told["scores"]) == (len(data), {"gain": 0.5})
    assert registry.among([qwen3], qwen3) == []


def test_folders_of_fuser_train_are_looked_through_and_nothing_else_is_taken(folder):
    """``fuser train --out fusers/NAME`` makes a folder each, with more than a fuser in it."""
    for name in ("llama-qwen3", "qwen3-llama"):
        (folder / "all" / name).mkdir(parents=True)
        (folder / f"{name}.safetensors").rename(folder / "all" / name / "fuser.safetensors")
        (folder / "all" / name / "card.md").write_text("a card")
    (folder / "all" / "checkpoint.safetensors").write_bytes(b"of a training that goes on")
    (folder / ".draft.safetensors").write_bytes(b"half")
    (folder / ".old").mkdir()
    shutil.copy(folder / "all/llama-qwen3/fuser.safetensors", folder / ".old/fuser.safetensors")
    assert len(Registry(folder).entries) == 2
    (folder / "more").mkdir()
    shutil.copy(folder / "all/llama-qwen3/fuser.safetensors", folder / "more/fuser.safetensors")
    said = "more/fuser.safetensors and all/llama-qwen3/fuser.safetensors are of one pair"
    with pytest.raises(Refusal, match=said):
        Registry(folder)


def test_a_file_that_changes_under_it_is_refused(folder):
    (entry,) = Registry(folder).among([room("llama")[0].base_hash], room("qwen3")[0].base_hash)
    shutil.copy(folder / "qwen3-llama.safetensors", entry.path)
    with pytest.raises(Refusal, match="was changed"):
        entry.data()


def test_two_of_one_pair_and_files_that_are_none_are_refused(folder):
    shutil.copy(folder / "llama-qwen3.safetensors", folder / "z.safetensors")
    with pytest.raises(Refusal, match="of one pair"):
        Registry(folder)
    (folder / "z.safetensors").write_bytes(b"junk")
    with pytest.raises(Refusal, match="cannot be read"):
        Registry(folder)
