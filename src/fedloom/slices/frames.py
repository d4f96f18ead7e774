# SPDX-License-Identifier: Apache-2.0
"""A slice as a stream of frames, each checked before a byte of it is believed.

A stream is a header, one frame a layer and an end, so that layer 0 can be fused while layer 1 is
on its way.  A frame is a fixed head (magic, version, kind, layer, session, number, length), a
payload and a keyed hash over both.  A layer's payload is a safetensors file whose header is the
one that this slice must have, byte for byte: no parser of ours or theirs reads what a stranger
wrote.  Sizes follow from the registered geometry, so a declared one is compared, never trusted.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fedloom.errors import Refusal
from fedloom.slices.geometry import Geometry
from fedloom.slices.quantise import Part, Parts, parts_of, quantise
from fedloom.slices.slice import CacheSlice

MAGIC, VERSION = b"FLKV", 1
HEADER, LAYER, END = 0, 1, 2
HEAD = struct.Struct("<4sBBH16sII")  # magic, version, kind, layer, session, number, length
MAC = 16
HEADER_LIMIT = 1 << 20
_DTYPES = {torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}
FIELDS = {"dim", "ends", "heads", "layers", "model", "places", "scheme", "tokenizer"}


def encode(piece: CacheSlice, scheme: str, key: bytes, session: bytes) -> Iterator[bytes]:
    """Write a slice as frames, a layer at a time.

    Parameters
    ----------
    key : bytes
        The session's, 16 bytes or more, known to both ends and nobody else.
    session : bytes
        16 bytes that the receiver drew for this one request.

    Raises
    ------
    Refusal
        If the cache holds a value that is not finite.
    """
    check_session(key, session)
    whole = hashlib.blake2b(digest_size=32)
    payload = header_of(piece.geometry, piece.layers, piece.places, scheme, piece.ends)
    yield _frame(HEADER, 0, 0, payload, key, session, whole)
    shape = (piece.geometry.heads, piece.tokens, piece.geometry.dim)
    for number, layer in enumerate(piece.layers, 1):
        keys, values = piece.keys[layer], piece.values[layer]
        if not (keys.isfinite().all() and values.isfinite().all()):
            raise Refusal(f"layer {layer} of the cache holds a value that is not finite: not sent")
        payload = write_parts(quantise(keys, values, scheme), parts_of(scheme, *shape))
        yield _frame(LAYER, layer, number, payload, key, session, whole)
    last = len(piece.layers) + 1
    yield _frame(END, 0, last, whole.digest(), key, session, whole)


def header_of(
    geometry: Geometry,
    layers: Sequence[int],
    places: Sequence[int],
    scheme: str,
    ends: Sequence[int] = (),
) -> bytes:
    """Write what the first frame says of the rest."""
    about = {
        "dim": geometry.dim,
        "ends": list(ends),
        "heads": geometry.heads,
        "layers": list(layers),
        "model": geometry.model,
        "places": list(places),
        "scheme": scheme,
        "tokenizer": geometry.tokenizer,
    }
    return json.dumps(about, sort_keys=True, separators=(",", ":")).encode()


def check_session(key: bytes, session: bytes) -> None:
    """See that a key and a session have their lengths."""
    if len(key) < 16 or len(session) != 16:
        raise ValueError(f"a key of {len(key)} and a session of {len(session)} bytes: give >= 16")


def _frame(
    kind: int, layer: int, number: int, payload: bytes, key: bytes, session: bytes, whole: Any
) -> bytes:
    head = HEAD.pack(MAGIC, VERSION, kind, layer, session, number, len(payload))
    whole.update(payload)
    return b"".join((head, payload, mac_of(key, head, payload)))


def mac_of(key: bytes, head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    """Hash a frame with the session's key (BLAKE2b, RFC 7693, keyed)."""
    keyed = hashlib.blake2b(key=key[:64], digest_size=MAC, person=b"fedloom frame")
    keyed.update(head)
    keyed.update(payload)
    return keyed.digest()


def preamble(parts: list[Part]) -> bytes:
    """Write the one safetensors header that these parts have."""
    at, told = 0, {}
    for part in parts:
        end = at + part.nbytes
        told[part.name] = {
            "dtype": _DTYPES[part.dtype],
            "shape": part.shape,
            "data_offsets": (at, end),
        }
        at = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_parts(parts: Parts, expected: list[Part]) -> bytes:
    """Write a layer's tensors as a safetensors file."""
    data = [parts[part.name].contiguous().cpu().view(torch.uint8) for part in expected]
    return preamble(expected) + b"".join(x.numpy().tobytes() for x in data)


def read_parts(payload: bytearray, expected: list[Part], announced: bytes) -> Parts | None:
    """Read a layer's tensors, or nothing if the payload's own header is another one."""
    if not payload.startswith(announced):
        return None
    at, found = len(announced), {}
    for part in expected:
        raw = bytearray(payload[at : at + part.nbytes])  # a copy starts at an aligned address
        flat = torch.frombuffer(raw, dtype=torch.uint8)
        found[part.name] = flat.view(part.dtype).view(part.shape)
        at += part.nbytes
    return found
