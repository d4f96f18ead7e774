# SPDX-License-Identifier: Apache-2.0
"""What a ClientApp and its node's model server say to each other, and where they meet.

A private Unix socket: a file of mode 0600 in a folder of mode 0700, and each end asks the kernel
whose the other end is.  A frame is 16 bytes of head and a body of at most ``LARGEST``; the body of
a message is Flower's own serialisation of it and of its context.  Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from flwr.app import Context, Message
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.task_identity import TaskIdentity

from fedloom import __version__
from fedloom.errors import Refusal

VARIABLE, OFF = "FEDLOOM_WARM", "off"
"""A node's own word: the folder of its model server's socket, or ``off``."""
KEPT = "FEDLOOM_WARM_KEPT"
"""Set where somebody starts the server, and starts it again: whoever asks waits for it."""
ASK, DONE, FAIL, STALE, PING, STOP = b"ASK ", b"DONE", b"FAIL", b"OLD ", b"PING", b"STOP"
LARGEST = 2**31
"""Bytes of a body: what Flower's own serialisation can hold."""

_MAGIC = b"FLW1"
_HEAD = struct.Struct(">4s4sQ")
_ASKED = struct.Struct(">16sQQQQ")  # version, task, run, node, bytes of the message
_CHUNK = 2**20
_PATH_BYTES = 100  # the kernel's limit for a socket's path is 107
# What a process's results may hang on: two SuperNodes that differ in it get a server each.
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "HOME", "HF_HOME", "XDG_CACHE_HOME", "PYTHONPATH")


class FrameError(ValueError):
    """Bytes that are no frame of ours."""


class Task(NamedTuple):
    """One message to work on, with the ids that Flower keeps beside it."""

    version: bytes
    ids: tuple[int, int, int]
    message: Message
    context: Context


class End(NamedTuple):
    """One end of a line."""

    pid: int
    uid: int


def send(line: socket.socket, kind: bytes, *parts: bytes) -> None:
    """Write one frame; the line's timeout counts anew for each megabyte."""
    line.sendall(_HEAD.pack(_MAGIC, kind, sum(map(len, parts))))
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK):
            line.sendall(view[start : start + _CHUNK])


def receive(line: socket.socket, largest: int = LARGEST) -> tuple[bytes, bytes]:
    """Read one frame; memory is taken as bytes arrive, never on the sender's word.

    Raises
    ------
    FrameError
        If this is no frame, or one that is too large: its body is not read.
    ConnectionError
        If the other end is gone.
    """
    magic, kind, size = _HEAD.unpack(_exactly(line, _HEAD.size))
    if magic != _MAGIC:
        raise FrameError("these bytes are no frame of fedloom's model server")
    if size > largest:
        raise FrameError(f"a frame of {size} bytes came, {largest} is the most")
    return kind, bytes(_exactly(line, size))


def _exactly(line: socket.socket, size: int) -> bytearray:
    held = bytearray()
    while len(held) < size:
        piece = line.recv(min(_CHUNK, size - len(held)))
        if not piece:
            raise ConnectionError("the other end has hung up")
        held += piece
    return held


def pack_task(message: Message, context: Context) -> tuple[bytes, bytes, bytes]:
    """Serialise a message, or a reply, with its context as Flower does."""
    body = message_to_proto(message).SerializeToString()
    head = _ASKED.pack(version(), *_identity(), len(body))
    return head, body, context_to_proto(context).SerializeToString()


def _identity() -> tuple[int, int, int]:
    try:
        return TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id
    except RuntimeError:  # outside a Flower process
        return 0, 0, 0


def unpack_task(payload: bytes) -> Task:
    """Read what ``pack_task`` wrote.

    Raises
    ------
    FrameError
        If it is anything else.
    """
    try:
        came, task, run, node, size = _ASKED.unpack_from(payload)
        rest = memoryview(payload)[_ASKED.size :]
        if size > len(rest):
            raise FrameError(f"a message of {size} bytes was said, {len(rest)} came")
        message = message_from_proto(ProtoMessage.FromString(bytes(rest[:size])))
        context = context_from_proto(ProtoContext.FromString(bytes(rest[size:])))
    except FrameError:
        raise
    except Exception as error:  # protobuf and Flower raise many kinds
        raise FrameError(f"this is no message of Flower's: {type(error).__name__}") from error
    return Task(came, (task, run, node), message, context)


def version() -> bytes:
    """Return what both ends must have alike: 16 bytes of fedloom's version."""
    return hashlib.sha256(__version__.encode()).digest()[:16]


def other_end(line: socket.socket) -> End:
    """Return who is at the other end, as the kernel knows it."""
    if sys.platform != "linux":
        return End(0, os.getuid())  # there the folder's mode alone keeps strangers out
    wanted = struct.Struct("3i")
    given = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, wanted.size)
    return End(*wanted.unpack(given)[:2])


def socket_path() -> Path:
    """Return this node's socket in its folder, which is made if there is none.

    In a folder that the node names there is one server; in the user's own, one for each
    environment that may decide what comes out.

    Raises
    ------
    Refusal
        If others may write there, or the path is too long for a socket.
    """
    named = os.environ.get(VARIABLE, "")
    folder = Path(named) if named and named != OFF else _users_own()
    return socket_in(folder, "model" if named else _environment())


def socket_in(folder: Path, name: str = "model") -> Path:
    """Return a socket's path in a folder that is made, or checked, to be this user's alone.

    Raises
    ------
    Refusal
        If others may write there, or the path is too long for a socket.
    """
    _make_private(folder)
    path = folder / f"{name}.sock"
    if not _fits(path):
        raise Refusal(
            f"{VARIABLE}: a socket's path has {_PATH_BYTES} bytes at most; name a shorter folder"
        )
    return path


def folder_for(wanted: Path) -> Path:
    """Return the folder that is wanted, or one of the user's own if a socket's path is too long."""
    if _fits(wanted / "model.sock"):
        return wanted
    return Path(f"{_users_own()}-{hashlib.sha256(os.fsencode(wanted)).hexdigest()[:12]}")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _PATH_BYTES


def _users_own() -> Path:
    home = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(home) / f"fedloom-{os.getuid()}"


def _environment() -> str:
    told = {n: v for n, v in os.environ.items() if n in _ENVIRONMENT or n.startswith("FEDLOOM_")}
    told.pop(VARIABLE, None)
    said = json.dumps([sys.prefix, __version__, sorted(told.items())])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def _make_private(folder: Path) -> None:
    """Make a folder that is this user's alone; a link, or another's folder, is refused."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise Refusal(f"the model server's folder: {error.strerror}; set {VARIABLE}") from error
    private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    if not private or found.st_uid != os.getuid():
        raise Refusal(
            "the model server's folder must be this user's and of mode 0700: chmod 700 it, or set"
            f" {VARIABLE} to another"
        )
