"""Stand between SuperNodes and a SuperLink and write down all bytes, as they are under TLS.

Run as ``python wiretap.py PART PORT TO FOLDER``.  With the coordinator's key TLS ends here and
begins anew on the other side, so what is kept is what a plaintext link would carry; nodes and
SuperLink notice nothing.  Each connection leaves two files, one a direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import ssl
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

BUSY = (ConnectionError, TimeoutError, ssl.SSLError)


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Path) -> None:
    with heard.open("ab", buffering=0) as file, contextlib.suppress(*BUSY):
        while data := await reader.read(2**16):
            file.write(data)
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(*BUSY):
        writer.close()


async def listen(part: Path, port: int, to: int, folder: Path) -> None:
    mine = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    mine.load_cert_chain(part / "server.crt", part / "server.key")
    trust = ssl.create_default_context(cafile=str(part / "ca.crt"))
    number = itertools.count()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection("127.0.0.1", to, ssl=trust)
        except OSError:  # the SuperLink is down: so is its line
            writer.close()
            return
        name = f"{next(number):05d}"
        up = carry(reader, far[1], folder / f"{name}-up")
        await asyncio.gather(up, carry(far[0], writer, folder / f"{name}-down"))

    async with await asyncio.start_server(meet, "127.0.0.1", port, ssl=mine) as server:
        await server.serve_forever()


def tap(part: Path, port: int, to: int, folder: Path) -> subprocess.Popen[bytes]:
    """Begin to listen on a port, in a process of its own."""
    folder.mkdir()
    told = [str(part), str(port), str(to), str(folder)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-P", __file__, *told], stderr=log)


def heard(folder: Path) -> list[bytes]:
    """Return what each connection carried, and after it what in that was compressed.

    Flower 1.42 speaks HTTP/1.1 and compresses nothing: a protobuf body stands whole behind its
    length.  Our own lists of names are zlib streams, and an app is a zip file.
    """
    plain = [path.read_bytes() for path in sorted(folder.glob("*-*"))]
    return [*plain, *(inside for wire in plain for inside in unpacked(wire))]


def unpacked(wire: bytes) -> Iterator[bytes]:
    for at in places(wire, b"\x78\xda"):
        with contextlib.suppress(zlib.error):
            yield zlib.decompressobj().decompress(wire[at:])
    for end in places(wire, b"PK\x05\x06"):
        with zipfile.ZipFile(io.BytesIO(wire[: end + 22])) as archive:
            yield from (archive.read(name) for name in archive.namelist())


def places(wire: bytes, mark: bytes) -> Iterator[int]:
    at = wire.find(mark)
    while at >= 0:
        yield at
        at = wire.find(mark, at + 1)


if __name__ == "__main__":
    _, part, port, to, folder = sys.argv
    asyncio.run(listen(Path(part), int(port), int(to), Path(folder)))
