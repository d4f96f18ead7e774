"""Laws of a choice: limits hold, nothing better fits, more room never hurts, order is nothing."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fedloom.errors import Refusal
from fedloom.intervals import Interval
from fedloom.refining.selection import DIMINISH, Budget, Candidate, cache_ways, select
from fedloom.slices.quantise import SCHEMES, layer_bytes

TASK = "law"
WIDTHS = {"bf16": 2.0, "int8": 1.03, "int4": 0.56}


def drawn(seed: int, senders: int = 4) -> tuple[list[Candidate], Budget]:
    """Senders with caches in three precisions and a message, on links of all kinds."""
    random = np.random.default_rng(seed)
    made, bandwidth = [], {}
    for i in range(senders):
        name = f"sender-{i}"
        bandwidth[name] = float(10 ** random.uniform(4.5, 8))
        gain, half = random.normal(0.05, 0.05), random.uniform(0, 0.06)
        told = {
            "prefill": float(random.uniform(50, 500)),
            "trust": int(random.integers(0, 3)),
            "memory": float(random.uniform(1, 9) * 1e6),
        }
        for way, width in WIDTHS.items():
            loss = random.uniform(0, 0.01)
            gains = {TASK: Interval(gain - loss, gain - loss - half, gain - loss + half)}
            fuse = float(random.uniform(200, 2000))
            made.append(
                Candidate(
                    sender=name, way=way, gains=gains, token_bytes=6144 * width, fuse=fuse, **told
                )
            )
        gains = {TASK: Interval(gain / 3, gain / 3 - half, gain / 3 + half)}
        made.append(
            Candidate(
                sender=name,
                way="text",
                gains=gains,
                token_bytes=0.0,
                fixed_bytes=320.0,
                decode_seconds=float(random.uniform(1, 9)),
                **told,
            )
        )
    budget = Budget(
        tokens=128,
        bandwidth=bandwidth,
        rtt={"any": 0.02},
        deadline=float(random.uniform(0.5, 12)),
        memory=float(random.uniform(2, 25) * 1e6),
        privacy=int(random.integers(0, 2)),
        cautious=bool(random.integers(2)),
    )
    return made, budget


def brute_force(candidates: list[Candidate], budget: Budget) -> float:
    """Try every set, written apart from the module's arithmetic."""
    best = 0.0
    senders = sorted({c.sender for c in candidates})
    ways = [[None, *(c for c in candidates if c.sender == s)] for s in senders]
    for picked in itertools.product(*ways):
        took = [c for c in picked if c is not None]
        if took and fits(took, budget):
            gains = sorted((worth(c, budget) for c in took), reverse=True)
            best = max(best, sum(g * DIMINISH**k for k, g in enumerate(gains)))
    return best


def worth(candidate: Candidate, budget: Budget) -> float:
    gain = candidate.gains[TASK]
    return gain.low if budget.cautious else gain.value


def fits(took: list[Candidate], budget: Budget) -> bool:
    come, work = 0.0, 0.0
    for c in took:
        if c.trust < budget.privacy or worth(c, budget) <= 0 or not budget.bandwidth[c.sender]:
            return False
        bits = 8 * (c.fixed_bytes + c.token_bytes * budget.tokens)
        at = budget.tokens / c.prefill + c.decode_seconds + bits / budget.bandwidth[c.sender]
        come = max(come, budget.rtt.get("any", 0.0) + at)
        work += budget.tokens / c.fuse
    memory = sum(c.memory for c in took)
    return budget.own_seconds + come + work <= budget.deadline and memory <= budget.memory


@pytest.mark.parametrize("seed", range(60))
def test_nothing_better_fits_and_no_limit_is_broken(seed):
    candidates, budget = drawn(seed)
    decision = select(candidates, budget, TASK)
    assert decision.exact
    assert decision.value == pytest.approx(brute_force(candidates, budget), abs=1e-12)
    took = list(decision.chosen)
    assert len({c.sender for c in took}) == len(took)
    assert not took or fits(took, budget)
    assert decision.seconds <= budget.deadline or not took
    assert all(c.gains[TASK].high > 0 for c in took)


@pytest.mark.parametrize("seed", range(30))
def test_more_bandwidth_never_lowers_the_value(seed):
    candidates, budget = drawn(seed)
    values = []
    for factor in (0.0, 0.05, 0.3, 1.0, 4.0, 100.0):
        links = {name: factor * x for name, x in budget.bandwidth.items()}
        values.append(select(candidates, replace(budget, bandwidth=links), TASK).value)
    assert values == sorted(values)
    assert values[0] == 0


@pytest.mark.parametrize("seed", range(20))
def test_more_of_anything_never_lowers_the_value(seed):
    candidates, budget = drawn(seed)
    value = select(candidates, budget, TASK).value
    for more in ({"deadline": budget.deadline * 2}, {"memory": math.inf}, {"privacy": 0}):
        assert select(candidates, replace(budget, **more), TASK).value >= value
    assert select(candidates[:-4], budget, TASK).value <= value


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_candidates_is_irrelevant(seed):
    candidates, budget = drawn(seed)
    decision = select(candidates, budget, TASK)
    shuffled = [candidates[i] for i in np.random.default_rng(seed).permutation(len(candidates))]
    assert select(shuffled, budget, TASK) == decision


def test_equals_are_told_apart_by_name_not_by_luck():
    one = Candidate(sender="b", way="int8", gains={"any": Interval(0.1, 0.1, 0.1)}, token_bytes=9)
    two = replace(one, sender="a")
    budget = Budget(tokens=1, bandwidth={"any": 1e9}, deadline=1, senders=1)
    for order in ([one, two], [two, one]):
        assert select(order, budget, TASK).chosen == (two,)
    twin = replace(two, way="bf16")  # the same in all but name
    assert select([twin, two], budget, TASK).chosen == (twin,)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_those_that_the_wire_takes(scheme):
    """Counted here without torch, there by the format: they must not drift apart."""
    (made,) = cache_ways("s", {scheme: {}}, layers=24, heads=2, dim=64, trust=2, memory=9.0)
    assert made.token_bytes * 256 == 24 * layer_bytes(scheme, 2, 256, 64)
    assert (made.way, made.trust, made.memory) == (scheme, 2, 9.0)
    with pytest.raises(Refusal, match="expected some of bf16, int8, int4"):
        cache_ways("s", {"int2": {}}, layers=1, heads=1, dim=1)


def ladder(bandwidth: float) -> str:
    """One sender whose cache helps more than its text, on a worse and worse link."""
    cache = Candidate(
        sender="s", way="bf16", gains={"any": Interval(0.1, 0.06, 0.14)}, token_bytes=12288.0
    )
    small = replace(cache, way="int4", gains={"any": Interval(0.09, 0.05, 0.13)}, token_bytes=3e3)
    text = replace(
        cache,
        way="text",
        gains={"any": Interval(0.05, 0.02, 0.08)},
        token_bytes=0.0,
        fixed_bytes=300.0,
        decode_seconds=1.0,
    )
    budget = Budget(tokens=128, bandwidth={"any": bandwidth}, deadline=2.0)
    decision = select([cache, small, text], budget, TASK)
    return decision.chosen[0].way if decision.chosen else decision.way


def test_a_worse_link_goes_from_cache_to_text_to_none():
    assert [ladder(b) for b in (1e8, 2e6, 1e5, 1e3, 0.0)] == [
        "bf16",
        "int4",
        "text",
        "none",
        "none",
    ]


@pytest.mark.parametrize("cautious", [True, False])
def test_who_is_shown_to_harm_is_never_asked(cautious):
    harm = Candidate(
        sender="s", way="int8", gains={"any": Interval(-0.05, -0.09, -0.01)}, token_bytes=1
    )
    budget = Budget(tokens=9, bandwidth={"any": 1e9}, deadline=9, cautious=cautious)
    assert select([harm], budget, TASK).chosen == ()
    unsure = replace(harm, gains={"any": Interval(0.02, -0.03, 0.07)})
    assert bool(select([unsure], budget, TASK).chosen) is not cautious


def test_the_log_says_all_of_it_in_json():
    candidates, budget = drawn(3)
    budget = replace(budget, privacy=0, cautious=False, deadline=30.0, memory=math.inf)
    unknown = replace(candidates[0], sender="new", gains={"poetry": Interval(0.1, 0.0, 0.2)})
    decision = select([*candidates, unknown], budget, TASK)
    told = json.loads(json.dumps(decision.log, allow_nan=False))
    rows = {(row["sender"], row["way"]): row for row in told["candidates"]}
    assert len(rows) == len(candidates) + 2
    assert {key for key, row in rows.items() if row["taken"]} == {
        (c.sender, c.way) for c in decision.chosen
    }
    assert all(row["why"] for row in rows.values())
    assert "nothing is known" in rows["new", "bf16"]["why"]
    assert not rows["none", "none"]["taken"]
    assert (told["task"], told["budget"]["tokens"]) == (TASK, 128)


def test_a_search_that_is_cut_short_says_so_and_still_fits(monkeypatch):
    monkeypatch.setattr("fedloom.refining.selection.NODES", 4)
    candidates, budget = drawn(5, senders=7)
    budget = replace(budget, privacy=0, cautious=False, deadline=8.0)
    decision = select(candidates, budget, TASK)
    assert not decision.exact
    assert not decision.chosen or fits(list(decision.chosen), budget)


def test_what_makes_no_sense_is_refused():
    good = Candidate(sender="s", way="int8", gains={}, token_bytes=1)
    with pytest.raises(Refusal, match="comes twice by int8"):
        select([good, good], Budget(tokens=1, bandwidth={}, deadline=1), TASK)
    with pytest.raises(Refusal, match="above 0"):
        replace(good, prefill=0.0)
    with pytest.raises(Refusal, match="nothing below 0"):
        Budget(tokens=1, bandwidth={"any": -1.0}, deadline=1)
