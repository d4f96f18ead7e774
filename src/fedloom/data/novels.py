# SPDX-License-Identifier: Apache-2.0
"""Jane Austen's six novels out of a Debian package, without dpkg and without R.

The package holds R's lazy-load database: an index (.rdx) of where each object lies in a file of
compressed objects (.rdb), each in R's XDR serialisation (R Internals, section 1.8).
"""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.errors import Refusal

_DATA = "./usr/lib/R/site-library/janeaustenr/data/Rdata"
_AR_HEADER = 60
_BROKEN = (
    *(KeyError, ValueError, TypeError, EOFError, struct.error),
    *(zlib.error, lzma.LZMAError, tarfile.TarError),
)

# Type codes of R's serialisation; the novels need no others.
_SYMBOL, _PAIRS, _CHARS, _LOGICAL, _INTEGER, _STRINGS, _LIST = 1, 2, 9, 10, 13, 16, 19
_REFERENCE, _NIL = 255, 254


def austen(package: Path) -> Iterator[tuple[str, str]]:
    """Yield (novel, text) in the order of their names.

    Raises
    ------
    Refusal
        If the package is not laid out as expected.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(ar_member(package, "data.tar"))) as tree:
            index, store = (member(tree, _DATA + end) for end in (".rdx", ".rdb"))
        places = read_r(gzip.decompress(index))["variables"]
        for name in sorted(places):
            offset, size = places[name]
            packed = store[offset + 4 : offset + size]  # after its plain size, 4 bytes
            lines = read_r(zlib.decompress(packed))
            yield name, "\n".join(line or "" for line in lines)
    except _BROKEN as error:
        raise Refusal(
            f"{package} does not hold the novels as expected ({error}): delete it, to have it"
            " fetched again"
        ) from error


def read_r(data: bytes) -> Any:
    """Read strings, integers and named lists of R's XDR serialisation, version 2 or 3."""
    if data[:2] != b"X\n":
        raise ValueError("no XDR serialisation")
    return _Reader(data).item()


class _Reader:
    """A cursor over one serialised object."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 2
        self._known: list[Any] = []
        version, _, _ = self._number(), self._number(), self._number()
        if version == 3:  # names its encoding
            self._take(self._number())

    def item(self) -> Any:
        flags = self._number()
        kind = flags & 0xFF
        if kind == _NIL:
            return None
        if kind == _REFERENCE:
            return self._known[((flags >> 8) or self._number()) - 1]
        if kind == _SYMBOL:
            self._known.append(self.item())
            return self._known[-1]
        if kind == _CHARS:
            size = self._number()
            return None if size < 0 else self._take(size).decode()
        if kind == _PAIRS:
            return self._pairs(flags)
        return self._vector(kind, has_attributes=bool(flags & 0x200))

    def _vector(self, kind: int, has_attributes: bool) -> Any:
        size = self._number()
        if kind in (_LOGICAL, _INTEGER):
            values = list(struct.unpack(f">{size}i", self._take(4 * size)))
        elif kind in (_STRINGS, _LIST):
            values = [self.item() for _ in range(size)]
        else:
            raise ValueError(f"R type {kind}")
        attributes = self.item() if has_attributes else None
        if kind == _LIST and attributes and "names" in attributes:
            return dict(zip(attributes["names"], values, strict=True))
        return values

    def _pairs(self, flags: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while flags & 0xFF != _NIL:
            if flags & 0x200:
                self.item()
            tag = self.item() if flags & 0x400 else ""
            found[str(tag)] = self.item()
            flags = self._number()
        return found

    def _number(self) -> int:
        (number,) = struct.unpack(">i", self._take(4))
        return int(number)

    def _take(self, size: int) -> bytes:
        if size < 0 or self._at + size > len(self._data):
            raise ValueError("it ends too soon")
        self._at += size
        return self._data[self._at - size : self._at]


def ar_member(package: Path, prefix: str) -> bytes:
    """Return the first member of a Unix archive whose name starts with ``prefix``."""
    data = package.read_bytes()
    at = len(b"!<arch>\n")
    while at < len(data):
        name, size = data[at : at + 16].decode(), int(data[at + 48 : at + 58])
        at += _AR_HEADER
        if name.startswith(prefix):
            return data[at : at + size]
        at += size + size % 2
    raise KeyError(prefix)


def member(tree: tarfile.TarFile, name: str) -> bytes:
    """Return the bytes of one file of a tar archive."""
    handle = tree.extractfile(name)
    if handle is None:
        raise KeyError(name)
    return handle.read()
