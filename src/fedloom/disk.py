# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, also after a power cut or on a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fedloom.errors import Refusal


def write_whole(path: Path, data: bytes) -> None:
    """Put ``data`` in place of ``path``; whoever reads sees the old bytes or the new, never a part.

    Written beside it, flushed to the disk, renamed, and the folder flushed, so that what is there
    when this returns is there after a power cut.  If it fails, the old file stands and nothing is
    left beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def sweep(folder: Path) -> None:
    """Remove what writers that were killed half-way left in a folder that nobody writes to now."""
    for path in folder.glob(".*") if folder.is_dir() else ():
        if path.suffix[1:].isdigit() and path.is_file():
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Make renames and removals in a folder last, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def held(path: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold a folder's lock file, so that one process at a time writes there.

    The kernel drops the lock when its holder dies, so ``kill -9`` leaves nothing to clean up.

    Raises
    ------
    Refusal
        If another process still holds it after ``seconds``.
    """
    if sys.platform == "win32":  # no such lock there
        yield
        return
    import fcntl

    with path.open("a") as handle:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Refusal(
                        f"{path.parent}: another process is at work on this run; wait until it has"
                        " ended, or end it"
                    ) from None
            time.sleep(0.1)
        yield
