"""Two nodes and a carrier who cannot read, change, swap or repeat what it carries."""

from __future__ import annotations

import pytest

from fedloom import ciphers
from fedloom.errors import Refusal
from fedloom.secure.channel import Channel, session_of

A, B, EVE = (bytes([n]) * 32 for n in (1, 2, 3))


def ends(exchange="e1", asker=0, asked=1, private=B):
    mine = Channel(A, ciphers.public_key(B), "e1", 0, 1)
    return mine, Channel(private, ciphers.public_key(A), exchange, asker, asked)


def test_what_one_seals_the_other_opens():
    mine, theirs = ends()
    assert theirs.open("question", mine.seal("question", b"what?", 0), 0) == b"what?"
    assert mine.open("cache", theirs.seal("cache", b"\x00" * 99, 7), 7) == b"\x00" * 99
    assert mine.frame_key == theirs.frame_key
    assert b"what?" not in mine.seal("question", b"what?", 0)


@pytest.mark.parametrize(
    "other",
    [
        {"exchange": "e2"},
        {"asker": 2},
        {"asked": 2},
        {"private": EVE},
    ],
)
def test_nobody_else_opens_it(other):
    sealed = ends()[0].seal("question", b"what?", 0)
    with pytest.raises(Refusal, match="does not open"):
        ends(**other)[1].open("question", sealed, 0)


def test_numbers_purposes_and_bytes_are_bound():
    mine, theirs = ends()
    sealed = theirs.seal("cache", b"slots", 3)
    for purpose, data, number in (
        ("cache", sealed, 4),
        ("question", sealed, 3),
        ("cache", sealed[:-1], 3),
        ("cache", sealed[:20] + bytes([sealed[20] ^ 1]) + sealed[21:], 3),
        ("cache", b"", 3),
    ):
        with pytest.raises(Refusal, match="does not open"):
            mine.open(purpose, data, number)


def test_sessions_differ_by_all_that_they_are_of():
    found = {session_of(nonce, p, q) for nonce in (A, B) for p in range(3) for q in range(3)}
    assert len(found) == 18
