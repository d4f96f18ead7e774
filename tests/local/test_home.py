"""What a client keeps: whole, apart by run, partition, purpose and round, checked when read."""

from __future__ import annotations

import json
import os
import stat
import struct

import numpy as np
import pytest

from fedloom.errors import Refusal
from fedloom.local.home import Home, root

RUN, MANIFEST = "ab" * 16, "cd" * 32


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full((2, 3), value, np.float32), "b": np.arange(3.0)}


def same(a, b) -> bool:
    return a is not None and a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_what_was_kept_comes_back_and_nobody_elses():
    home = Home(RUN, 3, MANIFEST)
    assert home.find("control", before=9) is None
    home.keep("control", arrays(1), 4)
    assert same(home.find("control", before=5), arrays(1))
    assert home.find("control", before=4) is None
    assert home.find("contro", before=9) is None
    assert Home(RUN, 2, MANIFEST).find("control", before=9) is None
    assert Home("ef" * 16, 3, MANIFEST).find("control", before=9) is None
    mode = stat.S_IMODE((root() / RUN / "00003").stat().st_mode)
    assert mode & 0o077 == 0  # the node's owner alone


def test_a_round_can_be_repeated_and_old_ones_go():
    home = Home(RUN, 0, MANIFEST)
    for server_round in (1, 2, 3, 4):
        home.keep("omega", arrays(server_round), server_round)
    home.keep("personal", arrays(9), 1)
    assert same(home.find("omega", before=5), arrays(4))
    assert same(home.find("omega", before=4), arrays(3))  # to repeat round 4
    assert same(home.find("omega", before=3), arrays(2))  # or 3: two checkpoints are kept
    assert home.find("omega", before=2) is None
    home.keep("omega", arrays(30), 3)  # the run went back to round 3: round 4 never was
    assert same(home.find("omega", before=9), arrays(30))
    assert same(home.find("personal", before=9), arrays(9))
    left = sorted(path.name for path in (root() / RUN / "00000").iterdir())
    assert left == ["omega-000002.safetensors", "omega-000003.safetensors",
                    "personal-000001.safetensors"]  # fmt: skip


def test_a_round_that_is_trained_again_finds_nothing_of_its_first_attempt():
    home = Home(RUN, 0, MANIFEST)
    home.keep("omega", arrays(1), 1)
    home.keep("omega", arrays(2), 2)
    (root() / RUN / "00000" / ".omega-000002.safetensors.99").write_bytes(b"half")
    home.rewind(2)
    assert same(home.find("omega", before=9), arrays(1))
    assert [path.name for path in (root() / RUN / "00000").iterdir()] == [
        "omega-000001.safetensors"
    ]
    Home("", 0, MANIFEST).rewind(2)  # a server that names no run keeps nothing


@pytest.mark.parametrize("how", ["cut", "bit", "manifest"])
def test_a_file_that_is_damaged_or_anothers_is_refused(how):
    home = Home(RUN, 0, MANIFEST)
    home.keep("own", arrays(1), 1)
    (path,) = (root() / RUN / "00000").iterdir()
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[:-8])
    if how == "bit":
        data[-1] ^= 1
        path.write_bytes(data)
    if how == "manifest":
        home = Home(RUN, 0, "ef" * 32)
    with pytest.raises(Refusal, match="remove it to start anew"):
        home.find("own", before=2)


@pytest.mark.parametrize("run", ["", "../../etc", "a" * 200, "AB" * 16, "/" + "a" * 12])
def test_a_servers_word_never_becomes_a_path(run):
    with pytest.raises(Refusal, match="hexadecimal"):
        Home(run, 0, MANIFEST).keep("own", arrays(1), 1)
    assert not root().exists()


def test_the_folder_is_the_nodes_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path / "elsewhere"))
    Home(RUN, 0, MANIFEST).keep("own", arrays(1), 1)
    (path,) = (tmp_path / "elsewhere" / RUN / "00000").iterdir()
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    about = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    assert (about["round"], about["manifest"]) == ("1", MANIFEST)
    monkeypatch.delenv("FEDLOOM_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if os.name == "posix" and os.uname().sysname == "Linux":
        assert root() == tmp_path / "state" / "fedloom"
