# SPDX-License-Identifier: Apache-2.0
"""A node that keeps its model loaded: a SuperNode, and beside it the model server of docs/warm.md.

Here a SuperNode that dies is started again by us.  Left to a supervisor it would be by ending this
command, and with that (under systemd and in a container in any case) the server and its model.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from fedloom.clients import warm, warm_frames
from fedloom.simulations.deploy_process import Running, Say
from fedloom.simulations.deployment import Node
from fedloom.simulations.superlink import SuperLinkError

AGAIN_SECONDS = 5.0
REJOIN_SECONDS = 300.0
"""A SuperNode that has not been back for so long is its supervisor's business after all."""
_FIRST_PAUSE, _LAST_PAUSE = 1.0, 60.0  # before a server is started again, the shorter it lived
_LOOK_SECONDS = 5.0  # at a server that somebody else keeps


@dataclass(frozen=True)
class ModelServer:
    """The process that has a node's model."""

    node: Node
    socket: Path

    @property
    def label(self) -> str:
        """Name it in a log."""
        return f"{self.node.label} model"

    @property
    def folder(self) -> Path:
        """Return the node's folder."""
        return self.node.folder

    @property
    def home(self) -> Path:
        """Return a folder of its own: whoever ends all SuperNode's processes leaves this one."""
        return self.node.home / "model"

    def command(self) -> list[str]:
        """Return what is started: it serves fedloom's installed ClientApp, and no app's code."""
        # -P: what lies in the working folder must not shadow what is installed.
        server = [sys.executable, "-P", "-m", "fedloom.clients.warm_server"]
        told = ["--socket", str(self.socket), "--app", warm.APP]
        return [*server, *told, "--idle", str(warm.IDLE_SECONDS)]

    def environment(self) -> dict[str, str]:
        """Return the node's environment, but for the home."""
        return {**self.node.environment(), "FLWR_HOME": str(self.home)}


class Keeper:
    """Keep one model server going; one that somebody else keeps in its place is left alone."""

    def __init__(self, server: ModelServer, say: Say) -> None:
        self._server, self._say = server, say
        self._pause, self._began, self._due = _FIRST_PAUSE, time.monotonic(), 0.0
        self._running: Running | None = Running(server, say)

    def check(self) -> None:
        """Start the server again if it has ended: after long idleness, told to, or by a fault."""
        now = time.monotonic()
        if self._running is not None:
            if (code := self._running.process.poll()) is not None:
                self._ended(code, now)
        elif now >= self._due:
            if _serves(self._server.socket):
                self._due = now + _LOOK_SECONDS
            else:
                self._began, self._running = now, Running(self._server, self._say)

    def _ended(self, code: int, now: float) -> None:
        self.end()
        lived_long = now - self._began > _LAST_PAUSE
        self._pause = _FIRST_PAUSE if lived_long else min(2 * self._pause, _LAST_PAUSE)
        self._due = now + self._pause
        if code:
            again = f"ended with code {code}, and is started again in {self._pause:.0f} s"
            self._say(f"fedloom: {self._server.label} server {again}")

    def end(self) -> None:
        """End the server that we have started."""
        running, self._running = self._running, None
        if running is not None:
            running.end()


class WarmNode:
    """A SuperNode and its model server, each started again if it ends by itself.

    Parameters
    ----------
    part
        The node.
    say
        Takes a line.
    """

    def __init__(self, part: Node, say: Say) -> None:
        self.part, self._say = part, say
        self.connected = threading.Event()
        self._seen = self._due = 0.0
        folder = part.warm_folder()
        assert folder is not None
        part.home.mkdir(mode=0o700, exist_ok=True)
        server = ModelServer(part, warm_frames.socket_in(folder))
        self._node: Running | None = Running(part, say)  # first: it refuses if it is up already
        try:
            self._keeper = Keeper(server, say)
        except BaseException:
            self._node.end()
            raise

    def check(self) -> None:
        """Start again what has ended.

        Raises
        ------
        SuperLinkError
            If the SuperNode has never joined, or not for long.
        """
        self._keeper.check()
        if self._node is None:
            if time.monotonic() >= self._due:
                self._node = Running(self.part, self._say)
            return
        try:
            self._node.check()
        except SuperLinkError as error:
            self._lost(error)
            return
        if self._node.connected.is_set():
            if self._due:
                self._say(f"fedloom: {self.part.label} has joined again")
            self._seen, self._due = time.monotonic(), 0.0
            self.connected.set()

    def _lost(self, error: SuperLinkError) -> None:
        now = time.monotonic()
        if not self.connected.is_set() or now - self._seen > REJOIN_SECONDS:
            raise error
        what = str(error).partition("\n")[0]
        self._say(f"fedloom: {what}; its model stays, and it is started again")
        if self._node is not None:
            self._node.end()
        self._node, self._due = None, now + AGAIN_SECONDS

    def end(self) -> None:
        """End both, and all that they started."""
        try:
            if self._node is not None:
                self._node.end()
        finally:
            self._keeper.end()


def _serves(path: Path) -> bool:
    """Say whether a server of this user's listens on a path."""
    try:
        warm.line_to(path).close()
    except OSError:
        return False
    return True
