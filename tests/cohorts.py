"""Cohorts of made-up low-rank contributions, and the dense target that only tests may form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from fedloom import rules
from fedloom.rules import Factors, LowRankUpdate
from fedloom.wire import arrays_digest

SHAPES = {"layer.q": (12, 9), "layer.v": (5, 9)}


# float64 rounds to 1e-16 and a product of factors loses about as many digits as it cancels; the
# float32 bound is what the benchmark promises.
TIGHT, SINGLE = 1e-12, 1e-6


DTYPES = pytest.mark.parametrize(("dtype", "bound"), [("float64", TIGHT), ("float32", SINGLE)])


def names(module: str) -> tuple[str, str]:
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def contribution(random, client: int, rank: int, dtype="float64", shapes=SHAPES) -> LowRankUpdate:
    arrays = {"layer.gate": random.normal(size=4).astype(dtype)}
    for module, (out, inner) in shapes.items():
        a, b = names(module)
        arrays[a] = random.normal(size=(rank, inner)).astype(dtype)
        arrays[b] = random.normal(size=(out, rank)).astype(dtype)
    alpha = float(random.uniform(1, 40))  # never the rank, never the same twice
    return LowRankUpdate(arrays, float(random.integers(1, 500)), alpha / rank, client)


def cohort(seed: int, ranks: list[int], dtype="float64") -> list[LowRankUpdate]:
    random = np.random.default_rng(seed)
    return [contribution(random, client, rank, dtype) for client, rank in enumerate(ranks)]


def frozen(clients: list[LowRankUpdate], side: str) -> list[LowRankUpdate]:
    """Give everybody the first client's A or B."""
    held = {n: x for n, x in clients[0].arrays.items() if f"lora_{side}" in n}
    return [replace(c, arrays={**c.arrays, **held}) for c in clients]


def dense(clients: list[LowRankUpdate]) -> dict[str, np.ndarray]:
    """``D``, from its definition."""
    weight = sum(c.weight for c in clients)
    out = {}
    for module in clients[0].modules():
        a, b = names(module)
        out[module] = sum(
            c.weight / weight * c.scale * c.arrays[b].astype("f8") @ c.arrays[a].astype("f8")
            for c in clients
        )
    return out


def product(factors: Factors) -> np.ndarray:
    return factors.b.astype("f8") @ factors.a.astype("f8")


def off(made: dict[str, Factors], wanted: dict[str, np.ndarray]) -> float:
    gap = sum(np.square(product(made[m]) - d).sum() for m, d in wanted.items())
    return float(np.sqrt(gap / sum(np.square(d).sum() for d in wanted.values())))


def same_bits(one: rules.Aggregate, other: rules.Aggregate) -> bool:
    return arrays_digest(one.arrays) == arrays_digest(other.arrays)


seeds_ = st.integers(0, 2**32)


mixed = st.lists(st.integers(1, 7), min_size=1, max_size=6)


equal = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda kr: [kr[1]] * kr[0])


quick = settings(max_examples=25, deadline=None)


def every_rule(clients: list[LowRankUpdate], rank: int) -> dict[str, rules.Aggregate]:
    made = {
        "stack": rules.stack(clients),
        "svd": rules.svd_refactor(clients, rank, 1.5)[0],
        "flex": rules.flex(clients)[clients[0].client][0],
        "fedit": rules.fedit(clients, 1.5)[0],
        "fedex": rules.fedex(clients, 1.5),
    }
    for side, number in (("A", 1), ("B", 2)):
        made[f"rolora {side}"] = rules.rolora(frozen(clients, side), number, 1.5)
    return made
