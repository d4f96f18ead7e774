"""Codes of 16, 8 and 4 bits, and that what rounding leaves over is made up for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedloom.errors import Refusal
from fedloom.local.feedback import changes
from fedloom.local.home import Home
from fedloom.rounding import GROUP, code_bytes, decode, encode, moved, rounded, scale_bytes

NARROW = ("bfloat16", "int8", "int4")
LEVELS = {"int8": 127, "int4": 7}
FLOATS = hnp.arrays(
    np.float32,
    st.integers(0, 200),
    # Beside torch, subnormal numbers may be flushed to zero.
    elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
    | st.floats(-1, 1, width=32, allow_subnormal=False),
)


def naive_step(largest: float, levels: int) -> np.float32:
    """Try bfloat16 numbers from below until one is not smaller than the largest over the levels."""
    step = np.float32(largest) / np.float32(levels)
    bits = int(step.view(np.uint32)) & 0xFFFF0000
    while np.uint32(bits).view(np.float32) < step:
        bits += 0x10000
    return np.uint32(bits).view(np.float32)


@pytest.mark.parametrize("code", NARROW)
@settings(max_examples=60, deadline=None)
@given(FLOATS)
def test_no_number_moves_by_more_than_half_a_step(code, array):
    codes, steps = encode(array, code)
    sizes = code_bytes(code, array.size), scale_bytes(code, array.size)
    assert (len(codes), len(steps)) == sizes
    back = decode(codes, steps, code, array.size)
    for at, (was, now) in enumerate(zip(array, back, strict=True)):
        if code == "bfloat16":
            half = abs(was) * 2.0**-8 + 1e-38
        else:
            peers = array[at // GROUP * GROUP :][:GROUP]
            half = naive_step(float(np.abs(peers).max()), LEVELS[code]) / 2 * (1 + 1e-6)
        assert abs(float(was) - float(now)) <= half


def test_float32_is_the_same_bits():
    array = np.random.default_rng(0).normal(size=99).astype(np.float32)
    assert decode(*encode(array, "float32"), "float32", 99).tobytes() == array.tobytes()


def test_what_is_smaller_takes_fewer_bytes():
    sizes = {code: code_bytes(code, 6400) + scale_bytes(code, 6400) for code in NARROW}
    assert sizes == {"bfloat16": 12800, "int8": 6400 + 200, "int4": 3200 + 200}


@pytest.mark.parametrize(
    ("code", "codes", "steps", "said"),
    [
        ("int8", b"\x01" * 3, b"\x80\x3f", "3 bytes of codes"),
        ("int8", b"\x01" * 4, b"", "0 bytes of steps"),
        ("int8", b"\x80" * 4, b"\x80\x3f", "beyond 127"),
        ("int4", b"\x10\x11", b"\x80\x3f", "beyond 7"),
        ("int8", b"\x01" * 4, b"\x80\x7f", "no finite number"),
        ("int8", b"\x01" * 4, b"\xc0\x7f", "no finite number"),
        ("int8", b"\x01" * 4, b"\x80\xbf", "from 0 up"),
    ],
)
def test_what_is_no_code_is_refused(code, codes, steps, said):
    with pytest.raises(Refusal, match=said):
        decode(codes, steps, code, 4)


@pytest.mark.parametrize("code", NARROW)
def test_decoded_changes_add_up_to_the_true_ones_within_one_step(code, tmp_path, monkeypatch):
    """Error feedback; without it the tiny steps of one entry would be lost in every round."""
    monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path))
    home, random, rounds = Home("ab" * 8, 0, "m"), np.random.default_rng(1), 40
    shape, drift = (3, 50), np.full((3, 50), 1e-3, np.float32)
    drift[0, 0] = 1.0  # makes the others' group coarse: a step of int4 is 1/7
    server = np.zeros(shape, np.float32)
    true, bare, largest = np.zeros(shape), np.zeros(shape), 0.0
    for r in range(1, rounds + 1):
        change = drift * random.uniform(0.5, 1.5, shape).astype(np.float32)
        trained, received = {"w": server + change}, {"w": server}
        true += (trained["w"].astype(float) - server).astype(float)
        sent = changes(trained, received, code, home, r)["w"]
        largest = max(largest, float(np.abs(sent).max()))
        server = moved(server, rounded(sent, code))
        bare += rounded(trained["w"] - received["w"], code)
    step = largest / {"bfloat16": 2**7, "int8": 100, "int4": 6}[code]
    assert np.abs(server - true).max() <= step / 2 + 1e-5
    left = home.find("rounding", rounds + 1)["w"]
    np.testing.assert_allclose(server + left, true, rtol=0, atol=2e-5)  # float32's own rounding
    if code == "int4":
        assert np.abs(bare - true).max() > 5 * np.abs(server - true).max() / 2
        assert not bare[0, 1:].any()  # without feedback they never arrive


def test_a_repeated_round_feeds_back_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path))
    home, random = Home("ab" * 8, 0, "m"), np.random.default_rng(2)
    arrays = [{"w": random.normal(size=64).astype(np.float32)} for _ in range(3)]
    for r in (1, 2):
        once = changes(arrays[r], arrays[0], "int4", home, r)["w"]
    again = changes(arrays[2], arrays[0], "int4", home, 2)["w"]
    assert once.tobytes() == again.tobytes()
