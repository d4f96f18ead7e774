"""Peak memory counts what a function touched, and not what its parent holds."""

import numpy as np
import pytest

from fedloom.peak import measure_peak

SCRIPT = """
def touch(megabytes):
    held = bytearray(b"x") * (megabytes * 1_000_000)
    print(len(held))

def fail(text):
    raise ValueError(text)
"""
MB = 1_000_000


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "work.py"
    path.write_text(SCRIPT)
    return path


def test_the_peak_grows_with_what_is_touched_and_not_with_the_parent(script):
    ballast = np.ones(300 * MB, np.uint8)
    small, large = (measure_peak(script, "touch", size) for size in (1, 120))
    assert large.grown - small.grown == pytest.approx(119 * MB, rel=0.1)
    assert small.resident < ballast.nbytes
    assert large.resident >= large.before > 0
    assert large.cuda == 0


def test_a_function_that_fails_says_why(script):
    with pytest.raises(RuntimeError, match=r"work\.py: fail failed: ValueError: no room"):
        measure_peak(script, "fail", "no room")
