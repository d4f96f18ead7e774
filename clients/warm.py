# SPDX-License-Identifier: Apache-2.0
"""Hand a message to this node's model server, which has the frozen model loaded already.

A SuperNode starts a process for each message; loading a model in each would take minutes.  So where
a node wants it (``FEDLOOM_WARM``, or ``clients.warm`` in the recipe) that process is a thin caller:
it passes the message on and the reply back, and imports no torch.  A server that is not there is
started; one that dies over a message is started once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from fedloom import border
from fedloom.clients import warm_frames as frames
from fedloom.errors import Refusal

IDLE_SECONDS = 1800.0
"""How long a server that nobody started on purpose waits for work before it ends."""
START_SECONDS = 120.0
_PAUSE = 0.05

APP = "fedloom.simulations.client_app:app"  # by name: it is a room above
_STARTED: list[subprocess.Popen[bytes]] = []  # they outlive us, and Python warns of those let go


def forward(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Flower mod: let the model server answer where one is wanted, else this process."""
    if not wanted(context):
        return call_next(message, context)
    try:
        return ask(message, context)
    except Exception as error:  # an error is data here: the strategy names the client and goes on
        return border.failure(message, error)


def wanted(context: Context) -> bool:
    """Whether messages go to a model server: the node's word before the recipe's."""
    said = os.environ.get(frames.VARIABLE, "")
    return said != frames.OFF and (bool(said) or context.run_config.get("clients.warm") is True)


@contextlib.contextmanager
def kept_here() -> Iterator[None]:
    """Let this process answer, whatever node or recipe say: a simulation keeps models itself."""
    before = os.environ.get(frames.VARIABLE)
    os.environ[frames.VARIABLE] = frames.OFF
    try:
        yield
    finally:
        if before is None:
            del os.environ[frames.VARIABLE]
        else:
            os.environ[frames.VARIABLE] = before


def ask(message: Message, context: Context, app: str = APP) -> Message:
    """Send a message to the model server and return its reply; ``context.state`` comes back too.

    Parameters
    ----------
    app
        What a server that has to be started serves, as ``module:app``.
    """
    path, request = frames.socket_path(), frames.pack_task(message, context)
    died: set[int] = set()  # a dying process may still take a call before its last file is closed
    while len(died) < 2:
        with _connected(path, app) as line:
            server = frames.other_end(line).pid or -len(died)  # 0 where no kernel tells
            try:
                with contextlib.suppress(ConnectionError):  # it may have hung up with a word
                    frames.send(line, frames.ASK, *request)
                kind, payload = frames.receive(line)
            except ConnectionError:
                died.add(server)
                time.sleep(_PAUSE)
                continue
        if kind == frames.STALE:  # it has ended itself
            continue
        if kind != frames.DONE:
            # Its own sentences, which quote no row: a refusal's words travel.
            raise Refusal(f"the model server: {payload.decode('utf-8', 'replace')}")
        answer = frames.unpack_task(payload)
        context.state = answer.context.state
        return answer.message
    raise Refusal("the model server died over this message, and once more when started anew")


def call(kind: bytes) -> dict[str, Any]:
    """Ask a running server for its ``PING`` or tell it to ``STOP``; empty if there is none."""
    try:
        with line_to(frames.socket_path()) as line:
            frames.send(line, kind)
            said: dict[str, Any] = json.loads(frames.receive(line)[1])
            return said
    except (FileNotFoundError, ConnectionError):
        return {}


def line_to(path: Path) -> socket.socket:
    """Return a line to the server that listens on a path; nobody may be there (``OSError``).

    Raises
    ------
    Refusal
        If the server is another user's.
    """
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(os.fspath(path))
        if frames.other_end(line).uid != os.getuid():
            raise Refusal("the model server's socket is another user's: nothing was sent")
    except BaseException:
        line.close()
        raise
    return line


def _connected(path: Path, app: str) -> socket.socket:
    """Return a line to the server; start one if nobody answers, and nobody keeps it going."""
    deadline, process = time.monotonic() + START_SECONDS, None
    kept = bool(os.environ.get(frames.KEPT))
    while True:
        try:
            return line_to(path)
        except (FileNotFoundError, ConnectionRefusedError):
            # 0: another one was there, and has ended
            if not kept and (process is None or process.poll() == 0):
                process = _start(path, app)
            if (process is not None and process.poll()) or time.monotonic() > deadline:
                raise RuntimeError(
                    "no model server could be started; its log is beside its socket, or in what"
                    " `fedloom deploy up` says"
                ) from None
            time.sleep(_PAUSE)


def _start(path: Path, app: str) -> subprocess.Popen[bytes]:
    """Start a server of its own session: it outlives this process, and the SuperNode."""
    # -P: what lies in the working folder must not shadow what is installed.
    command = [sys.executable, "-P", "-m", "fedloom.clients.warm_server"]
    command += ["--socket", str(path), "--idle", str(IDLE_SECONDS), "--app", app]
    mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with open(os.open(path.with_suffix(".log"), mode, 0o600), "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    _STARTED.append(process)
    return process
