# SPDX-License-Identifier: Apache-2.0
"""A process of a deployment with all that it starts: watched, heard, and ended as one."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fedloom.errors import Refusal
from fedloom.simulations.processes import Family, marked
from fedloom.simulations.superlink import TETHER, SuperLinkError

Say = Callable[[str], None]

CONNECTED = re.compile(r"SuperNode ID: (\d+)")
LOOK_SECONDS = 5.0  # between looks at all of a machine's processes, which cost
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TAIL = 12  # lines


class Startable(Protocol):
    """What can be brought up: a part of a deployment, or a node's model server."""

    @property
    def label(self) -> str:
        """Name it in a log."""

    @property
    def folder(self) -> Path:
        """Return the folder of the part."""

    @property
    def home(self) -> Path:
        """Return a folder of its own, named in the environment of its processes alone."""

    def command(self) -> list[str]:
        """Return what is started."""

    def environment(self) -> dict[str, str]:
        """Return the environment, with ``FLWR_HOME`` the home."""


class Running:
    """One part's process with all that it starts; what they say is passed on, line by line.

    Parameters
    ----------
    part
        Which.
    say
        Takes a line.
    """

    def __init__(self, part: Startable, say: Say) -> None:
        self.part, self._say = part, say
        self.tail: list[str] = []
        self.connected = threading.Event()
        self._looked = 0.0
        part.home.mkdir(mode=0o700, exist_ok=True)
        empty = part.home / "empty"  # the working folder stands on the path of what is run there
        empty.mkdir(exist_ok=True)
        environment = part.environment()
        self._mark = f"FLWR_HOME={part.home}"
        if alive := marked(self._mark):
            raise Refusal(
                f"{part.label} of {part.folder} is up already (process {min(alive)}): stop it first"
            )
        command = part.command()
        if sys.platform == "linux":
            command = [sys.executable, "-c", TETHER, *command]
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=empty,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.family = Family(self.process, self._mark)
        self._pump = threading.Thread(target=self._pass_on, daemon=True)
        self._pump.start()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = _COLOUR.sub("", raw.decode("utf-8", "replace")).rstrip()
            if line:
                self.tail = [*self.tail[-_TAIL:], line]
                # A reader that has gone away must not stop the process by a pipe that fills up.
                with contextlib.suppress(OSError, ValueError):
                    self._say(f"[{self.part.label}] {line}")
            if CONNECTED.search(line):
                self.connected.set()

    def check(self) -> None:
        """Raise if the process, or the SuperExec that starts its tasks, has ended.

        Raises
        ------
        SuperLinkError
            With the last that it said.
        """
        said = "\n".join(self.tail)
        if (code := self.process.poll()) is not None:
            self._pump.join(2.0)
            said = "\n".join(self.tail)
            raise SuperLinkError(f"{self.part.label} ended with code {code}\n{said}")
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        had = bool(self.family.children)
        self.family.look()
        if had and not self.family.children:  # /health stays green, and no task ever starts
            raise SuperLinkError(f"flower-superexec of {self.part.label} has died\n{said}")

    def end(self) -> None:
        """End the process and all that it started."""
        self.family.end()
        self._pump.join(2.0)
        if self.process.stdout is not None and not self._pump.is_alive():
            self.process.stdout.close()
