"""What the console says of a round under ``privacy``."""

from __future__ import annotations

from fedloom.simulations.progress import Picture, plain_lines, round_facts

TOLD = {"event": "privacy", "round": 1, "seen": "the sum of the clients' updates", "rule": "ffa"}


def test_what_the_server_sees_is_said_once_and_what_was_spent_in_every_round():
    picture = Picture()
    (line,) = plain_lines(TOLD, picture)
    assert line == "round 1/?: the server sees the sum of the clients' updates (rule ffa)"
    assert plain_lines({**TOLD, "round": 2}, picture) == []
    facts = round_facts({"round": 2, "mask-error": 4.5e-13, "epsilon-spent": 7.9999})
    assert facts == ["mask rounding 5e-13", "epsilon 8"]
