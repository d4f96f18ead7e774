# SPDX-License-Identifier: Apache-2.0
"""What is in a total went in once, and comes out whole or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import Refusal
from fedloom.rules.averaging import total
from fedloom.rules.revisions import Contributions
from fedloom.wire import Update, arrays_digest


def sums(partition: int, seed: int = 0, count: int = 9) -> Update:
    random = np.random.default_rng([seed, partition])
    # Sizes far apart: what rounding takes from plain sums does not come back by subtracting.
    return Update.summed({"gram": random.normal(size=6) * 10.0 ** random.integers(-8, 8)}, count, 0)


def held(*partitions: int) -> Contributions:
    made = Contributions()
    for partition in partitions:
        made.add(partition, 1, sums(partition))
    return made


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_deleting_is_never_having_been_there(order, gone):
    made = held(*order)
    for partition in order[:gone]:
        made.delete(partition, 1, sums(partition))
    left = total(sums(p) for p in sorted(order[gone:]))
    assert arrays_digest(made.total.whole()) == arrays_digest(left.whole())
    assert made.total.weight == left.weight
    assert sorted(made) == sorted(order[gone:])


def test_a_later_revision_takes_the_place_of_the_earlier():
    made = held(1, 2)
    made.add(1, 3, sums(1, seed=7, count=4), sums(1))
    wanted = sums(1, seed=7, count=4) + sums(2)
    assert arrays_digest(made.total.whole()) == arrays_digest(wanted.whole())
    assert (made[1].revision, made[1].count, made.total.weight) == (3, 4, 13)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda c: c.add(1, 2, sums(1)), "added before, as its own revision 1"),
        (lambda c: c.add(3, 1, sums(2)), "added before, as client 2's revision 1"),
        (lambda c: c.add(1, 1, sums(1, seed=5), sums(1)), "need a higher revision"),
        (lambda c: c.add(4, 0, sums(4)), "expected 1 or above"),
        (lambda c: c.add(1, 2, sums(1, seed=5)), "were not kept"),
        (lambda c: c.add(1, 2, sums(1, seed=5), sums(2)), "not its sums of revision 1"),
        (lambda c: c.delete(1, 2, sums(1)), "revision 1 is; nothing was deleted"),
        (lambda c: c.delete(3, 1, sums(3)), "expected one of 1, 2"),
        (lambda c: c.delete(1, 1, sums(2)), "not its sums"),
        (lambda c: c.delete(1, 1, sums(1, count=8)), "not its sums"),
        (lambda c: c.delete(1, 1, None), "were not kept"),
    ],
)
def test_what_would_make_the_ledger_lie_is_refused_and_changes_nothing(act, said):
    made = held(1, 2)
    before = arrays_digest(made.total.whole()), made.to_tree()
    with pytest.raises(Refusal, match=said):
        act(made)
    assert (arrays_digest(made.total.whole()), made.to_tree()) == before


def test_a_deleted_client_comes_back_with_a_higher_revision_only():
    made = held(1, 2)
    made.delete(1, 1, sums(1))
    assert [made.is_news(1, r) for r in (1, 2)] == [False, True]
    with pytest.raises(Refusal, match="revision 1 was deleted; it may join again"):
        made.add(1, 1, sums(1, seed=3))
    read = Contributions.from_tree(made.total, made.to_tree(), made.gone_tree())
    for one in (made, read):
        one.add(1, 2, sums(1))
        assert arrays_digest(one.total.whole()) == arrays_digest(held(1, 2).total.whole())
        assert (sorted(one), one.gone) == ([1, 2], {1: 1})
        assert [one.is_news(p, 2) for p in (1, 2, 3)] == [False, True, True]
        one.delete(1, 2, sums(1))
        assert one.gone == {1: 2}


def test_the_last_client_is_not_deleted_into_nothing():
    with pytest.raises(Refusal, match="the only one"):
        held(1).delete(1, 1, sums(1))
    with pytest.raises(ValueError, match="nothing to solve"):
        _ = Contributions().total


def test_the_ledger_survives_json():
    made = held(1, 2, 11)
    read = Contributions.from_tree(made.total, json.loads(json.dumps(made.to_tree())))
    assert read.to_tree() == made.to_tree()
    read.delete(11, 1, sums(11))
    assert sorted(read) == [1, 2]
