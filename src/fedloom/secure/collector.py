# SPDX-License-Identifier: Apache-2.0
"""The server's side of one secure summation: it adds what is masked and learns the sum alone.

Masked arrays are folded on arrival, so its memory does not grow with the clients.  What it gets is
checked as far as it can be without looking inside: who, how many, which shapes; a secret that was
put together again is held against what its owner said of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import ciphers
from fedloom.errors import Refusal
from fedloom.secure import masks, shamir
from fedloom.secure.keys import Keys, Summation
from fedloom.secure.masks import Words

_SPARE = 2
"""Shares that are tried in place of false ones: each costs as many tries as the threshold."""


class Collector:
    """Collect keys, letters, masked arrays and shares, in this order, from whoever answers.

    Parameters
    ----------
    summation
        Run and number of this sum.
    threshold
        How many clients must answer in each step; see ``threshold_for``.
    """

    def __init__(self, summation: Summation, threshold: int) -> None:
        self.summation, self.threshold = summation, threshold
        self._keys: dict[int, Keys] = {}
        self._letters: dict[int, dict[int, bytes]] = {}
        self._digests: dict[int, bytes] = {}
        self._masked: set[int] = set()
        self._total: Words = {}
        self._shares: dict[int, dict[int, bytes]] = {}
        self.false_shares: dict[int, int] = {}
        """Who revealed a share that does not fit -> whose secret it is of; one of them is to blame,
        as nobody can hold a share against anything before it is used."""

    def add_keys(self, client: int, keys: Keys) -> None:
        """Take a client's public keys."""
        _once(client, self._keys, "keys")
        known = {key for pair in self._keys.values() for key in pair}
        if known & set(keys) or keys.mask == keys.seal:
            raise Refusal(f"client {client}: a public key that came before; expected its own two")
        if any(len(key) != ciphers.KEY_BYTES for key in keys):
            raise Refusal(f"client {client}: expected two keys of {ciphers.KEY_BYTES} bytes")
        self._keys[client] = keys

    def keys(self) -> dict[int, Keys]:
        """Return all keys, for all: refuse if too few came."""
        self._enough(len(self._keys), "gave keys")
        return dict(sorted(self._keys.items()))

    def add_letters(self, client: int, letters: Mapping[int, bytes], digest: bytes) -> None:
        """Take a client's sealed letters to all others."""
        _once(client, self._letters, "letters")
        if client not in self._keys or letters.keys() != self._keys.keys() - {client}:
            raise Refusal(f"client {client}: expected a letter to each other client who gave keys")
        self._letters[client], self._digests[client] = dict(letters), digest

    def senders(self) -> list[int]:
        """Return who handed out shares: those who are asked for numbers. Refuse if too few."""
        self._enough(len(self._letters), "handed out shares")
        return sorted(self._letters)

    def letters_to(self, client: int) -> dict[int, bytes]:
        """Return what the others wrote to one client."""
        return {s: self._letters[s][client] for s in self.senders() if s != client}

    def add_masked(self, client: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add a client's masked arrays to the sum."""
        if client not in self._letters:
            raise Refusal(f"client {client}: numbers of one who handed out no shares")
        _once(client, self._masked, "numbers")
        if odd := [n for n, a in arrays.items() if a.dtype != np.uint64]:
            raise Refusal(f"array {odd[0]}: {arrays[odd[0]].dtype} came, uint64 was expected")
        shapes = {name: array.shape for name, array in arrays.items()}
        if self._masked and shapes != {name: array.shape for name, array in self._total.items()}:
            raise Refusal(f"client {client}: arrays {shapes} are not those of the others")
        for name, array in arrays.items():
            if name in self._total:
                self._total[name] += array
            else:
                self._total[name] = array.copy()
        self._masked.add(client)

    def survivors(self) -> list[int]:
        """Return whose numbers are in the sum. Refuse if too few: their masks stay on."""
        self._enough(len(self._masked), "sent numbers")
        return sorted(self._masked)

    def add_shares(self, client: int, shares: Mapping[int, bytes]) -> None:
        """Take what a survivor reveals: one share of each client who handed them out."""
        if client not in self._masked:
            raise Refusal(f"client {client}: shares of one whose numbers are not in the sum")
        _once(client, self._shares, "shares to unmask")
        if shares.keys() != self._letters.keys():
            raise Refusal(f"client {client}: expected one share of each who handed them out")
        self._shares[client] = dict(shares)

    def total(self) -> Words:
        """Take the masks off and return the sum modulo ``2 ** 64``.

        Raises
        ------
        Refusal
            If too few revealed their shares, or more of them are false than can be passed over.
        """
        self._enough(len(self._shares), "revealed shares")
        asked = tuple(sorted(self._shares)[: self.threshold])
        total = {name: array.copy() for name, array in self._total.items()}
        for client in sorted(self._letters):
            secret, asked = self._secret(client, asked)
            if client in self._masked:
                masks.subtract(total, secret)
            else:
                self._cancel(total, client, secret)
        return total

    def _secret(self, client: int, asked: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
        """Put a client's secret together; return whose shares fitted, for the next one.

        What the owner said of its secret tells a right one from a wrong one, so a share that is
        false is found by taking a spare one in place of each in turn.  No share is asked for that
        was not revealed already.
        """
        for owners, left_out in self._choices(asked):
            if (secret := self._joined(client, owners)) is not None:
                if left_out is not None:
                    self.false_shares[left_out] = client
                return secret, owners
        raise Refusal(
            f"the shares of client {client}'s secret do not fit together: at least one of them is"
            " false; start a new summation"
        )

    def _choices(self, asked: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """Yield whose shares to try, and who is left out for another."""
        yield asked, None
        spare = [c for c in sorted(self._shares) if c not in asked and c not in self.false_shares]
        for other in spare[:_SPARE]:
            for out in asked:
                yield (*(c for c in asked if c != out), other), out

    def _joined(self, client: int, owners: tuple[int, ...]) -> bytes | None:
        """Return a client's secret, or nothing if it is not what its owner said of it."""
        try:
            shares = {owner: self._shares[owner][client] for owner in owners}
            secret = shamir.join(shares, _weights(owners))
        except Refusal:
            return None
        if client in self._masked:
            return secret if ciphers.digest(secret) == self._digests[client] else None
        return secret if ciphers.public_key(secret) == self._keys[client].mask else None

    def _cancel(self, total: Words, lost: int, secret: bytes) -> None:
        """Take out the masks that the survivors share with a client that was lost."""
        for client in sorted(self._masked):
            own, other = self._keys[lost], self._keys[client]
            seed = self.summation.mask_seed(secret, lost, client, own, other)
            (masks.subtract if client < lost else masks.add)(total, seed)

    def _enough(self, count: int, what: str) -> None:
        if count < self.threshold:
            raise Refusal(
                f"summation {self.summation.round}: {count} clients {what}, at least"
                f" {self.threshold} are needed; wait for more clients and start a new one"
            )


def _once(client: int, there: Any, what: str) -> None:
    if client in there:
        raise Refusal(f"client {client}: {what} of this summation came before")


@functools.lru_cache(maxsize=4)  # the same owners' shares give most secrets back
def _weights(owners: tuple[int, ...]) -> dict[int, int]:
    return shamir.weights(owners)
