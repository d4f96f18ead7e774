from __future__ import annotations

import numpy as np
import pytest

from fedloom import border
from fedloom.errors import Refusal
from fedloom.strategies.budget import FRAMING, Budget, coded_bytes
from fedloom.strategies.journal import Journal
from fedloom.wire import Manifest


def spent(*counts: int) -> Journal:
    journal = Journal()
    for count in counts:
        journal._append("ledger", {"round": 1, "phase": "train", "direction": "up",
                                   "partition": 0, "dtype": "float32", "bytes": count})  # fmt: skip
    return journal


def test_without_a_limit_no_round_is_over():
    budget = Budget(0, 3, spent(10**12))
    assert not any(budget.is_over(r, lambda _: 10**12) for r in (1, 2, 3))
    assert budget.final == 3


def test_the_last_round_is_known_before_it_begins():
    journal = spent(0)
    budget = Budget(250, 5, journal)
    for r in (1, 2):
        assert not budget.is_over(r, lambda _: 100)
        journal.rows["ledger"][0]["bytes"] += 100
        journal.metric(round=r, phase="train")
    assert budget.final == 2  # said when round 2 began, so that it is scored as the last
    assert budget.is_over(3, lambda _: 100)
    assert budget.is_over(4, lambda _: 100)
    assert "byte budget: round 3 of 5" in budget.reason
    assert [e["event"] for e in journal.rows["events"]] == ["stopped"]


def test_a_budget_that_pays_for_no_round_is_refused():
    with pytest.raises(Refusal, match="one round takes up to 100 B and 200 B are spent"):
        Budget(250, 5, spent(200)).is_over(1, lambda _: 100)


@pytest.mark.parametrize("code", ["float32", "bfloat16", "int8", "int4"])
def test_a_replys_bytes_are_known_in_advance(code):
    random = np.random.default_rng(0)
    arrays = {"w": random.normal(size=(9, 30)).astype(np.float32), "v": np.zeros(3)}
    manifest = Manifest.of(arrays, method="m", version="1", base="b", tokenizer="t")
    counts = border.wire_bytes(border.content(border.pack_parcel(arrays, code)))
    framing = counts.pop("framing")
    assert sum(counts.values()) == coded_bytes(manifest, code)
    assert framing < FRAMING
