from __future__ import annotations

import numpy as np
import pytest

from fedloom.errors import Refusal
from fedloom.rules.bounds import MOVE, NORM, NormBound, change_norms
from fedloom.wire import Update


def test_change_is_measured_from_what_was_sent_and_controls_are_moves():
    sent = {"w": np.float32([1, 1]), "control/w": np.float32([100, 100])}
    came = {"w": np.float32([4, 5]), "new": np.float32([12]), "control/w": np.float32([0, 2])}
    norms = change_norms(Update.of(came, 7), sent)
    assert norms == {NORM: pytest.approx(13.0), MOVE: pytest.approx(2.0)}
    assert change_norms(Update.summed({}, 1.0), sent) == {NORM: 0.0}  # what came is not shown


def test_a_norm_beyond_doubles_is_refused():
    with pytest.raises(Refusal, match="not finite"):
        change_norms(Update.of({"w": np.array([1e200])}, 1), {})


def rows(*norms: float, at: int = 1) -> list[dict]:
    return [{"round": at, NORM: norm} for norm in norms]


def test_median_is_of_earlier_rounds_and_of_enough_clients():
    bound = NormBound(factor=10)
    assert bound.median(rows(1, 2), 2) is None  # of two nobody knows which is odd
    assert bound.median(rows(1, 2, 3), 1) is None
    assert bound.median(rows(1, 2, 300), 2) == 2  # one liar does not move it
    many = [row for r in range(1, 6) for row in rows(r, r, r, at=r)]
    assert bound.median(many, 6) == 4  # of the last three rounds
    assert bound.median(rows(0, 0, 0), 2) is None  # nothing is a multiple of nothing
    assert NormBound().median(rows(1, 2, 3), 2) is None


@pytest.mark.parametrize(("norm", "median"), [(21.0, 2.0), (8.0, 0.5), (30.0, None)])
def test_over_either_bound_is_refused(norm, median):
    bound = NormBound(most=25.0, factor=10)
    with pytest.raises(Refusal, match="norm of its change"):
        bound.check(norm, median)
    bound.check(19.0, 2.0)
