"""Secure summations without a network: real sessions and a real collector, step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from fedloom import ciphers
from fedloom.rules.fixed_point import BITS, encode
from fedloom.secure import Collector, Session, Summation, advertise, threshold_for
from fedloom.wire import Arrays

RUN = "5e" * 16


def source(seed: int) -> ciphers.Source:
    """A repeatable stand-in for the system's generator."""
    return ciphers.Stream(ciphers.digest(seed.to_bytes(8, "big"))).take


def numbers(client: int, size: int = 50, scale: float = 1e3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(client)
    return {"gram": random.normal(size=size) * scale, "cross": random.normal(size=(3, 4))}


def plain_sum(parts: Collection[Arrays], bits: int = BITS) -> dict[str, np.ndarray]:
    """The fixed-point sum that a trusted server would form."""
    total: dict[str, np.ndarray] = {}
    for part in parts:
        for name, array in part.items():
            words = encode(array, bits, len(parts))
            total[name] = total.get(name, np.zeros_like(words)) + words
    return total


class Rehearsal:
    """One summation of several clients in this process; ``lost_at`` says who is lost before what.

    Letters that pass may be changed by ``forge(sender, receiver, letter)``.
    """

    def __init__(
        self,
        parts: Mapping[int, Arrays],
        *,
        server_round: int = 1,
        threshold: int | None = None,
        lost_at: Mapping[str, Collection[int]] | None = None,
        seed: int = 0,
        bits: int = BITS,
    ) -> None:
        self.parts, self.bits = dict(parts), bits
        self.summation = Summation(RUN, server_round)
        self.threshold = threshold_for(len(parts)) if threshold is None else threshold
        self.collector = Collector(self.summation, self.threshold)
        self.lost_at = lost_at or {}
        self.source = source(seed)
        self.sessions: dict[int, Session] = {}
        self.masked: dict[int, dict[str, np.ndarray]] = {}

    def there(self, step: str, clients: Collection[int]) -> list[int]:
        return [c for c in clients if c not in self.lost_at.get(step, ())]

    def _stored(self, client: int, session: Session) -> None:
        self.sessions[client] = Session.from_bytes(session.to_bytes())  # a process per message

    def keys(self) -> None:
        for client in self.there("keys", self.parts):
            session, keys = advertise(self.summation, client, source=self.source)
            self._stored(client, session)
            self.collector.add_keys(client, keys)

    def shares(self) -> None:
        peers = self.collector.keys()
        for client in self.there("shares", peers):
            found = self.sessions[client].share(peers, self.threshold, self.source)
            self._stored(client, found[0])
            self.collector.add_letters(client, *found[1:])

    def numbers(self, forge: Callable[[int, int, bytes], bytes] | None = None) -> None:
        for client in self.there("numbers", self.collector.senders()):
            letters = self.collector.letters_to(client)
            if forge:
                letters = {s: forge(s, client, x) for s, x in letters.items()}
            found = self.sessions[client].mask(letters, self.parts[client], self.bits)
            self._stored(client, found[0])
            self.masked[client] = {n: x.copy() for n, x in found[1].items()}
            self.collector.add_masked(client, found[1])

    def unmask(self) -> None:
        survivors = self.collector.survivors()
        for client in self.there("unmask", survivors):
            session, shares = self.sessions[client].unmask(survivors)
            self._stored(client, session)
            self.collector.add_shares(client, shares)

    def total(self) -> dict[str, np.ndarray]:
        self.keys()
        self.shares()
        self.numbers()
        self.unmask()
        return self.collector.total()


def chi_square(data: bytes) -> float:
    """Deviations of byte counts from uniform in standard deviations; 255 degrees of freedom."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    return (float(((counts - expected) ** 2 / expected).sum()) - 255) / np.sqrt(2 * 255)
