# SPDX-License-Identifier: Apache-2.0
"""The processes that one command brings to life, found again wherever they hide.

Flower starts its children in new sessions and Ray starts daemons that outlive their parent, so a
process group is not enough: we follow parents, and on Linux also a mark in the environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

PROC = Path("/proc")


class Entry(NamedTuple):
    """A line of the process table; ``born`` tells a process from a later one of the same id."""

    parent: int
    born: str


def process_table() -> dict[int, Entry]:
    """Return all live processes of this machine by id; zombies are not alive."""
    if (PROC / "self" / "stat").exists():
        return _from_proc()
    listing = subprocess.run(
        ["ps", "-Ao", "pid=,ppid=,stat=,lstart="], capture_output=True, text=True, check=True
    )
    rows = [line.split(maxsplit=3) for line in listing.stdout.splitlines()]
    return {int(r[0]): Entry(int(r[1]), r[3]) for r in rows if not r[2].startswith("Z")}


def _from_proc() -> dict[int, Entry]:
    table: dict[int, Entry] = {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # gone since the listing
            # "pid (name) state parent ... start-time": a name may hold blanks and brackets
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                table[int(folder.name)] = Entry(int(fields[1]), fields[19])
    return table


def marked(mark: str) -> set[int]:
    """Return the processes whose environment holds ``NAME=value``; none where it cannot be read.

    A process that renames itself, as Ray's do, may have lost it: parents are the first means.
    """
    found: set[int] = set()
    for folder in PROC.iterdir() if PROC.is_dir() else ():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # gone, or another user's
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
    return found


class Family:
    """A process, its descendants, and those of them whose parents have died.

    Parameters
    ----------
    root
        The process that started the others.
    mark
        ``NAME=value`` of an environment variable that only this family has.
    """

    def __init__(self, root: subprocess.Popen[bytes], mark: str) -> None:
        self.root = root
        self.mark = mark
        self.children: set[int] = set()
        self.grandchildren: set[int] = set()
        self._known: dict[int, str] = {}  # id -> born, of those alive at the last look

    def look(self) -> dict[int, Entry]:
        """Update who is there, and return those alive."""
        table = process_table()
        # Once the root has been reaped, its number may be a stranger's.
        root = {self.root.pid} & table.keys() if self.root.poll() is None else set()
        self.children = _children(root, table)
        self.grandchildren = _children(self.children, table)
        found = {pid for pid, born in self._known.items() if _is(table, pid, born)}
        found |= root
        while newer := _children(found, table) - found:
            found |= newer
        self._known = {pid: table[pid].born for pid in found}
        return {pid: table[pid] for pid in found}

    def end(self, grace_seconds: float = 3.0) -> None:
        """End the family: the youngest generation may tidy up first, and nobody outlives this."""
        try:
            self.look()
            # A task told to stop shuts its own Ray down, while the SuperLink can still hear it.
            self._signal(self.grandchildren, signal.SIGTERM)
            self._wait_without(self.grandchildren, grace_seconds)
            self._signal(self._all(), signal.SIGTERM)
            self._wait_without(self._all(), grace_seconds)
        finally:  # also when a second Ctrl-C cuts the courtesy short
            for _ in range(3):  # one that is dying may have started another
                self._signal(self._all(), signal.SIGKILL)
                self._wait_without(self._all(), 2.0)
            self.root.wait()

    def _all(self) -> set[int]:
        table = process_table()
        strays = {pid for pid in marked(self.mark) if pid in table and pid != os.getpid()}
        self._known |= {pid: table[pid].born for pid in strays}
        return set(self.look())

    def _signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        alive = self.look()
        for pid in pids:
            if pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _wait_without(self, pids: set[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while pids & self.look().keys() and time.monotonic() < deadline:
            time.sleep(0.05)


def _is(table: dict[int, Entry], pid: int, born: str) -> bool:
    return pid in table and table[pid].born == born


def _children(parents: Iterable[int], table: dict[int, Entry]) -> set[int]:
    wanted = set(parents)
    return {pid for pid, entry in table.items() if entry.parent in wanted}


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and a closed terminal unwind like Ctrl-C, so that nothing is left running."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, unwind) for number in wanted}  # nohup stays in force
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
