from __future__ import annotations

import numpy as np
import pytest

from fedloom.errors import Refusal
from fedloom.rules.bounds import MOVE, NORM, Move, NormBound, change_norms, recent, typical_of
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


def test_a_pair_of_which_nothing_was_sent_counts_as_its_product():
    random = np.random.default_rng(3)
    a, b = random.normal(size=(2, 5)), random.normal(size=(4, 2))
    name = "layer.q_proj.lora_{}.weight"
    came = {name.format("A"): a, name.format("B"): b, "gate": np.float64([2.0])}
    norms = change_norms(Update.of(came, 3), {"gate": np.float64([1.0])})
    assert norms[NORM] == pytest.approx(np.hypot(np.linalg.norm(b @ a), 1.0))
    louder = {**came, name.format("B"): 10 * b, "gate": np.float64([11.0])}
    louder = change_norms(Update.of(louder, 3), {"gate": np.float64([1.0])})
    assert louder[NORM] == pytest.approx(10 * norms[NORM])  # however large A was drawn
    sent = {name.format("A"): a}  # one factor was known: the other counts as it came
    assert change_norms(Update.of(came, 3), sent)[NORM] == pytest.approx(
        np.sqrt(np.square(b).sum() + 4)
    )


def rows(*norms: float, at: int = 1) -> list[dict]:
    return [{"round": at, NORM: norm} for norm in norms]


def test_what_is_looked_back_on_are_the_last_rounds_that_trained_the_same():
    many = [row for r in range(1, 8) for row in rows(r, r, r, at=r)]
    assert {row["round"] for row in recent(many, 6)} == {3, 4, 5}
    assert {row["round"] for row in recent(many, 7, alike=lambda r: r % 2 == 1)} == {1, 3, 5}
    assert recent(many, 1) == []
    assert recent(many, 5, key=MOVE) == []


def test_median_is_of_enough_norms_and_the_lower_one_of_two():
    def median(*norms: float) -> float | None:
        return typical_of([Move(norm) for norm in norms])

    assert median(1, 2) is None  # of two nobody knows which is odd
    assert median(1, 2, 300) == 2  # one liar does not move it
    assert median(1, 2, 300, 300) == 2  # nor do two of four
    assert median(0, 0, 0) is None  # nothing is a multiple of nothing


def test_who_has_more_to_do_may_go_further_and_who_has_less_as_far_as_its_peers():
    alike = [Move(2.0, reach=4.0)] * 3
    assert typical_of(alike, 4.0) == typical_of(alike, 1.0) == 2.0
    assert typical_of(alike, 40.0) == 20.0
    mixed = [Move(1.0, 1.0)] * 3 + [Move(20.0, 40.0)] * 4
    assert typical_of(mixed, 1.0) == 1.0  # though most are large
    assert typical_of(mixed, 40.0) == 20.0  # and not the 40 that the small ones suggest
    lying = [Move(1.0, 1.0), *[Move(1e6, 1.0)] * 2] + [Move(20.0, 40.0)] * 4
    assert typical_of(lying, 1.0) == 20.0  # most of the small ones lie: all have a say
    assert typical_of([Move(3.0, 0.0)] * 3, 40.0) == 3.0  # of whose work nothing is known


def test_a_bound_is_a_multiple_of_the_kindest_median():
    bound = NormBound(factor=5)
    assert bound.admits(Move(10.0), [2.0])
    assert not bound.admits(Move(10.1), [2.0])
    assert bound.admits(Move(10.1), [2.0, 3.0])
    assert bound.admits(Move(1e9), [])
    assert NormBound().admits(Move(1e9), [2.0])


def test_a_reason_says_how_far_what_was_allowed_and_for_what():
    assert NormBound(factor=5).reason(Move(200.0), [2.0, 20.0]) == (
        "the norm of its change is 200, 10 times the median of accepted ones; expected at most"
        " 5 times (gate.norm-factor), 100 for its rows and rank"
    )


def test_an_absolute_bound_is_its_own():
    with pytest.raises(Refusal, match=r"norm of its change is 30, expected at most 25$"):
        NormBound(most=25.0, factor=10).check(30.0)
    NormBound(most=25.0).check(25.0)
    NormBound(factor=10).check(1e9)
