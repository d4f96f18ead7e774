"""Rounded sums are integers: whatever was added and taken out, the total is of what is in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.config import FaastConfig, RunConfig
from fedloom.errors import Refusal
from fedloom.rules.exact import check_rounded, rounded, steps
from fedloom.rules.fixed_point import decode
from fedloom.rules.revisions import Contributions
from fedloom.rules.statistics import Gram
from fedloom.wire import Update, arrays_digest

BITS = 20


def update(words: list[int], origin: int = 0) -> Update:
    array = decode(np.array(words, np.int64).view(np.uint64), BITS)
    return Update.summed({"gram": array}, 1.0, origin)


@settings(max_examples=60, deadline=None)
@given(
    # As a client's own float64 holds them: up to 2^53 steps, or whole steps of a coarser size.
    rows=st.lists(st.lists(st.integers(-(2**53), 2**53).map(lambda n: n * 2**7), min_size=3,
                           max_size=3) | st.lists(st.integers(-(2**53), 2**53), min_size=3,
                           max_size=3), min_size=2, max_size=6),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_total_is_the_integers_of_those_in_it(rows, seed):
    """Up to 2^62 steps, where float64 alone holds 2^53."""
    updates = [update(words, p) for p, words in enumerate(rows)]
    random = np.random.default_rng(seed)
    order = random.permutation(len(rows)).tolist()
    held, added = Contributions(), []
    for p in order:
        try:
            held.add(p, 1, updates[p])
            added.append(p)
        except Refusal:  # the same sums as another's
            continue
    stay = added[: int(random.integers(1, len(added) + 1))]
    for p in added[len(stay) :]:
        held.delete(p, 1, updates[p])
    (total, rest) = (held.total.sums["gram"], held.total.residue["gram"])
    wanted = np.sum([np.array(rows[p], np.int64) for p in stay], axis=0)
    assert (steps(total, rest, BITS) == wanted).all()
    fresh = Contributions()
    for p in sorted(stay):
        fresh.add(p, 1, updates[p])
    for part in ("sums", "residue"):  # and the two numbers that say it are the same
        ours, theirs = getattr(held.total, part), getattr(fresh.total, part)
        assert arrays_digest(ours) == arrays_digest(theirs)


def test_a_client_rounds_its_sums_by_half_a_step_at_most():
    random = np.random.default_rng(0)
    gram = Gram.of(random.normal(size=(50, 8)), np.eye(3)[random.integers(3, size=50)])
    made = rounded(gram, BITS)
    for name, array in made.arrays().items():
        check_rounded({name: array}, BITS, "client 0")
        assert np.abs(array - gram.arrays()[name]).max() <= 2.0 ** -(BITS + 1)
    assert made.count == gram.count
    assert (rounded(made, BITS).packed == made.packed).all()
    with pytest.raises(Refusal, match=r"client 0: array gram has numbers between multiples of 2\^"):
        check_rounded(gram.arrays(), BITS, "client 0")


def recipe(**flat) -> RunConfig:
    head = {"method": "faast", "data.task": "classes", "rounds": 1}
    return RunConfig.from_flat({**head, **flat})


def test_room_is_known_before_anything_is_asked():
    config = recipe(**{"faast.exact-bits": 40, "clients.count": 100})
    assert config.faast.exact_bits == 40
    flat = {"faast.exact-bits": 46, "clients.count": 100}
    with pytest.raises(Refusal, match=r"may sum 200000 rows.* less than 131072; set it to 45"):
        recipe(**flat)
    assert recipe(**{**flat, "faast.exact-bits": 45}).faast.exact_bits == 45
    assert recipe(**{**flat, "faast.max-count": 1000}).faast.exact_bits == 46
    FaastConfig().check_room(2.0**60, "float64 sums")
    with pytest.raises(Refusal, match="expected 1 to 52"):
        FaastConfig(exact_bits=53)
    for mode in ({"shares": "masked"}, {"shares": "private", "epsilon": 1.0}):
        with pytest.raises(Refusal, match="nobody can be taken out"):
            FaastConfig(exact_bits=40, **mode)
