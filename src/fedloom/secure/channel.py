# SPDX-License-Identifier: Apache-2.0
"""What two nodes say to each other through a server that only carries it.

FedRefine's questions and caches travel by the server; a cache can be read back into its text
(arXiv 2508.09442), so both are sealed from it.  Keys are those that the nodes gave at the start of
the run and that the server passed on: it can read nothing that it carries, but one that lies about
whose key is whose stands in the middle.  Lengths are not hidden.
"""

from __future__ import annotations

import hashlib

from fedloom import ciphers
from fedloom.ciphers import Source
from fedloom.errors import Refusal

HELLO, KEEP, ASK, EXPORT, ANSWER = (
    "refine_hello",
    "keep_fusers",
    "ask_caches",
    "export_cache",
    "refine_answer",
)
"""Flower's actions: a node's model and key; fusers; questions for senders; caches; one answer."""
MARK = "fedloom-answer "
"""Begins the line of a run's log that holds a sealed answer."""
ACTIONS = (HELLO, KEEP, ASK, EXPORT, ANSWER)
_PURPOSES = ("question", "cache", "frames")


class Channel:
    """One direction of one exchange: who asks, who is asked.

    Parameters
    ----------
    private, public : bytes
        One's own secret key and the other's public one.
    exchange : str
        Names the exchange; it and both partitions decide the keys.
    asker, asked : int
        Partitions.
    """

    def __init__(
        self, private: bytes, public: bytes, exchange: str, asker: int, asked: int
    ) -> None:
        self._about = f"fedloom refine|{exchange}|{asker}|{asked}"
        self._keys = {
            purpose: ciphers.agree(private, public, f"{self._about}|{purpose}".encode())
            for purpose in _PURPOSES
        }

    def seal(
        self, purpose: str, data: bytes, number: int, source: Source = ciphers.system
    ) -> bytes:
        """Seal a ``question`` or a ``cache``; its number is bound to it."""
        return ciphers.seal(self._keys[purpose], data, self._label(purpose, number), source)

    def open(self, purpose: str, sealed: bytes, number: int) -> bytes:
        """Open what the other end sealed.

        Raises
        ------
        Refusal
            If it was changed, or is of another exchange, pair or number.
        """
        try:
            return ciphers.unseal(self._keys[purpose], sealed, self._label(purpose, number))
        except Refusal as error:
            raise Refusal(
                f"a sealed {purpose} does not open: it was changed on its way, or is of another"
                " exchange or node"
            ) from error

    @property
    def frame_key(self) -> bytes:
        """Key of the frames' own hashes."""
        return self._keys["frames"]

    def _label(self, purpose: str, number: int) -> bytes:
        return f"{self._about}|{purpose}|{number}".encode()


def session_of(nonce: bytes, asked: int, number: int) -> bytes:
    """Derive the session of one question to one sender from what the asker drew for the exchange.

    >>> session_of(bytes(16), 1, 0) != session_of(bytes(16), 1, 1), len(session_of(bytes(16), 1, 0))
    (True, 16)
    """
    return hashlib.blake2b(f"{asked}|{number}".encode(), key=nonce, digest_size=16).digest()
