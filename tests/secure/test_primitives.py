"""What the protocol stands on: key agreement, seals, streams, shares."""

from __future__ import annotations

import ast
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom import ciphers
from fedloom.errors import Refusal
from fedloom.secure import shamir
from fedloom.secure.keys import Secrets, Summation, least_threshold, threshold_for

from summations import RUN, source

ROOT = Path(__file__).parents[2]


def test_two_modules_touch_the_library():
    found = set()
    for room in ("src", "strategies", "clients", "simulations"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if any(name.split(".")[0] == "cryptography" for name in names):
                    found.add(path.name)
    assert found == {"ciphers.py", "certificates.py"}


def test_x25519_is_the_rfcs():
    """RFC 7748, section 6.1: Bob's keys, and that two owners agree."""
    secret = source(9)(32)
    other = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    known = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert ciphers.public_key(other).hex() == known
    one = ciphers.agree(secret, ciphers.public_key(other), b"x")
    assert one == ciphers.agree(other, ciphers.public_key(secret), b"x")
    assert one != ciphers.agree(other, ciphers.public_key(secret), b"y")
    with pytest.raises(ValueError, match="32"):
        ciphers.public_key(secret[:31])  # cut short is refused, not padded


def test_the_stream_is_aes_in_counter_mode():
    """NIST's known answer: AES-256 of a zero block under a zero key."""
    assert ciphers.Stream(bytes(32)).take(16).hex() == "dc95c078a2408989ad48a21492842087"
    words = ciphers.Stream(bytes(32)).words(2)
    assert words.dtype == np.uint64
    assert words.astype("<u8").tobytes().hex() == "dc95c078a2408989ad48a21492842087"


@pytest.mark.parametrize("public", [bytes(32), bytes(31), b"\x01" + bytes(31)])
def test_a_public_key_that_fixes_the_secret_is_refused(public):
    with pytest.raises(Refusal, match="public key"):
        ciphers.agree(source(0)(32), public, b"")


def test_a_seal_shows_every_change():
    key, text, about = source(1)(32), b"shares", b"from 1 to 2"
    sealed = ciphers.seal(key, text, about)
    assert len(sealed) == len(text) + ciphers.SEAL_BYTES
    assert ciphers.unseal(key, sealed, about) == text
    assert ciphers.seal(key, text, about) != sealed  # a nonce of its own
    for i in range(len(sealed)):
        bad = sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :]
        with pytest.raises(Refusal, match="sealed letter"):
            ciphers.unseal(key, bad, about)
    for wrong in ((key, sealed, b"from 2 to 1"), (source(2)(32), sealed, about), (key, b"", about)):
        with pytest.raises(Refusal, match="sealed letter"):
            ciphers.unseal(*wrong)


def test_normal_numbers_are_normal():
    drawn = ciphers.Stream(source(3)(32)).normals(200_001)
    assert drawn.shape == (200_001,)
    # Standard errors of the first four moments are sqrt(1, 2, 15, 96) / sqrt(n).
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((drawn**power).mean() - moment) < 5 * np.sqrt(spread / drawn.size)
    half = drawn.size // 2
    assert abs(np.corrcoef(drawn[:half], drawn[half : 2 * half])[0, 1]) < 5 / np.sqrt(half)


def test_the_field_is_one_and_holds_every_secret():
    assert sympy.isprime(shamir.PRIME)
    assert 2**256 < shamir.PRIME < 256**shamir.SHARE_BYTES


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 12), st.data())
def test_any_threshold_of_shares_gives_the_secret(secret, count, data):
    threshold = data.draw(st.integers(1, count))
    owners = data.draw(
        st.lists(st.integers(0, 10_000), min_size=count, max_size=count, unique=True)
    )
    shares = shamir.split(secret, owners, threshold, source(4))
    some = data.draw(st.lists(st.sampled_from(owners), min_size=threshold, unique=True))
    assert shamir.join({owner: shares[owner] for owner in some}) == secret


def test_fewer_shares_say_nothing():
    """For each secret there is one polynomial through too few shares: all are as likely."""
    shares = shamir.split(b"\x07" * 32, range(5), 3, source(5))
    for pair in combinations(range(5), 2):
        for guess in (bytes(32), b"\x07" * 32, b"\xff" * 32):
            places = [0, *(owner + 1 for owner in pair)]
            values = [int.from_bytes(guess, "big")]
            values += [int.from_bytes(shares[owner], "big") for owner in pair]
            # Interpolate at a third owner's place: some share of it fits the guess.
            place, fits = 9, 0
            for i, x in enumerate(places):
                term = values[i]
                for j, other in enumerate(places):
                    if i != j:
                        term = term * (place - other) * pow(x - other, -1, shamir.PRIME)
                fits = (fits + term) % shamir.PRIME
            made = {owner: shares[owner] for owner in pair}
            made[place - 1] = fits.to_bytes(33, "big")
            assert shamir.join(made) == guess


@pytest.mark.parametrize(
    ("owners", "threshold", "says"),
    [([0, 0], 1, "different"), ([-1, 0], 1, "from zero"), ([0, 1], 3, "1 to 2"), ([0], 0, "1 to")],
)
def test_shares_that_cannot_be_are_refused(owners, threshold, says):
    with pytest.raises(Refusal, match=says):
        shamir.split(bytes(32), owners, threshold)


def test_a_share_that_is_none_is_refused():
    shares = shamir.split(bytes(32), range(2), 2)
    for bad in (b"", shamir.PRIME.to_bytes(33, "big"), bytes(32)):
        with pytest.raises(Refusal, match="no share"):
            shamir.join({**shares, 1: bad})


def test_derived_keys_are_bound_to_run_round_and_both_clients():
    random = source(6)
    one, two = Secrets.draw(random), Secrets.draw(random)
    keys = {1: one.public(), 2: two.public()}

    def seeds(summation: Summation, low: int, high: int) -> set[bytes]:
        mine = summation.mask_seed(one.mask, low, high, keys[1], keys[2])
        assert mine == summation.mask_seed(two.mask, high, low, keys[2], keys[1])
        there = summation.seal_key(one.seal, low, high, keys[1], keys[2], sends=True)
        assert there == summation.seal_key(two.seal, low, high, keys[2], keys[1], sends=False)
        back = summation.seal_key(two.seal, high, low, keys[2], keys[1], sends=True)
        assert back == summation.seal_key(one.seal, high, low, keys[1], keys[2], sends=False)
        return {mine, there, back}

    found = set()
    for run, number, low, high in (
        (RUN, 1, 1, 2),
        (RUN, 2, 1, 2),
        ("ab" * 8, 1, 1, 2),
        (RUN, 1, 1, 3),
        (RUN, 1, 12, 2),
    ):
        found |= seeds(Summation(run, number), low, high)
    assert len(found) == 15


@pytest.mark.parametrize(("run", "number"), [("", 1), ("../x", 1), ("AB" * 8, 1), (RUN, -1)])
def test_a_summation_has_a_name(run, number):
    with pytest.raises(Refusal, match="token"):
        Summation(run, number)


def test_thresholds_are_more_than_half():
    for parties in range(2, 200):
        assert least_threshold(parties) > parties / 2
        assert least_threshold(parties) <= threshold_for(parties) <= parties
        assert threshold_for(parties, 0.5) == least_threshold(parties)
        if parties > 2:
            assert threshold_for(parties) > parties * 2 / 3 - 1e-9
    with pytest.raises(Refusal, match=r"0\.5 to below 1"):
        threshold_for(10, 0.4)
