"""The sum is the plain one to the bit; whoever is lost; and nothing else can be had."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom import ciphers
from fedloom.errors import Refusal
from fedloom.rules.fixed_point import BITS, limit, rounding_bound
from fedloom.secure import Collector, Keys, Summation, advertise, as_sums, decoded, from_sums
from fedloom.secure.session import unpack
from fedloom.secure.sums import WEIGHT, largest_error
from fedloom.wire import Update

from summations import RUN, Rehearsal, numbers, plain_sum, source


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def clients(count: int) -> dict[int, dict[str, np.ndarray]]:
    return {3 * i + 1: numbers(i) for i in range(count)}  # partition ids need not be 0, 1, 2


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_the_sum_is_the_plain_one_to_the_bit(count):
    parts = clients(count)
    total = Rehearsal(parts).total()
    assert same(total, plain_sum(parts.values()))
    assert largest_error(parts.values(), decoded(total, BITS)) <= rounding_bound(count)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 9))
def test_whoever_is_lost_the_sum_is_that_of_the_others(seed, count):
    """At most so many are lost, at any step, that the threshold is still there."""
    draw = random.Random(seed)
    parts = clients(count)
    threshold = count // 2 + 1
    order = draw.sample(sorted(parts), count - threshold)
    lost: dict[str, list[int]] = {"keys": [], "shares": [], "numbers": [], "unmask": []}
    for client in order:
        lost[draw.choice(sorted(lost))].append(client)
    rehearsal = Rehearsal(parts, threshold=threshold, lost_at=lost, seed=seed)
    total = rehearsal.total()
    gone = {*lost["keys"], *lost["shares"], *lost["numbers"]}
    assert rehearsal.collector.survivors() == sorted(parts.keys() - gone)
    assert same(total, plain_sum([parts[c] for c in parts if c not in gone]))


@pytest.mark.parametrize("step", ["keys", "shares", "numbers", "unmask"])
def test_below_the_threshold_there_is_no_sum(step):
    rehearsal = Rehearsal(clients(6), threshold=5, lost_at={step: [1, 4]})
    with pytest.raises(Refusal, match=r"4 clients .*(5 are|at least 5) .*needed"):
        rehearsal.total()


def test_a_client_checks_the_threshold_itself():
    rehearsal = Rehearsal(clients(6), threshold=3)
    rehearsal.keys()
    with pytest.raises(Refusal, match="a threshold of 3 for 6 clients: expected 4 to 6"):
        rehearsal.shares()


def test_one_client_is_no_sum():
    with pytest.raises(Refusal, match="1 clients gave keys, at least 2"):
        Rehearsal(clients(1)).total()


def test_what_leaves_a_client_looks_the_same_whatever_its_numbers():
    """Uniform to a chi-square over bytes, for zeros too; and no two rounds share a mask."""
    zeros = {"a": np.zeros(20_000)}
    parts = dict.fromkeys(range(3), zeros)
    first, second = Rehearsal(parts), Rehearsal(parts, server_round=2, seed=1)
    first.total()
    second.total()
    seen = [r.masked[c]["a"] for r in (first, second) for c in parts]
    seen += [a - b for i, a in enumerate(seen) for b in seen[:i]]  # masks are not reused either
    for words in seen:
        counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
        expected = words.nbytes / 256
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 6 * np.sqrt(2 * 255)


def test_pairs_of_masks_cancel_and_own_ones_do_not():
    """What the server adds up before it unmasks is as uniform as each part."""
    rehearsal = Rehearsal({c: {"a": np.zeros(5000)} for c in range(4)})
    rehearsal.keys()
    rehearsal.shares()
    rehearsal.numbers()
    raw = sum(rehearsal.masked[c]["a"] for c in range(4))
    assert len(np.unique(raw)) == raw.size
    for client in range(4):
        own = ciphers.Stream(rehearsal.sessions[client].own_seed).words(5000)
        raw = raw - own
    assert not raw.any()


@pytest.mark.parametrize("place", [0, 20, 60, -1])
def test_a_tampered_letter_is_refused(place):
    def forge(sender: int, receiver: int, letter: bytes) -> bytes:
        if (sender, receiver) != (4, 7):
            return letter
        changed = bytearray(letter)
        changed[place] ^= 0x10
        return bytes(changed)

    rehearsal = Rehearsal(clients(4))
    rehearsal.keys()
    rehearsal.shares()
    with pytest.raises(Refusal, match="client 7, from client 4: a sealed letter does not open"):
        rehearsal.numbers(forge)


def test_a_letter_to_another_or_of_another_round_does_not_open():
    old = Rehearsal(clients(4), seed=8)
    old.keys()
    old.shares()
    swapped = Rehearsal(clients(4), server_round=2, seed=8)  # even with the very same keys
    swapped.keys()
    swapped.shares()
    with pytest.raises(Refusal, match="does not open"):
        swapped.numbers(lambda s, r, x: old.collector.letters_to(r)[s])
    again = Rehearsal(clients(4), seed=8)
    again.keys()
    again.shares()
    with pytest.raises(Refusal, match="does not open"):
        again.numbers(lambda s, r, x: again.collector.letters_to(10 if r == 1 else 1).get(s, x))


def with_false_shares(false: dict[int, list[int]], lost: list[int], threshold: int) -> Rehearsal:
    """A sum up to its opening; ``false`` has who reveals falsely -> whose shares."""
    rehearsal = Rehearsal(clients(5), threshold=threshold, lost_at={"numbers": lost})
    rehearsal.keys()
    rehearsal.shares()
    rehearsal.numbers()
    survivors = rehearsal.collector.survivors()
    for client in survivors:
        _, shares = rehearsal.sessions[client].unmask(survivors)
        for whose in false.get(client, []):
            value = (int.from_bytes(shares[whose], "big") + 1) % 2**256
            shares[whose] = value.to_bytes(33, "big")
        rehearsal.collector.add_shares(client, shares)
    return rehearsal


@pytest.mark.parametrize("whose", [[4], [13], [1, 4, 7, 10, 13]])  # 13 is the one that was lost
def test_a_false_share_is_found_by_the_server(whose):
    rehearsal = with_false_shares({1: whose}, [13], threshold=4)  # there is none to spare
    with pytest.raises(Refusal, match=rf"client {whose[0]}'s secret .* one of them is false"):
        rehearsal.collector.total()


@pytest.mark.parametrize("whose", [[4], [13], [1, 4, 7, 10, 13]])
@pytest.mark.parametrize("liar", [1, 7, 10])
def test_a_false_share_is_passed_over_where_one_is_to_spare(liar, whose):
    rehearsal = with_false_shares({liar: whose}, [13], threshold=3)
    total = rehearsal.collector.total()
    assert same(total, plain_sum([clients(5)[c] for c in (1, 4, 7, 10)]))
    # 10 is the fourth of three that are used
    assert rehearsal.collector.false_shares == ({liar: whose[0]} if liar != 10 else {})


def test_of_two_false_shares_both_are_passed_over_or_no_sum_is_made():
    rehearsal = with_false_shares({1: [4], 4: [10]}, [], threshold=3)
    assert same(rehearsal.collector.total(), plain_sum(clients(5).values()))
    assert rehearsal.collector.false_shares == {1: 4, 4: 10}
    with pytest.raises(Refusal, match="start a new summation"):
        with_false_shares({1: [4], 7: [4], 10: [4]}, [], threshold=3).collector.total()


def test_both_shares_of_one_client_are_never_told():
    """Lose client 13 after it sent: a second story, in which it survived, gets no answer."""
    rehearsal = Rehearsal(clients(5), threshold=3)
    rehearsal.keys()
    rehearsal.shares()
    rehearsal.numbers()
    session = rehearsal.sessions[1]
    left, shares = session.unmask([1, 4, 7])
    assert shares.keys() == {1, 4, 7, 10, 13}
    with pytest.raises(Refusal, match="each step is taken once"):
        left.unmask([1, 4, 7, 10, 13])
    # There is nothing left to tell: the session forgot its secrets with the answer.
    told = left.to_bytes()
    for secret in (session.own_seed, *session.secrets, *session.held.values()):
        assert secret.hex().encode() not in told
    kinds = {p: session.held[p].index(share) for p, share in shares.items()}
    assert kinds == {1: 33, 4: 33, 7: 33, 10: 0, 13: 0}


@pytest.mark.parametrize(
    ("survivors", "says"),
    [
        ([1, 4, 4, 7], "expected different"),
        ([4, 7, 10], "client 1 among them"),
        ([1, 4, 99], "different clients of the 5"),
        ([1, 4], "2 clients sent numbers, 3 are needed"),
    ],
)
def test_a_list_of_survivors_that_cannot_be_is_refused(survivors, says):
    rehearsal = Rehearsal(clients(5), threshold=3)
    rehearsal.keys()
    rehearsal.shares()
    rehearsal.numbers()
    with pytest.raises(Refusal, match=says):
        rehearsal.sessions[1].unmask(survivors)


def test_steps_are_taken_in_order_and_once():
    rehearsal = Rehearsal(clients(3))
    rehearsal.keys()
    peers = rehearsal.collector.keys()
    fresh = rehearsal.sessions[1]
    for early in (lambda: fresh.mask({}, {}, BITS), lambda: fresh.unmask([1, 4, 7])):
        with pytest.raises(Refusal, match="gave its keys last"):
            early()
    rehearsal.shares()
    shared = rehearsal.sessions[1]
    with pytest.raises(Refusal, match="gave its shares last"):
        shared.share(peers, 3)
    rehearsal.numbers()
    with pytest.raises(Refusal, match="gave its masked numbers last"):
        rehearsal.sessions[1].mask(rehearsal.collector.letters_to(1), rehearsal.parts[1], BITS)


def test_another_round_or_run_is_refused():
    session, _ = advertise(Summation(RUN, 4), 0)
    for number in (4, 3):
        with pytest.raises(Refusal, match="began summation 4 of this run already"):
            advertise(Summation(RUN, number), 0, session)
    assert advertise(Summation(RUN, 5), 0, session)[0].summation.round == 5
    assert advertise(Summation("cd" * 8, 1), 0, session)[0].summation.run == "cd" * 8
    for odd in (Summation(RUN, 3), Summation("cd" * 8, 4)):
        with pytest.raises(Refusal, match="a message of summation"):
            session.check(odd)
    session.check(Summation(RUN, 4))


@pytest.mark.parametrize("number", [limit() / 3, -limit() / 3, np.nan, np.inf])
def test_what_would_wrap_around_is_refused_at_the_client(number):
    parts = {c: {"gram": np.array([1.0])} for c in range(3)}
    parts[1] = {"gram": np.array([number])}
    rehearsal = Rehearsal(parts)
    rehearsal.keys()
    rehearsal.shares()
    with pytest.raises(Refusal, match="array gram: a number of size"):
        rehearsal.numbers()
    assert 1 not in rehearsal.masked  # nothing left it


def test_a_server_that_changes_keys_or_lists_them_twice_is_refused():
    rehearsal = Rehearsal(clients(3))
    rehearsal.keys()
    peers = rehearsal.collector.keys()
    session = rehearsal.sessions[1]
    changed = {**peers, 1: Keys(peers[4].mask, peers[1].seal)}
    with pytest.raises(Refusal, match="its own as it sent it"):
        session.share(changed, 3)
    with pytest.raises(Refusal, match="its own as it sent it"):
        session.share({p: k for p, k in peers.items() if p != 1}, 2)
    with pytest.raises(Refusal, match="came twice"):
        session.share({**peers, 7: peers[4]}, 3)


def test_the_server_takes_each_client_once_and_only_those_who_take_part():
    rehearsal = Rehearsal(clients(4), threshold=3)
    collector = rehearsal.collector
    rehearsal.keys()
    peers = collector.keys()
    with pytest.raises(Refusal, match="client 1: keys of this summation came before"):
        collector.add_keys(1, Keys(bytes(31) + b"1", bytes(31) + b"2"))
    with pytest.raises(Refusal, match="client 99: a public key that came before"):
        collector.add_keys(99, Keys(peers[1].mask, bytes(32)))
    _, letters, digest = rehearsal.sessions[1].share(peers, 3)
    for odd in ({}, {**letters, 99: b""}, {4: letters[4]}):
        with pytest.raises(Refusal, match="expected a letter to each other"):
            collector.add_letters(1, odd, digest)
    rehearsal.shares()
    with pytest.raises(Refusal, match="letters of this summation came before"):
        collector.add_letters(1, letters, digest)
    with pytest.raises(Refusal, match="handed out no shares"):
        collector.add_masked(99, {"gram": np.zeros(3, np.uint64)})
    rehearsal.lost_at = {"numbers": [10]}
    rehearsal.numbers()
    with pytest.raises(Refusal, match="numbers of this summation came before"):
        collector.add_masked(1, rehearsal.masked[1])
    with pytest.raises(Refusal, match="float64 came, uint64 was expected"):
        collector.add_masked(10, numbers(3))
    with pytest.raises(Refusal, match="not those of the others"):
        collector.add_masked(10, {"gram": np.zeros(3, np.uint64)})
    with pytest.raises(Refusal, match="whose numbers are not in the sum"):
        collector.add_shares(10, {})
    with pytest.raises(Refusal, match="expected one share of each"):
        collector.add_shares(1, {})


@pytest.mark.parametrize(
    ("ids", "data", "says"),
    [([1, 1], bytes(4), "different"), ([-1], b"ab", "from zero"), ([1, 2], bytes(3), "2 for each")],
)
def test_a_parcel_that_does_not_divide_is_refused(ids, data, says):
    with pytest.raises(Refusal, match=says):
        unpack(ids, data, 2)


def test_a_session_hides_its_secrets_when_shown():
    session, _ = advertise(Summation(RUN, 1), 0, source=source(0))
    assert session.secrets.mask.hex() not in repr(session)
    assert str(session.secrets.mask) not in repr(session)


def test_keys_are_new_each_time():
    every = [advertise(Summation(RUN, 1), 0)[1] for _ in range(5)]
    assert len({key for keys in every for key in keys}) == 10


def test_a_weighted_mean_is_a_sum_too():
    """Every linear rule: arrays times weights and the weights, masked alike."""
    draw = np.random.default_rng(0)
    updates = [Update.of({"w": draw.normal(size=7)}, 10 + i) for i in range(4)]
    total = Rehearsal({i: as_sums(u) for i, u in enumerate(updates)}).total()
    found = from_sums(decoded(total, BITS))
    wanted = updates[0] + updates[1] + updates[2] + updates[3]
    assert found.weight == wanted.weight == 46
    np.testing.assert_allclose(found.mean()["w"], wanted.mean()["w"], atol=rounding_bound(4))
    with pytest.raises(ValueError, match="weight"):
        as_sums(Update.of({WEIGHT: np.ones(1)}, 1))


def test_late_numbers_of_a_client_called_lost_stay_hidden():
    """Its mask key is known to the server by then; its own mask is not."""
    parts = {c: {"a": np.arange(4000.0)} for c in range(5)}
    rehearsal = Rehearsal(parts, threshold=3, lost_at={"numbers": [4]})
    total = rehearsal.total()
    assert same(total, plain_sum([parts[c] for c in range(4)]))
    late = rehearsal.sessions[4].mask(rehearsal.collector.letters_to(4), parts[4], BITS)[1]
    # All that the server can take off: the masks with the four others.
    keys = rehearsal.collector.keys()
    for peer in range(4):
        secret = rehearsal.sessions[4].secrets.mask
        seed = rehearsal.summation.mask_seed(secret, 4, peer, keys[4], keys[peer])
        late["a"] = late["a"] + ciphers.Stream(seed).words(4000)
    bits = np.unpackbits(late["a"].view(np.uint8))
    assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(bits.size)
    plain = plain_sum([parts[4]])["a"]
    own = ciphers.Stream(rehearsal.sessions[4].own_seed).words(4000)
    np.testing.assert_array_equal(late["a"] - own, plain)


def test_memory_of_the_server_does_not_grow_with_clients():
    collector = Collector(Summation(RUN, 1), 2)
    rehearsal = Rehearsal(clients(6))
    rehearsal.collector = collector
    rehearsal.threshold = collector.threshold = 4
    rehearsal.total()
    held = [v for v in vars(collector).values() if isinstance(v, dict)]
    arrays = [a for d in held for a in d.values() if isinstance(a, np.ndarray)]
    assert sum(a.nbytes for a in arrays) == sum(a.nbytes for a in rehearsal.masked[1].values())
