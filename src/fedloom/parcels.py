# SPDX-License-Identifier: Apache-2.0
"""Named arrays in one buffer a dtype: what a message carries instead of a header for each array.

A record of small arrays is mostly headers: some 250 bytes for each, a tenth of a memory gate.  A
parcel is the arrays' values, end to end, and one compressed list of names, dtypes and shapes, which
says what they are without either end having to guess; a name begins like the one before it.  Values
may be written in fewer bits (``fedloom.rounding``); the list says so, and unpacking gives float32
again.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal
from fedloom.rounding import CODES, code_bytes, decode, encode, scale_bytes
from fedloom.wire import Arrays

FORMAT = 1
CODED, STEPS = "codes", "steps"
"""Buffers of what is written in fewer bits than it has."""
_DTYPES = ("float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64")
_KNOWN = frozenset((*_DTYPES, "uint8", "uint16", "uint32", "uint64"))
_MOST_BYTES, _MOST_ARRAYS, _MOST_LETTERS = 2**22, 2**16, 1000
_MOST_DIMENSIONS, _MOST_NUMBERS = 8, 2**40
"""Bounds on a list, so that none takes room before it is known to fit what came."""


@dataclass(frozen=True)
class Parcel:
    """Arrays end to end, and the list that takes them apart."""

    layout: bytes
    buffers: Mapping[str, bytes]
    """By dtype, or ``CODED`` and ``STEPS``."""


def pack(arrays: Arrays, code: str = "float32") -> Parcel:
    """Put arrays end to end, those of float32 in ``code``.

    >>> made = pack({"gate": np.float32([1, 2]), "step": np.int64(7)})
    >>> {name: len(data) for name, data in made.buffers.items()}, unpack(made)["step"]
    ({'float32': 8, 'int64': 8}, array(7))
    """
    pieces: dict[str, list[bytes]] = defaultdict(list)
    listed: list[list[Any]] = []
    before = ""
    for name, given in arrays.items():
        array = np.asarray(given)
        dtype = array.dtype.name
        if dtype not in _KNOWN:
            raise TypeError(f"array {name} is of {dtype}: expected plain numbers")
        shared = _shared(before, name)
        listed.append([shared, name[shared:], dtype, *array.shape])
        before = name
        if dtype == "float32" and code != "float32":
            codes, steps = encode(array, code)
            pieces[CODED].append(codes)
            pieces[STEPS].append(steps)
        else:
            pieces[dtype].append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    text = json.dumps([FORMAT, code, listed], separators=(",", ":")).encode()
    joined = {name: b"".join(parts) for name, parts in pieces.items()}
    return Parcel(zlib.compress(text, 9), {n: data for n, data in joined.items() if data})


def unpack(parcel: Parcel) -> dict[str, NDArray[Any]]:
    """Take arrays apart again, in the order in which they were put in; the copies are new.

    Raises
    ------
    Refusal
        If the list is none of ours, or the buffers hold more or less than it says.
    """
    code, listed = _read(parcel.layout)
    places = dict.fromkeys(parcel.buffers, 0)

    def take(buffer: str, size: int) -> bytes:
        at = places.get(buffer, 0)
        data = bytes(parcel.buffers.get(buffer, b"")[at : at + size])
        places[buffer] = at + size
        return data

    arrays: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape) in listed.items():
        count = math.prod(shape)
        if dtype == "float32" and code != "float32":
            codes, steps = (
                take(*part) for part in zip((CODED, STEPS), _sizes(code, count), strict=True)
            )
            arrays[name] = decode(codes, steps, code, count).reshape(shape)
            continue
        size = count * np.dtype(dtype).itemsize
        data = take(dtype, size)
        if len(data) != size:
            raise Refusal(f"array {name}: {len(data)} bytes came, expected {size}")
        little = np.dtype(dtype).newbyteorder("<")
        arrays[name] = np.frombuffer(data, little).astype(dtype).reshape(shape)
    for buffer, used in places.items():
        if used != (came := len(parcel.buffers.get(buffer, b""))):
            raise Refusal(f"{came} bytes of {buffer} came, the list of arrays has {used}")
    return arrays


def code_of(layout: bytes) -> str:
    """Tell how a parcel's numbers are written."""
    return _read(layout)[0]


def _sizes(code: str, count: int) -> tuple[int, int]:
    return code_bytes(code, count), scale_bytes(code, count)


def _read(layout: bytes) -> tuple[str, dict[str, tuple[str, tuple[int, ...]]]]:
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(layout, _MOST_BYTES)
        if not reader.eof or reader.unused_data:
            raise ValueError("cut short, or too long")
        version, code, listed = json.loads(text)
        if version != FORMAT or code not in CODES:
            raise ValueError(f"format {version!r:.20}, code {code!r:.20}")
        if len(listed) > _MOST_ARRAYS:
            raise ValueError(f"{len(listed)} arrays")
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        name = ""
        for shared, rest, dtype, *shape in listed:
            name = name[: _place(shared, name)] + rest
            _check(name, dtype, tuple(shape))
            if name in found:
                raise ValueError(f"{name!r:.40} came twice")
            found[name] = dtype, tuple(shape)
    except (zlib.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refusal(f"not a list of arrays: {error}"[:200]) from error
    return str(code), found


def _shared(one: str, other: str) -> int:
    """Count the letters with which both begin."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in alike)


def _place(shared: Any, name: str) -> int:
    if type(shared) is not int or not 0 <= shared <= len(name):
        raise ValueError(f"{shared!r:.20} letters of the name before")
    return shared


def _check(name: Any, dtype: Any, shape: tuple[Any, ...]) -> None:
    if len(name) > _MOST_LETTERS or dtype not in _KNOWN:
        raise ValueError(f"{name!r:.40} of {dtype!r:.20}")
    sizes = all(type(n) is int and 0 <= n <= _MOST_NUMBERS for n in shape)
    if len(shape) > _MOST_DIMENSIONS or not sizes or math.prod(shape) > _MOST_NUMBERS:
        raise ValueError(f"{name!r:.40} has the shape {str(shape)[:40]}")
