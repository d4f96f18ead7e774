# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a summation say to each other, all of it: flat configs down, arrays up.

========================  ==================================  ==================================
asked for                 down, config                        up, arrays
========================  ==================================  ==================================
``query.secure_keys``     run, round                          two public keys
``query.secure_shares``   everybody's public keys, threshold  sealed letters, one digest
``train.<action>``        the letters to this client, bits    masked numbers, ``uint64``
``query.secure_unmask``   who sent numbers                    one share of each client's secrets
========================  ==================================  ==================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedloom.ciphers import KEY_BYTES
from fedloom.errors import Refusal
from fedloom.secure.keys import Keys, Summation
from fedloom.secure.session import LETTER_BYTES, pack, unpack
from fedloom.secure.shamir import SHARE_BYTES
from fedloom.wire import Arrays

KEYS, SHARES, UNMASK = "secure_keys", "secure_shares", "secure_unmask"
"""Flower actions of the three steps that are no method's own."""

Flat = dict[str, Any]
Value = TypeVar("Value")

_RUN, _ROUND = "secure-run", "secure-round"
_THRESHOLD, _BITS = "secure-threshold", "secure-bits"
_CLIENTS, _BYTES = "secure-clients", "secure-bytes"
_KEY_ARRAY, _CLIENT_ARRAY, _LETTER_ARRAY = "keys", "clients", "letters"
_SHARE_ARRAY, _DIGEST_ARRAY = "shares", "digest"


def ask_keys(summation: Summation) -> Flat:
    """Ask for a client's public keys."""
    return {_RUN: summation.run, _ROUND: summation.round}


def ask_shares(summation: Summation, peers: Mapping[int, Keys], threshold: int) -> Flat:
    """Ask for shares of a client's secrets, and tell it whose keys to seal them with."""
    parcel = _parcel({peer: b"".join(keys) for peer, keys in peers.items()})
    return {**ask_keys(summation), **parcel, _THRESHOLD: threshold}


def ask_numbers(summation: Summation, letters: Mapping[int, bytes], bits: int) -> Flat:
    """Ask for masked numbers: what a method's own message says besides."""
    return {**ask_keys(summation), **_parcel(letters), _BITS: bits}


def ask_unmask(summation: Summation, survivors: list[int]) -> Flat:
    """Ask for what takes the masks off a sum; whoever is not named was lost."""
    return {**ask_keys(summation), _CLIENTS: survivors}


def summation_of(config: Mapping[str, Any]) -> Summation:
    """Read which summation a message is of."""
    return Summation(_told(config, _RUN, str), _told(config, _ROUND, int))


def peers_of(config: Mapping[str, Any]) -> tuple[dict[int, Keys], int]:
    """Read what ``ask_shares`` wrote: keys by client, and the threshold."""
    return _keys_of(_parcel_of(config, 2 * KEY_BYTES)), _told(config, _THRESHOLD, int)


def letters_of(config: Mapping[str, Any]) -> tuple[dict[int, bytes], int]:
    """Read what ``ask_numbers`` wrote: letters by sender, and the bits after the point."""
    return _parcel_of(config, LETTER_BYTES), _told(config, _BITS, int)


def survivors_of(config: Mapping[str, Any]) -> list[int]:
    """Read what ``ask_unmask`` wrote."""
    return [int(client) for client in _told(config, _CLIENTS, list)]


def give_keys(keys: Keys) -> dict[str, NDArray[Any]]:
    """Write a client's public keys."""
    return {_KEY_ARRAY: _as_rows(b"".join(keys), 2)}


def take_keys(arrays: Arrays) -> Keys:
    """Read what ``give_keys`` wrote."""
    return _keys_of(unpack([0], _bytes_of(arrays, _KEY_ARRAY), 2 * KEY_BYTES))[0]


def give_letters(letters: Mapping[int, bytes], digest: bytes) -> dict[str, NDArray[Any]]:
    """Write a client's letters and the digest of its own seed."""
    return {**_rows(letters, _LETTER_ARRAY), _DIGEST_ARRAY: _as_rows(digest, 1)}


def take_letters(arrays: Arrays) -> tuple[dict[int, bytes], bytes]:
    """Read what ``give_letters`` wrote."""
    letters = _rows_of(arrays, _LETTER_ARRAY, LETTER_BYTES)
    return letters, _bytes_of(arrays, _DIGEST_ARRAY)


def give_shares(shares: Mapping[int, bytes]) -> dict[str, NDArray[Any]]:
    """Write what a client reveals."""
    return _rows(shares, _SHARE_ARRAY)


def take_shares(arrays: Arrays) -> dict[int, bytes]:
    """Read what ``give_shares`` wrote."""
    return _rows_of(arrays, _SHARE_ARRAY, SHARE_BYTES)


def _parcel(parts: Mapping[int, bytes]) -> Flat:
    ids, data = pack(parts)
    return {_CLIENTS: ids, _BYTES: data}


def _parcel_of(config: Mapping[str, Any], size: int) -> dict[int, bytes]:
    return unpack(_told(config, _CLIENTS, list), _told(config, _BYTES, bytes), size)


def _told(config: Mapping[str, Any], name: str, kind: type[Value]) -> Value:
    value = config.get(name)
    if not isinstance(value, kind):
        raise Refusal(
            f"{name}: {type(value).__name__} came, {kind.__name__} was expected; this is no message"
            " of a secure summation, use the same fedloom version on the server"
        )
    return value


def _keys_of(parts: Mapping[int, bytes]) -> dict[int, Keys]:
    return {i: Keys(data[:KEY_BYTES], data[KEY_BYTES:]) for i, data in parts.items()}


def _as_rows(data: bytes, count: int) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(count, -1)


def _rows(parts: Mapping[int, bytes], name: str) -> dict[str, NDArray[Any]]:
    ids, data = pack(parts)
    return {_CLIENT_ARRAY: np.array(ids, np.int64), name: _as_rows(data, len(ids))}


def _rows_of(arrays: Arrays, name: str, size: int) -> dict[int, bytes]:
    if _CLIENT_ARRAY not in arrays or arrays[_CLIENT_ARRAY].dtype != np.int64:
        raise Refusal(f"no whole numbers named {_CLIENT_ARRAY}: expected whose {name} these are")
    return unpack(arrays[_CLIENT_ARRAY].ravel().tolist(), _bytes_of(arrays, name), size)


def _bytes_of(arrays: Arrays, name: str) -> bytes:
    if name not in arrays or arrays[name].dtype != np.uint8:
        raise Refusal(
            f"no bytes named {name} in the reply: use the same fedloom version everywhere"
        )
    return arrays[name].tobytes()
