# SPDX-License-Identifier: Apache-2.0
"""FAAST's Eq. 14 by hand, and that it is not the least-squares solution."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.rules.paper_bank import PaperBank, averaged
from fedloom.rules.solving import naive_solve, solve
from fedloom.rules.statistics import Gram


def column(*numbers):
    return np.array(numbers, dtype=np.float64)[:, None]


def test_two_chunks_with_a_discount_and_a_left_over_by_hand():
    """One-dimensional pairs, so each chunk's solution is ``sum k v / sum k k``."""
    bank = PaperBank(alpha=1.0, capacity=4, chunk=2, discount=0.5)
    bank.add(column(1, 1, 2), column(2, 4, 2))
    bank.add(column(1, 1, 1), column(5, 7, 6))  # six in: the oldest two are solved
    # chunk (1,1)->(2,4): W = 3, N_0 = 2. Left: (2,1,1,1)->(2,5,7,6): W_c = 22/7, N_c = 4.
    share = 4 / (0.5 * 2 + 4)
    assert bank.weights().item() == pytest.approx((1 - share) * 3 + share * 22 / 7)
    bank.add(column(1), column(0))  # five: one more chunk, (2,1)->(2,5): W_c = 9/5
    share = 2 / (0.5 * 2 + 2)
    solved, seen = (1 - share) * 3 + share * 9 / 5, 0.5 * 2 + 2
    share = 3 / (0.5 * seen + 3)  # left: (1,1,1)->(7,6,0)
    assert bank.weights().item() == pytest.approx((1 - share) * solved + share * 13 / 3)


def test_reading_changes_nothing():
    bank = PaperBank(capacity=2, chunk=1)
    bank.add(column(1, 2, 3), column(1, 1, 1))
    assert bank.weights() == bank.weights()


def test_in_one_bank_it_is_the_solution_and_in_chunks_it_is_not():
    random = np.random.default_rng(0)
    keys, values = random.normal(size=(64, 5)) * [1, 2, 3, 4, 5], random.normal(size=(64, 2))
    exact = solve(Gram.of(keys, values), alpha=2.0).weights
    whole, chunks = PaperBank(alpha=2.0), PaperBank(alpha=2.0, capacity=16, chunk=16)
    for bank in (whole, chunks):
        bank.add(keys, values)
    assert whole.weights() == pytest.approx(exact, abs=1e-10)
    assert np.abs(chunks.weights() - exact).max() > 1e-3
    parts = [
        (naive_solve(keys[i : i + 16], values[i : i + 16], alpha=2.0), 16) for i in (0, 16, 32, 48)
    ]
    assert averaged(parts) == pytest.approx(chunks.weights(), abs=1e-12)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="empty bank"):
        PaperBank().weights()
    with pytest.raises(ValueError, match="chunk 9"):
        PaperBank(capacity=8, chunk=9)
    with pytest.raises(ValueError, match="nothing to average"):
        averaged([])
