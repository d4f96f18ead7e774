# SPDX-License-Identifier: Apache-2.0
"""Key agreement, sealing and a key's stream; only ``certificates`` touches the library besides.

X25519 and HKDF-SHA256 (RFC 7748, 5869) make a secret of two that no third knows; AES-256-GCM seals
a letter; AES-256 in counter mode stretches 32 secret bytes into as many as a mask needs, at
gigabytes a second on processors that know AES.  Nothing here is of our own invention.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedloom.errors import Refusal

KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
"""How much longer a sealed letter is than its text."""

Source = Callable[[int], bytes]
"""Gives that many secret random bytes."""

system: Source = os.urandom
"""The operating system's generator; what is used wherever no other source is given."""


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of 32 secret bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, context: bytes) -> bytes:
    """Return the 32 bytes that both owners of a pair of key pairs get, and for one use only.

    Parameters
    ----------
    context
        What they are for: other words give other bytes, and the two must say the same.

    Raises
    ------
    Refusal
        If ``public`` is no key, or one of the few that make every secret the same.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise Refusal(
            f"a public key of {len(public)} bytes that cannot be used ({error}): expected an X25519"
            " key; ask its owner for a new one"
        ) from error
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=context).derive(shared)


def digest(data: bytes) -> bytes:
    """Return SHA-256 of ``data``."""
    whole = Hash(SHA256())
    whole.update(data)
    return whole.finalize()


def seal(key: bytes, text: bytes, about: bytes, source: Source = system) -> bytes:
    """Encrypt ``text`` so that a change of it, or of ``about``, is seen when it is opened."""
    nonce = source(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Decrypt what ``seal`` made.

    Raises
    ------
    Refusal
        If it was changed on its way, or was sealed under another key or about something else.
    """
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], about)
    except (InvalidTag, ValueError) as error:
        raise Refusal(
            "a sealed letter does not open: it was changed on its way, or is of another sender,"
            " receiver or round; take the sender out of this summation"
        ) from error


class Stream:
    """The endless bytes of one key; what was taken is never given again.

    >>> a, b = Stream(bytes(32)), Stream(bytes(32))
    >>> a.take(3) + a.take(5) == b.take(8)
    True
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes: expected {KEY_BYTES}")
        # From a counter of zero: a key is drawn for one stream and used for no other.
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes; a stream is a ``Source``, too."""
        return self._cipher.update(bytes(count))

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next bytes as 64-bit words, the same on every machine: ``[count]``."""
        return np.frombuffer(self.take(8 * count), "<u8").astype(np.uint64, copy=False)

    def normals(self, count: int) -> NDArray[np.float64]:
        """Return standard normal numbers by Box and Muller's transform: ``[count]``.

        The radius comes of 64 bits, so no number exceeds 9.5; a true one would with probability
        1e-21.
        """
        half = (count + 1) // 2
        words = self.words(2 * half)
        radius = np.sqrt(-2.0 * np.log((words[:half].astype(np.float64) + 1.0) * 2.0**-64))
        angle = words[half:].astype(np.float64) * (2.0 * np.pi * 2.0**-64)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
