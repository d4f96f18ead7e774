# SPDX-License-Identifier: Apache-2.0
"""A node's model server: one process that keeps the frozen model and answers message by message.

It serves the very ClientApp that the SuperNode would have started, so a reply is the same with it
and without it.  One message is worked on at a time; a few may wait; more are told that it is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.supercore.task_identity import TaskIdentity

from fedloom import border
from fedloom.clients import warm_frames as frames

log = logging.getLogger(__name__)

App = Callable[[Message, Context], Message]

_READERS = 32
_LINE_SECONDS = 60.0  # for the next megabyte; work itself may take as long as it takes
_MODEL = (
    *("model.source", "model.dtype", "model.device"),
    *("faast.encoder", "faast.encoders", "refine.models"),
)


class WarmServer:
    """Answer messages on a Unix socket, one at a time, until told to stop or idle for long.

    Parameters
    ----------
    path
        Of the socket, in a folder that is this user's alone.
    app
        Answers a message.
    idle_seconds
        How long to wait for work before ending; 0 waits for ever.
    waiting
        Messages that may wait while one is worked on.
    largest
        Bytes of a frame that is read.
    uid
        Whose processes may ask; this process's user if left out.
    """

    def __init__(
        self,
        path: Path,
        app: App,
        *,
        idle_seconds: float = 0.0,
        waiting: int = 8,
        largest: int = frames.LARGEST,
        uid: int | None = None,
    ) -> None:
        self.path, self._app, self._idle, self._largest = path, app, idle_seconds, largest
        self._uid = os.getuid() if uid is None else uid
        self._tasks: queue.Queue[tuple[socket.socket, frames.Task]] = queue.Queue(waiting)
        self._readers = threading.Semaphore(_READERS)
        self._stop = threading.Event()
        self._model: tuple[Any, ...] | None = None
        self.answered = 0

    def run(self) -> bool:
        """Serve until the end; return at once with False if another server is here already."""
        with _only_one(self.path.with_suffix(".lock")) as alone:
            if not alone:
                return False
            with _listening(self.path) as listener:
                threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
                try:
                    self._work()
                finally:
                    self.stop()
                    self._turn_away()
        return True

    def stop(self) -> None:
        """End after the message that is being worked on."""
        self._stop.set()

    def _listen(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                line, _ = listener.accept()
            except OSError:  # closed: we are at the end
                return
            if self._readers.acquire(blocking=False):
                threading.Thread(target=self._read, args=(line,), daemon=True).start()
            else:
                self._say(line, frames.FAIL, b"busy: too many are asking at once")

    def _read(self, line: socket.socket) -> None:
        """Take one frame off a line; a message keeps its line open until it is answered."""
        try:
            line.settimeout(_LINE_SECONDS)
            if not self._heed(line):
                line.close()
        except frames.FrameError as error:
            self._say(line, frames.FAIL, str(error).encode())
        except (OSError, EOFError):  # gone, or too slow
            line.close()
        finally:
            self._readers.release()

    def _heed(self, line: socket.socket) -> bool:
        """Do what a frame says; return whether its line stays open."""
        if frames.other_end(line).uid != self._uid:
            raise frames.FrameError("you are another user: nothing was read")
        kind, payload = frames.receive(line, self._largest)
        if kind in (frames.PING, frames.STOP):
            self._say(line, frames.DONE, json.dumps(self._state()).encode())
            if kind == frames.STOP:
                self.stop()
            return False
        if kind != frames.ASK:
            raise frames.FrameError(f"a frame of kind {kind!r} came: it asks for nothing")
        task = frames.unpack_task(payload)
        if task.version != frames.version():
            self._say(line, frames.STALE)
            self.stop()  # whoever asks next starts one of the version that is installed now
            return False
        try:
            self._tasks.put_nowait((line, task))
        except queue.Full:
            raise frames.FrameError(
                f"busy: {self._tasks.maxsize} messages are waiting already"
            ) from None
        return True

    def _state(self) -> dict[str, Any]:
        models = sys.modules.get("fedloom.models.base")
        return {
            "pid": os.getpid(),
            "answered": self.answered,
            "waiting": self._tasks.qsize(),
            "base-loads": models.bases_loaded() if models else 0,
        }

    def _work(self) -> None:
        """Answer what waits, in this thread: torch's settings are a thread's own."""
        since = time.monotonic()
        while not self._stop.is_set():
            try:
                line, task = self._tasks.get(timeout=0.2)
            except queue.Empty:
                if self._idle and time.monotonic() - since > self._idle:
                    return
                continue
            if not _hung_up(line):
                self._say(line, frames.DONE, *self._answer(task))
            line.close()
            del task  # it may be the size of an adapter
            since = time.monotonic()

    def _answer(self, task: frames.Task) -> tuple[bytes, ...]:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.ids
        self._make_room(task.context)
        try:
            reply = self._app(task.message, task.context)
        except Exception as error:  # as a ClientApp's own handlers do
            reply = border.failure(task.message, error)
        self.answered += 1
        return frames.pack_task(reply, task.context)

    def _make_room(self, context: Context) -> None:
        """Let go of the model if a recipe names another one: there is room for one."""
        model = tuple(context.run_config.get(key) for key in _MODEL)
        bench = sys.modules.get("fedloom.clients.workbench")
        if bench is not None and model != self._model:
            bench.forget()
        self._model = model

    def _turn_away(self) -> None:
        """Hang up on those who still wait: they start another server."""
        while not self._tasks.empty():
            self._tasks.get_nowait()[0].close()

    def _say(self, line: socket.socket, kind: bytes, *parts: bytes) -> None:
        try:
            frames.send(line, kind, *parts)
        except OSError:
            log.info("who asked has gone before the answer")
        if kind == frames.FAIL:
            line.close()


def _hung_up(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        return line.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        line.settimeout(_LINE_SECONDS)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    """Hold a lock for this process's life; the kernel lets go of it however we die."""
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    else:
        yield True
    finally:
        os.close(held)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Listen on a socket file that only this user may use; one that a dead server left goes."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(before)
    listener.listen(_READERS)
    try:
        yield listener
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes ``accept``
        listener.close()


def named_app(reference: str) -> App:
    """Return an app that is imported when the first message comes: the socket is there at once."""

    def answer(message: Message, context: Context) -> Message:
        module, _, name = reference.partition(":")
        app: App = getattr(importlib.import_module(module), name)
        return app(message, context)

    return answer


def serve(path: Path, app: str, idle_seconds: float) -> bool:
    """Serve ``module:app`` in this process until a signal, ``STOP`` or idleness ends it."""
    os.environ[frames.VARIABLE] = frames.OFF  # this is the end of the line
    server = WarmServer(path, named_app(app), idle_seconds=idle_seconds)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: server.stop())
    return server.run()


def main() -> None:
    """Serve, as ``python -m fedloom.clients.warm_server`` does; 0 also if one is here already."""
    parser = argparse.ArgumentParser(description="keep a node's model loaded between messages")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--app", required=True)
    parser.add_argument("--idle", type=float, default=0.0)
    given = parser.parse_args()
    serve(given.socket, given.app, given.idle)


if __name__ == "__main__":
    main()
