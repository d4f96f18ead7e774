"""With a share that was given, alpha is the best at that share."""

from __future__ import annotations

import math

import pytest

from fedloom.language.choosing import Choice, Point


def test_a_given_share_has_its_own_best_alpha():
    base = Point(0.3, 0.0, 1.0)
    curve = (
        Point(0.3, 0.5, 1.6),
        Point(0.3, 0.9, 3.0),
        Point(0.6, 0.5, 1.7),
        Point(0.6, 0.9, 2.0),
        Point(1.0, 0.5, 1.5),
        Point(1.0, 0.9, math.nan),
    )
    choice = Choice(base, base, curve)
    assert choice.at(0.9) == curve[3]
    assert choice.at(0.5) == curve[4]
    with pytest.raises(ValueError, match="was not tried"):
        choice.at(0.7)
