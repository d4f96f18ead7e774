# SPDX-License-Identifier: Apache-2.0
"""How sums travel, without a run: what a recipe may ask for, and what rounding does to a total."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.config import FaastConfig
from fedloom.errors import Refusal
from fedloom.rules.admission import check_sums
from fedloom.rules.fixed_point import decode, encode, rounding_bound
from fedloom.rules.reading import unit
from fedloom.rules.statistics import Gram


def test_a_total_may_be_off_by_its_rounding_and_no_further():
    """Few rows in many directions: rounding to 2^-24 leaves eigenvalues below zero."""
    keys = unit(np.random.default_rng(0).normal(size=(5, 24)))
    gram = Gram.of(keys, np.eye(5))
    rounded = {n: decode(encode(a, 24), 24) for n, a in gram.arrays().items()}
    total = Gram.from_arrays(rounded, gram.count)
    with pytest.raises(Refusal, match="eigenvalue"):
        check_sums(total, "one client", rows=5)
    check_sums(total, "all", rows=5, rounding=rounding_bound(1, 24))
    with pytest.raises(Refusal, match="eigenvalue"):
        check_sums(total, "all", rows=5, rounding=rounding_bound(1, 40))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shares": "veiled"}, "expected one of sums, masked"),
        ({"epsilon": 1.0}, "that adds no noise"),
        ({"shares": "masked", "epsilon": 1.0}, "that adds no noise"),
        ({"shares": "masked", "protects": "client"}, "that adds no noise"),
        ({"shares": "private"}, "an epsilon above 0"),
        ({"shares": "private", "epsilon": 1.0, "delta": 0.0}, "a delta between 0 and 1"),
        ({"shares": "masked", "threshold": 0.5}, "expected above 0.5"),
        ({"shares": "masked", "threshold": 1.0}, "below 1"),
        ({"shares": "masked", "bits": 60}, "expected 24 to 52"),
        ({"shares": "masked", "keep_sums": True}, "the leaver would have to send its own again"),
        ({"shares": "private", "epsilon": 1.0, "keep_sums": True}, "release the same rows again"),
        (
            {"shares": "private", "epsilon": 1.0, "values": "labels", "priors": "0,100"},
            "chosen by exact scores of training rows, which no noise covers; set one prior",
        ),
        ({"shares": "private", "epsilon": 1.0, "protects": "client"}, "a bound above 0"),
        ({"shares": "private", "epsilon": 1.0, "client_bound": 5.0}, "none for rows"),
        ({"shares": "private", "epsilon": 1.0, "protects": "shop"}, "expected one of row, client"),
    ],
)
def test_contradictions_are_refused_in_one_line(given, says):
    with pytest.raises(Refusal, match=says) as refused:
        FaastConfig(**given)
    assert "\n" not in str(refused.value)
