from __future__ import annotations

import numpy as np
import pytest

from fedloom.rules import ProductGap
from fedloom.wire import Update


def clients(seed: int, count: int):
    random = np.random.default_rng(seed)
    for _ in range(count):
        a, b = random.normal(size=(3, 20)), random.normal(size=(30, 3))
        yield int(random.integers(1, 90)), a, b


def update(weight, a, b) -> Update:
    return Update.of({"m.lora_A.weight": a, "m.lora_B.weight": b, "gate": np.zeros(2)}, weight)


@pytest.mark.parametrize("seed", range(3))
def test_estimate_is_the_dense_gap_within_its_own_error(seed):
    gap = ProductGap(seed=1, probes=2000)
    weights, factors, products = [], [], []
    for weight, a, b in clients(seed, 4):
        gap.add(update(weight, a, b))
        weights.append(weight)
        factors.append((a, b))
        products.append(b @ a)
    w = np.array(weights) / sum(weights)
    mean = sum(x * p for x, p in zip(w, products, strict=True))
    a, b = (sum(x * f[i] for x, f in zip(w, factors, strict=True)) for i in (0, 1))
    dense = np.linalg.norm(mean - b @ a) / np.linalg.norm(mean)
    # 2000 probes: 2 * sqrt(2 / 2000) on the square, half of it on the norm, for each of two norms
    assert gap.relative() == pytest.approx(dense, rel=0.06)


def test_equal_factors_leave_no_gap_and_one_client_neither():
    (_, a, b), *_ = clients(0, 1)
    gap = ProductGap(seed=0)
    passed = list(gap.watch(update(n, a, b) for n in (3, 5)))
    assert [u.weight for u in passed] == [3, 5]
    assert gap.relative() < 1e-12
    assert ProductGap(seed=0).relative() == 0.0
