# SPDX-License-Identifier: Apache-2.0
"""Which sum of a run a client has helped to open last: a number on its own disk, and no secret.

What a client knows of a sum lies in its node's memory, where Flower keeps it by a run of its own.
A coordinator that goes on after a stop is another run to Flower, and a node may have been started
anew.  What must outlast both is that one sum is opened once: two sums over other survivors would,
by their difference, show single clients' numbers.
"""

from __future__ import annotations

from pathlib import Path

from fedloom.disk import held, write_whole
from fedloom.errors import Refusal
from fedloom.local.home import VARIABLE, folder_of

_FILE, _LOCK = "opened", "opened.lock"
_LOCK_SECONDS = 10.0


def check_unopened(run: str, partition: int, number: int) -> None:
    """Refuse a sum that this client has helped to open, or one before it.

    Parameters
    ----------
    run
        The run's token, which its server draws.
    number
        Of the sum; within a run each is higher than the last.

    Raises
    ------
    Refusal
        Also if it cannot be told which was the last one.
    """
    path = _place(run, partition)
    try:
        last = int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{path} cannot be read ({error}), so client {partition} cannot tell which sums of this"
            " run it has opened; start a new run"
        ) from error
    if number <= last:
        raise Refusal(
            f"client {partition} has opened sum {last} of this run, sum {number} came: over other"
            " survivors it would show what single clients sent; start a new run"
        )


def enter_opened(run: str, partition: int, number: int) -> None:
    """Write down that a sum is about to be opened, before anything is told; refuse a second time.

    Raises
    ------
    Refusal
        As ``check_unopened`` does.
    """
    path = _place(run, partition)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with held(path.with_name(_LOCK), seconds=_LOCK_SECONDS):  # two may be asked at once
            check_unopened(run, partition, number)
            write_whole(path, f"{number}\n".encode("ascii"))
    except OSError as error:
        raise Refusal(
            f"client {partition} opens no sum that it cannot write down ({error}); give its node a"
            f" folder that it can write to by {VARIABLE}"
        ) from error


def _place(run: str, partition: int) -> Path:
    return folder_of(run, partition) / _FILE
