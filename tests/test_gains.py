"""A file of measured gains is believed as far as it says what it must, and said back as it was."""

from __future__ import annotations

import json
import math

import pytest

from fedloom.errors import Refusal
from fedloom.gains import LIMIT, read_gains

GOOD = """
[budget]
senders = 2
own-seconds = 0.5
[links.any]
mbit = 10
[links."tiny:llama"]
mbit = 1.5
rtt-seconds = 0.1
[[help]]
sender = "tiny:llama"
way = "int8"
prefill = 100
fuse = 200.0
gains.law = [0.1, 0.05, 0.15]
gains.any = [0.0, -0.1, 0.1]
[[help]]
sender = "abababab"
receiver = "tiny:qwen3"
way = "text"
prefill = 100
fuse = 200
decode-seconds = 2
bytes = 300
trust = 1
memory-bytes = 7
gains.any = [0.1, 0.0, 0.2]
"""


def test_a_file_says_what_it_says_and_travels_as_json(tmp_path):
    path = tmp_path / "gains.toml"
    path.write_text(GOOD)
    here = read_gains(str(path))
    there = read_gains(here.to_json())
    assert there == here
    assert json.loads(there.to_json()) == there.tree
    assert (here.senders, here.own_seconds, here.memory) == (2, 0.5, math.inf)
    assert here.mbit == {"any": 10.0, "tiny:llama": 1.5}
    assert here.rtt == {"any": 0.0, "tiny:llama": 0.1}
    (cache,) = here.of(("tiny:qwen2", "ff" * 32), ("tiny:llama", "00" * 32))
    assert (cache.way, cache.gains["law"].low, cache.memory) == ("int8", 0.05, None)
    (text,) = here.of(("tiny:qwen3", "ff" * 32), ("path:somewhere", "ab" * 32))
    assert (text.way, text.trust, text.nbytes, text.memory) == ("text", 1, 300.0, 7.0)
    assert not here.of(("tiny:qwen2", "ff" * 32), ("path:somewhere", "ab" * 32))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mbit = 10\n", "", "links.any: no mbit"),
        ("mbit = 10\n", "mbit = -1\n", "mbit = -1: expected a number of 0 or more"),
        ("mbit = 10\n", "mbit = nan\n", "mbit = nan"),
        ("mbit = 10\n", "mbits = 10\n", "did you mean mbit"),
        ("senders = 2", "sender = 2", "did you mean senders"),
        ("senders = 2", "senders = 2.5", "a whole number of 0 or more"),
        ("senders = 2", 'cautious = "yes"', "expected true or false"),
        ("prefill = 100\nfuse = 200.0", "fuse = 200.0", "help 1: no prefill: expected a measured"),
        ("fuse = 200.0", "fuse = 0", "above 0"),
        ("fuse = 200.0", "fuse = true", "above 0"),
        ('way = "int8"', 'way = "int2"', "expected one of bf16, int8, int4, text"),
        ('way = "int8"', 'way = "int8"\nbytes = 3', "bytes belongs to way"),
        ("decode-seconds = 2\n", "", "help 2: no decode-seconds"),
        ("[0.1, 0.05, 0.15]", "[0.1, 0.2, 0.3]", "expected .value, low, high."),
        ("[0.1, 0.05, 0.15]", "0.1", "expected .value, low, high."),
        ("[0.1, 0.05, 0.15]", "[29.0, 19.0, 39.0]", "from -1 to 1"),
        ("gains.any = [0.1, 0.0, 0.2]", "", "help 2: no gains"),
        ("trust = 1", "trust = -1", "trust = -1"),
        ('sender = "abababab"\nreceiver = "tiny:qwen3"', "trust_ = 1", "unknown trust_"),
        ('sender = "abababab"', "sender = 3", "a model source"),
        ("[[help]]", "[[helps]]", "unknown helps"),
        ("[budget]", "budget = 3\n[x]", "unknown x"),
        ("[budget]", "budget", "line 2"),
    ],
)
def test_what_is_no_measurement_is_refused_in_a_line(tmp_path, old, new, said):
    assert old in GOOD
    path = tmp_path / "gains.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(Refusal, match=said) as refused:
        read_gains(str(path))
    assert "gains.toml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_row_twice_no_row_no_link_no_file(tmp_path):
    path = tmp_path / "gains.toml"
    row = GOOD[GOOD.index("[[help]]") : GOOD.rindex("[[help]]")]
    for text, said in (
        (GOOD + row, "tiny:llama comes twice by int8"),
        (GOOD[: GOOD.index("[[help]]")], "no .*help"),
        (row, "no links"),
        ("x" * (LIMIT + 1), "at most"),
        ("\x00", "gains.toml"),
    ):
        path.write_text(text)
        with pytest.raises(Refusal, match=said):
            read_gains(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(Refusal, match="UTF-8"):
        read_gains(str(path))
    with pytest.raises(Refusal, match="No such file"):
        read_gains(str(tmp_path / "nowhere.toml"))
    for text in ("{", "{}", '{"links": 3}', '{"help": [3], "links": {"any": {"mbit": 1}}}'):
        with pytest.raises(Refusal, match="measured gains"):
            read_gains(text)
