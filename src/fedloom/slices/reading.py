# SPDX-License-Identifier: Apache-2.0
"""The reader of ``fedloom.slices.frames``: bytes in, whole layers out, nothing taken on trust.

Every frame is compared with the only one that may come now (session, number, kind, layer, length)
before its payload is waited for, and hashed with the session's key before it is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
from collections.abc import Iterator, MutableSet
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.errors import Refusal
from fedloom.slices.frames import (
    END,
    FIELDS,
    HEAD,
    HEADER,
    HEADER_LIMIT,
    LAYER,
    MAC,
    MAGIC,
    VERSION,
    check_session,
    mac_of,
    preamble,
    read_parts,
)
from fedloom.slices.geometry import Geometry
from fedloom.slices.quantise import SCHEMES, Part, parts_of, restore
from fedloom.slices.slice import CacheSlice


class FrameError(Refusal):
    """A frame that is not believed; the stream it came in is of no further use."""


class Truncated(FrameError):
    """A stream whose end has not come: whoever sent it is gone."""


@dataclass(frozen=True)
class LayerSlice:
    """One layer that has come whole: keys before RoPE and values, [H, T, D]."""

    layer: int
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class StreamHeader:
    """What the first frame says of the rest."""

    layers: tuple[int, ...]
    places: tuple[int, ...]
    ends: tuple[int, ...]
    scheme: str


class FrameReader:
    """Read a stream as it comes: bytes in, whole layers out, at the first doubt a ``FrameError``.

    Parameters
    ----------
    geometry : Geometry
        The registered one of the sender that was asked.
    key, session : bytes
        As the request said.
    max_tokens, max_bytes : int
        What the receiver is willing to hold of this sender; bytes are those on the wire.
    used : set of bytes, optional
        Sessions that this receiver has had; a reader adds its own and refuses one that is there.

    Attributes
    ----------
    nbytes : int
        Bytes of frames that were believed.
    digest : str
        Hash over all payloads, once the end has come: what a receipt can name.
    """

    def __init__(
        self,
        geometry: Geometry,
        key: bytes,
        session: bytes,
        *,
        max_tokens: int = 4096,
        max_bytes: int = 1 << 28,
        used: MutableSet[bytes] | None = None,
    ) -> None:
        check_session(key, session)
        if used is not None and session in used:
            raise FrameError("replayed session: its number was used before; draw a new one")
        if used is not None:
            used.add(session)
        self.geometry, self._key, self._session = geometry, key, session
        self._max_tokens, self._max_bytes = max_tokens, max_bytes
        self.header: StreamHeader | None = None
        self.nbytes, self.digest = 0, ""
        self._held = bytearray()
        self._number, self._got = 0, dict[int, LayerSlice]()
        self._whole = hashlib.blake2b(digest_size=32)
        self._parts, self._preamble, self._layer_bytes = list[Part](), b"", 0
        self._broken = ""

    def feed(self, data: bytes) -> list[LayerSlice]:
        """Take in bytes, cut anywhere, and return the layers that they complete."""
        try:
            return list(self._feed(data))
        except FrameError as error:
            self._broken = str(error)
            self._held.clear()
            raise

    def layers(self) -> list[LayerSlice]:
        """Return the layers that have come whole so far, even if the stream then broke off."""
        return list(self._got.values())

    def finish(self) -> CacheSlice:
        """Return the slice.

        Raises
        ------
        FrameError
            If the end has not come (``Truncated``), or a frame was not believed.
        """
        if self._broken:
            raise FrameError(f"the stream broke off: {self._broken}")
        if not self.digest or self.header is None:
            raise Truncated(
                f"truncated stream: {self._number} frames and {len(self._held)} bytes came, no end"
            )
        return CacheSlice(
            self.geometry,
            {n: got.keys for n, got in self._got.items()},
            {n: got.values for n, got in self._got.items()},
            self.header.places,
            self.header.ends,
        )

    def _feed(self, data: bytes) -> Iterator[LayerSlice]:
        if self._broken:
            raise FrameError(f"the stream broke off: {self._broken}")
        view = memoryview(data)
        while len(view):
            # Never more than one frame is held, however much is thrown at once.
            missing = self._needed() - len(self._held)
            self._held += view[:missing]
            view = view[missing:]
            if len(self._held) < self._needed():
                continue  # either out of data, or the head is there and tells of more
            frame = self._held
            self._held = bytearray()
            if (layer := self._accept(frame)) is not None:
                yield layer

    def _needed(self) -> int:
        """Return the bytes of the frame that is coming, as soon as its head says so."""
        if self.digest:
            raise FrameError("bytes after the end of the stream")
        if len(self._held) < HEAD.size:
            return HEAD.size
        return HEAD.size + self._check_head() + MAC

    def _check_head(self) -> int:
        """Compare the head with what must come now; return the payload's length."""
        magic, version, kind, layer, session, number, length = HEAD.unpack_from(self._held)
        if (magic, version) != (MAGIC, VERSION):
            raise FrameError(
                f"not a frame of version {VERSION}: {magic!r} version {version} came;"
                " use the same fedloom on both ends"
            )
        if session != self._session:
            raise FrameError("a frame of another session: only this request's are read")
        if number < self._number:
            raise FrameError(f"replayed frame: number {number} came, {self._number} was expected")
        if number > self._number:
            raise FrameError(f"reordered frame: number {number} came, {self._number} was expected")
        self._check_kind(kind, layer)
        self._check_length(kind, length)
        return int(length)

    def _check_kind(self, kind: int, layer: int) -> None:
        header = self.header
        if header is None:
            wanted, at = HEADER, 0
        elif len(self._got) < len(header.layers):
            wanted, at = LAYER, header.layers[len(self._got)]
        else:
            wanted, at = END, 0
        if kind == LAYER and layer in self._got:
            raise FrameError(f"duplicate layer {layer}")
        if (kind, layer) != (wanted, at):
            raise FrameError(f"frame kind {kind}, layer {layer} came; {wanted}, {at} was expected")

    def _check_length(self, kind: int, length: int) -> None:
        if kind == HEADER:
            if length > min(HEADER_LIMIT, self._max_bytes):
                raise FrameError(f"oversized header: {length} bytes declared")
            return
        expected = 32 if kind == END else self._layer_bytes
        if length != expected:
            what = "oversized" if length > expected else "undersized"
            raise FrameError(f"{what} frame: {length} bytes declared, {expected} fit the geometry")

    def _accept(self, frame: bytearray) -> LayerSlice | None:
        view = memoryview(frame)
        head, payload, mac = view[: HEAD.size], view[HEAD.size : -MAC], view[-MAC:]
        if not hmac.compare_digest(mac_of(self._key, head, payload), mac):
            raise FrameError(f"frame {self._number}: its hash does not fit, it was changed")
        kind, layer = head[5], int.from_bytes(head[6:8], "little")
        digest = self._whole.digest()
        self._whole.update(payload)
        found = None
        if kind == HEADER:
            self.header = self._check_header(bytes(payload))
        elif kind == LAYER:
            found = self._decode(layer, bytearray(payload))
            self._got[layer] = found
        elif bytes(payload) != digest:
            raise FrameError("the end does not fit what came before it")
        else:
            self.digest = digest.hex()
        self._number += 1
        self.nbytes += len(frame)
        return found

    def _decode(self, layer: int, payload: bytearray) -> LayerSlice:
        assert self.header is not None  # or this frame's kind would have been refused
        parts = read_parts(payload, self._parts, self._preamble)
        if parts is None:
            raise FrameError(f"layer {layer}: its safetensors header is not this geometry's")
        shape = (self.geometry.heads, len(self.header.places), self.geometry.dim)
        keys, values = restore(parts, self.header.scheme, shape)
        if not (keys.isfinite().all() and values.isfinite().all()):
            raise FrameError(f"layer {layer} holds a value that is not finite")
        return LayerSlice(layer, keys, values)

    def _check_header(self, payload: bytes) -> StreamHeader:
        """Read the one payload that has to be parsed, and compare it with what is registered."""
        try:
            told = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise FrameError("the stream's header is no JSON") from error
        if not isinstance(told, dict) or set(told) != FIELDS:
            raise FrameError(f"the stream's header must have {', '.join(sorted(FIELDS))}")
        for name in ("model", "tokenizer"):
            if told[name] != getattr(self.geometry, name):
                raise FrameError(
                    f"wrong {name}: {str(told[name])[:12]} came,"
                    f" {getattr(self.geometry, name)[:12]} was asked"
                )
        size = (told["heads"], told["dim"])
        if size != (self.geometry.heads, self.geometry.dim):
            raise FrameError(f"wrong geometry: heads and dim {size} came")
        if not isinstance(told["scheme"], str) or told["scheme"] not in SCHEMES:
            raise FrameError(f"unknown scheme {str(told['scheme'])[:20]}")
        limit = self.geometry.layers
        layers = _ascending("layers", told["layers"], limit, least=1, strict=True)
        places = _ascending("places", told["places"], 1 << 31, least=1, strict=True)
        ends = _ascending("ends", told["ends"], 1 << 31, least=0, strict=False)
        if len(places) > self._max_tokens:
            raise FrameError(f"oversized slice: {len(places)} tokens, at most {self._max_tokens}")
        if ends and len(ends) != len(places):
            raise FrameError(f"{len(ends)} ends for {len(places)} tokens")
        made = StreamHeader(layers, places, ends, told["scheme"])
        self._lay_out(made, len(payload))
        return made

    def _lay_out(self, header: StreamHeader, payload: int) -> None:
        """Work out once what every layer must look like, and what all of it will weigh."""
        shape = (self.geometry.heads, len(header.places), self.geometry.dim)
        self._parts = parts_of(header.scheme, *shape)
        self._preamble = preamble(self._parts)
        self._layer_bytes = len(self._preamble) + sum(part.nbytes for part in self._parts)
        frames = (len(header.layers) + 2) * (HEAD.size + MAC)
        total = payload + len(header.layers) * self._layer_bytes + 32 + frames
        if total > self._max_bytes:
            raise FrameError(f"oversized slice: {total} bytes to come, at most {self._max_bytes}")


def _ascending(name: str, told: Any, limit: int, *, least: int, strict: bool) -> tuple[int, ...]:
    """Read a list of whole numbers below ``limit`` that ascend."""
    if not isinstance(told, list) or len(told) < least or any(type(x) is not int for x in told):
        raise FrameError(f"{name}: expected a list of {least} or more whole numbers")
    if any(b < a or (strict and a == b) for a, b in itertools.pairwise(told)):
        raise FrameError(f"{name}: expected ascending numbers, none twice")
    if told and (told[0] < 0 or told[-1] >= limit):
        raise FrameError(f"{name}: expected numbers from 0 to {limit - 1}")
    return tuple(told)
