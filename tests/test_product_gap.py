from __future__ import annotations

import numpy as np
import pytest

from fedloom.rules import Factors, ProductGap
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
    assert gap.relative({"m": Factors(b, a)}) == pytest.approx(dense, rel=0.06)


def test_equal_factors_leave_no_gap_and_one_client_neither():
    (_, a, b), *_ = clients(0, 1)
    gap = ProductGap(seed=0)
    passed = list(gap.watch(update(n, a, b) for n in (3, 5)))
    assert [u.weight for u in passed] == [3, 5]
    assert gap.relative({"m": Factors(b, a)}) < 1e-12
    assert ProductGap(seed=0).relative({}) == 0.0


def test_scales_ranks_and_a_factor_that_rests_are_in_the_sum():
    """A stack is D, whatever the ranks; a B alone is multiplied by the A that rests."""
    random = np.random.default_rng(0)
    scales, weights = {0: 0.5, 1: 4.0}, {0: 3, 1: 5}
    made = {
        k: (random.normal(size=(r, 20)), random.normal(size=(30, r))) for k, r in ((0, 2), (1, 3))
    }
    gap, parts = ProductGap(seed=0), []
    arrays = {k: {"m.lora_A.weight": a, "m.lora_B.weight": b} for k, (a, b) in made.items()}
    list(gap.watch((Update.of(x, weights[k], k) for k, x in arrays.items()), scales.__getitem__))
    for k, (a, b) in made.items():
        parts.append(Factors(b, a).times(weights[k] / 8 * scales[k]))
    assert gap.relative({"m": Factors.joined(parts)}) < 1e-12
    assert gap.relative({"m": parts[0]}) > 0.1

    a, b = made[0]
    still = ProductGap(seed=0, still={"m.lora_A.weight": a})
    still.add(Update.of({"m.lora_B.weight": b}, 7), 2.0)
    assert still.relative({"m": Factors(b, a).times(2.0)}) < 1e-12
