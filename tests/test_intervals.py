# SPDX-License-Identifier: Apache-2.0
"""Intervals against printed tables and closed forms."""

import math

import pytest

from fedloom.intervals import Interval, macro, mean_interval, t_critical, wilson, worst_decile

# Two-sided critical values as printed in tables of Student's t (level, degrees of freedom).
TABLE = {
    (0.95, 1): 12.7062,
    (0.95, 2): 4.3027,
    (0.95, 5): 2.5706,
    (0.95, 11): 2.2010,
    (0.95, 30): 2.0423,
    (0.95, 120): 1.9799,
    (0.90, 10): 1.8125,
    (0.99, 1): 63.6567,
    (0.99, 7): 3.4995,
    (0.999, 3): 12.9240,
}


@pytest.mark.parametrize(("level", "df"), TABLE)
def test_t_is_the_table(level, df):
    assert t_critical(level, df) == pytest.approx(TABLE[level, df], abs=5.1e-5)


@pytest.mark.parametrize("level", [0.001, 0.5, 0.9, 0.95, 0.999])
def test_t_is_the_closed_form_where_there_is_one(level):
    assert t_critical(level, 1) == pytest.approx(math.tan(math.pi * level / 2), rel=1e-12)
    closed = level * math.sqrt(2 / (1 - level**2))
    assert t_critical(level, 2) == pytest.approx(closed, rel=1e-12)


def test_t_falls_towards_the_normal_quantile_without_a_step_where_the_formula_changes():
    values = [t_critical(0.95, df) for df in (10, 1000, 99_999, 100_001, 10**9)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1.959963985, abs=1e-8)
    assert values[2] == pytest.approx(values[3], rel=1e-8)


@pytest.mark.parametrize(("level", "df"), [(0, 3), (1, 3), (math.nan, 3), (0.95, 0)])
def test_t_refuses_what_has_no_quantile(level, df):
    with pytest.raises(ValueError, match="expected"):
        t_critical(level, df)


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (3, 12, 0.0889, 0.5323),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_is_the_published_interval(correct, n, low, high):
    at = wilson(correct, n)
    assert (at.low, at.high) == pytest.approx((low, high), abs=5.1e-5)
    assert at.value == correct / n


def test_wilson_limits_solve_wilsons_equation():
    at, z = wilson(7, 40, level=0.9), 1.6448536269514722
    for p in (at.low, at.high):
        assert abs(7 / 40 - p) == pytest.approx(z * math.sqrt(p * (1 - p) / 40), rel=1e-12)


def test_wilson_is_symmetric_and_bounded():
    few, many = wilson(0, 9), wilson(9, 9)
    assert few.low == 0
    assert many.high == 1
    assert few.high == pytest.approx(1 - many.low)


@pytest.mark.parametrize(("correct", "n"), [(-1, 4), (5, 4), (0, 0)])
def test_wilson_refuses_impossible_counts(correct, n):
    with pytest.raises(ValueError, match="expected"):
        wilson(correct, n)


def test_mean_from_sums_is_the_mean_from_values():
    values = [1.2, 0.4, 3.3, 2.1, 0.9]
    mean = sum(values) / 5
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 4)
    at = mean_interval(sum(values), sum(v * v for v in values), 5)
    assert at.value == pytest.approx(mean)
    assert at.high - at.value == pytest.approx(2.776445 * deviation / math.sqrt(5), rel=1e-6)
    assert at.value - at.low == pytest.approx(at.high - at.value)


def test_mean_of_equal_values_has_no_width_and_of_one_value_no_limit():
    value = 0.1  # 3 * 0.1 * 0.1 and 0.3 * 0.3 / 3 round differently
    assert mean_interval(3 * value, 3 * value * value, 3).high == pytest.approx(value, abs=1e-7)
    assert mean_interval(2.0, 4.0, 1) == Interval(2.0, -math.inf, math.inf)


def test_mean_without_squares_has_no_interval():
    at = mean_interval(6.0, math.nan, 3)
    assert at.value == 2
    assert math.isnan(at.low)
    assert math.isnan(at.high)


def test_mean_refuses_no_value():
    with pytest.raises(ValueError, match="at least 1"):
        mean_interval(0.0, 0.0, 0)


def test_macro_adds_variances_on_each_side():
    at = macro([Interval(1.0, 0.7, 1.1), Interval(3.0, 2.6, 3.0)])
    assert (at.value, at.low, at.high) == pytest.approx((2.0, 2.0 - 0.25, 2.0 + 0.05))


def test_macro_of_equal_clients_shrinks_with_the_root_of_their_number():
    one = wilson(5, 20)
    four = macro([one] * 4)
    assert four.value - four.low == pytest.approx((one.value - one.low) / 2)
    assert macro([one]).high == pytest.approx(one.high)


def test_macro_keeps_an_unbounded_client_unbounded_and_refuses_none():
    assert macro([Interval(1.0, 0.5, 1.5), Interval(1.0, -math.inf, math.inf)]).high == math.inf
    with pytest.raises(ValueError, match="at least one"):
        macro([])


def test_the_worst_tenth_is_one_client_at_least():
    values = [0.5, 0.1, 0.9, 0.3]
    assert worst_decile(values, lowest=True) == (0.1, (1,))
    assert worst_decile(values, lowest=False) == (0.9, (2,))
    many = [float(i) for i in range(25)]
    assert worst_decile(many, lowest=True) == (1.0, (0, 1, 2))
    assert worst_decile(many, lowest=False) == (23.0, (24, 23, 22))
    with pytest.raises(ValueError, match="at least one"):
        worst_decile([], lowest=True)
