"""A fuser's file comes back bit for bit, and only for the very pair that it was made for."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fedloom.adapters.fuser_files import card_of, load_fuser, read_card, save_fuser
from fedloom.errors import Refusal

from rooms import fuser_of, room


@pytest.fixture
def saved(tmp_path):
    fuser = fuser_of("llama", "qwen3")
    with torch.no_grad():
        fuser.bias.fill_(0.25)
        fuser.sender_mean.normal_()
    facts = {"source": "path:x", "rows": 12}
    card = card_of(fuser, "tiny:llama", "tiny:qwen3", data=facts, scores={"gain": 0.125}, steps=7)
    path = tmp_path / "deep" / "pair.safetensors"
    save_fuser(path, fuser, card)
    return path, fuser, card


def pair():
    return room("llama")[1], room("qwen3")[1]


def test_it_comes_back_bit_for_bit_with_its_card(saved):
    path, fuser, card = saved
    got, told = load_fuser(path, *pair())
    assert told == card == read_card(path)
    assert all(torch.equal(x, fuser.state_dict()[n]) for n, x in got.state_dict().items())
    assert got.config == fuser.config
    assert not any(p.requires_grad for p in got.parameters())
    assert not got.training
    assert "| score.gain | 0.125 |" in card.to_text()
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no draft is left


def test_other_models_are_refused_by_hash(saved):
    path, *_ = saved
    sender, receiver = pair()
    for side in (
        (replace(sender, model="0" * 64), receiver),
        (sender, replace(receiver, tokenizer="0" * 64)),
        (receiver, sender),
    ):
        with pytest.raises(Refusal, match=r"belongs to (sender|receiver) (model|tokenizer)"):
            load_fuser(path, *side)
    with pytest.raises(Refusal, match="another shape"):
        load_fuser(path, sender, replace(receiver, bases=(5.0, 5.0)))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_file_cut_short_is_refused_in_one_line(saved, share):
    path, *_ = saved
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    for read in (read_card, lambda p: load_fuser(p, *pair())):
        with pytest.raises(Refusal, match="cannot be read") as refused:
            read(path)
        assert "\n" not in str(refused.value)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(Refusal, match="fedloom fuser train"):
        read_card(tmp_path / "none.safetensors")


def rewritten(path, **told):
    """The same tensors under another header."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    for key, value in told.items():
        header["__metadata__"][key] = json.dumps(value)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"format": "fedloom-fuser-9"}, "its format is fedloom-fuser-9"),
        ({"unheard": 1}, "its fields do not fit"),
        ({"steps": "many"}, "its steps is a str"),
        ({"origin": "heaven"}, "origin"),
        ({"sender": "{}"}, "its fields do not fit"),
    ],
)
def test_headers_that_say_something_else_are_refused(saved, told, match):
    path, *_ = saved
    rewritten(path, **told)
    with pytest.raises(Refusal, match=match):
        read_card(path)


def test_a_card_that_promises_other_tensors_is_refused_before_they_are_read(saved):
    path, _, card = saved
    rewritten(path, config={**card.config, "width": 1 << 20})
    with pytest.raises(Refusal, match="its card promises"):
        load_fuser(path, *pair())
    rewritten(path, config={**card.config, "depth": 3})
    with pytest.raises(Refusal, match="describes no fuser"):
        load_fuser(path, *pair())


def test_numbers_that_are_not_finite_are_refused(saved):
    path, fuser, card = saved
    with torch.no_grad():
        fuser.bias.fill_(torch.nan)
    save_fuser(path, fuser, card)
    with pytest.raises(Refusal, match="bias is not finite"):
        load_fuser(path, *pair())


def test_a_card_of_another_build_is_not_written(saved):
    path, fuser, card = saved
    with pytest.raises(ValueError, match="another config"):
        save_fuser(path, fuser, replace(card, config={**card.config, "width": 8}))


def test_a_folder_in_the_way_is_refused(saved, tmp_path):
    _, fuser, card = saved
    with pytest.raises(Refusal, match="expected a file to write"):
        save_fuser(tmp_path, fuser, card)


def test_a_card_needs_no_torch(saved):
    path, *_ = saved
    code = "import sys; from fedloom.cards import read_card; from pathlib import Path;"
    code += f"read_card(Path({str(path)!r})); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
