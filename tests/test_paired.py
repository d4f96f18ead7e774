"""Paired comparisons against closed forms, and against what they promise on made-up data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.intervals import wilson
from fedloom.paired import (
    crossed_bootstrap,
    holm,
    mcnemar,
    paired_bootstrap,
    seeded_bootstrap,
)

OUTCOMES = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def test_mcnemar_is_the_binomial_worked_by_hand():
    # 1 of 8 discordant rows: 2 (1 + 8) / 256
    found = mcnemar([1] * 7 + [0] + [1, 0], [0] * 7 + [1] + [1, 0])
    assert (found.only_a, found.only_b) == (7, 1)
    assert found.p == pytest.approx(2 * 9 / 256)
    assert mcnemar([1, 0, 1, 0], [0, 1, 1, 0]).p == 1.0
    assert mcnemar([1, 1], [1, 1]).p == 1.0  # nothing discordant


@given(OUTCOMES)
def test_mcnemar_is_symmetric_and_blind_to_rows_that_agree(pairs):
    a, b = ([pair[i] for pair in pairs] for i in (0, 1))
    one, other = mcnemar(a, b), mcnemar(b, a)
    assert one.p == other.p
    assert (one.only_a, one.only_b) == (other.only_b, other.only_a)
    assert mcnemar([*a, True, False], [*b, True, False]) == one
    assert 0 < one.p <= 1


def test_mcnemar_rejects_no_more_often_than_its_level_when_nothing_differs():
    random = np.random.default_rng(0)
    p = [mcnemar(*(random.random((2, 40)) < 0.5)).p for _ in range(2000)]
    share = np.mean(np.array(p) <= 0.05)
    assert wilson(int(share * 2000), 2000, 0.999).low <= 0.05
    assert share > 0.005  # exact tests are conservative, not mute


def test_mcnemar_sees_many_rows_without_overflow():
    assert mcnemar([1] * 3000 + [0] * 3100, [0] * 3000 + [1] * 3100).p == pytest.approx(
        math.erfc(99 / math.sqrt(2 * 6100)), rel=2e-3
    )  # the normal limit with continuity correction


def test_the_bootstrap_has_the_closed_form_s_width():
    random = np.random.default_rng(1)
    rows = [random.normal(0.3, 1.0, 400), random.normal(0.1, 2.0, 100)]
    at = paired_bootstrap(rows, seed=3, draws=20_000)
    assert at.value == pytest.approx((rows[0].mean() + rows[1].mean()) / 2)
    # The bootstrap's variance of a mean is known: population variance over n.
    deviation = math.sqrt(sum(r.var() / len(r) for r in rows)) / 2
    for limit, sign in ((at.low, -1), (at.high, 1)):
        assert limit - at.value == pytest.approx(sign * 1.96 * deviation, rel=0.05)


def test_pairing_helps_where_rows_differ_more_than_adapters():
    random = np.random.default_rng(2)
    hard = random.normal(0, 3, 200)
    a, b = hard + random.normal(0.2, 0.3, 200), hard + random.normal(0, 0.3, 200)
    assert paired_bootstrap([a - b], seed=0).low > 0
    unpaired = [random.permutation(a) - random.permutation(b)]
    assert paired_bootstrap(unpaired, seed=0).low < 0


def test_equal_differences_have_no_width_and_a_seed_decides_the_rest():
    at = paired_bootstrap([[0.5] * 7, [1.0] * 3], seed=0, draws=100)
    assert (at.value, at.low, at.high) == pytest.approx((0.75, 0.75, 0.75))
    rows = [np.sqrt(np.arange(90.0))]
    assert paired_bootstrap(rows, seed=1) == paired_bootstrap(rows, seed=1)
    assert paired_bootstrap(rows, seed=1) != paired_bootstrap(rows, seed=2)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(4)
    held = 0
    for trial in range(300):
        at = paired_bootstrap([random.normal(0.2, 1, 60)], seed=trial, draws=500)
        held += at.low <= 0.2 <= at.high
    assert wilson(held, 300, 0.999).low < 0.95 < wilson(held, 300, 0.999).high


def test_seeds_that_differ_widen_the_interval_as_their_variance_says():
    random = np.random.default_rng(5)
    shifts = random.normal(0, 1, 8)
    rows = [[random.normal(shift, 1, 100)] for shift in shifts]
    at = seeded_bootstrap(rows, seed=0, draws=20_000)
    means = np.array([clients[0].mean() for clients in rows])
    within = np.mean([clients[0].var() / 100 for clients in rows]) / 8
    deviation = math.sqrt(means.var() / 8 + within)
    assert at.value == pytest.approx(means.mean())
    # Eight seeds: the bootstrap's distribution is not quite normal.
    assert (at.high - at.low) / 2 == pytest.approx(1.96 * deviation, rel=0.08)
    pooled = paired_bootstrap([np.concatenate([c[0] for c in rows])], seed=0)
    assert pooled.high - pooled.low < 0.6 * (at.high - at.low)


def test_crossed_rows_count_once_and_not_once_a_seed():
    random = np.random.default_rng(6)
    row_effect = random.normal(0, 1, 50)
    same = np.tile(row_effect, (20, 1))  # twenty seeds, no new row
    at = crossed_bootstrap(same, seed=0)
    alone = paired_bootstrap([row_effect], seed=0)
    assert at.high - at.low == pytest.approx(alone.high - alone.low, rel=0.05)
    nested = seeded_bootstrap([[row] for row in same], seed=0)
    assert nested.high - nested.low < 0.4 * (at.high - at.low)


@pytest.mark.parametrize("rows", [[], [[]], [[1.0, math.nan]], [[[1.0]]]])
def test_differences_that_are_none_are_refused(rows):
    with pytest.raises(ValueError, match="expected"):
        paired_bootstrap(rows, seed=0)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="same clients"):
        seeded_bootstrap([[[1.0]], [[1.0], [2.0]]], seed=0)
    with pytest.raises(ValueError, match=r"\[S, R\]"):
        crossed_bootstrap([1.0, 2.0], seed=0)
    with pytest.raises(ValueError, match="same rows twice"):
        mcnemar([1, 0], [1])
    with pytest.raises(ValueError, match="confidence level 95"):
        paired_bootstrap([[1.0, 2.0]], seed=0, level=95)


@given(st.lists(st.floats(0, 1), max_size=9))
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(p):
    adjusted = holm(p)
    for one, mine in zip(p, adjusted, strict=True):
        assert one <= mine <= min(1.0, len(p) * one)
    ranked = sorted(zip(p, adjusted, strict=True))
    assert [a for _, a in ranked] == sorted(adjusted)
