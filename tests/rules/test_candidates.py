# SPDX-License-Identifier: Apache-2.0
"""Few rows are solved from themselves: the same weights, from a smaller factorisation."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.rules.candidates import candidates, candidates_of_rows
from fedloom.rules.reading import one_hot, unit
from fedloom.rules.statistics import Gram

from fast import off

ALPHAS = (0.2, 0.5, 1.0)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("rows", [2, 9, 31])
@pytest.mark.parametrize("repeated", [False, True])
def test_few_rows_give_the_weights_of_their_sums(rows, ridge, repeated, monkeypatch):
    random = np.random.default_rng(rows)
    keys, labels = unit(random.normal(size=(rows, 32)) + 1), random.integers(3, size=rows)
    if repeated:
        keys[rows // 2 :] = keys[: rows - rows // 2]
    values, sizes, eigh = one_hot(labels, 3), [], np.linalg.eigh
    wanted = [found.weights for found in candidates(Gram.of(keys, values), ALPHAS, ridge)]
    monkeypatch.setattr(np.linalg, "eigh", lambda m: sizes.append(len(m)) or eigh(m))
    found = candidates_of_rows(keys, values, ALPHAS, ridge)
    assert sizes == [rows]  # one for all filters
    for mine, theirs in zip(found, wanted, strict=True):
        assert off(mine, theirs) < 1e-9


def test_rows_of_zeros_remember_nothing():
    found = candidates_of_rows(np.zeros((4, 9)), np.eye(4), (0.5,))
    assert not found[0].any()
