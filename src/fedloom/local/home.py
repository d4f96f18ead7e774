# SPDX-License-Identifier: Apache-2.0
"""``Home``: what one client keeps between rounds, on its own disk, by run and partition.

LoRA under ``share = "memory"``, SCAFFOLD's controls, personal adapters and the like.  A client's
object lives for one message and a process serves many clients, so nothing of this may live in
memory; Flower's context would ship it through Ray at each call.

The folder is the node's choice and never the coordinator's: ``FEDLOOM_STATE``, else the user's
state folder.  ``fedloom run`` points it at ``clients`` in the run's folder.  Nothing is removed at
the end: a personal adapter is what the run was for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedloom.disk import sweep, write_whole
from fedloom.errors import Refusal
from fedloom.wire import Arrays, arrays_digest

VARIABLE = "FEDLOOM_STATE"


class Home:
    """What one partition keeps in one run; every file is of one purpose and one round.

    Parameters
    ----------
    run
        The run's token, which its server draws: hexadecimal, as it becomes a folder.
    partition
        Whose home this is.
    manifest
        Digest of the run's manifest; what was kept under another one is refused.
    """

    def __init__(self, run: str, partition: int, manifest: str) -> None:
        self._run, self._partition, self._manifest = run, partition, manifest

    def keep(self, purpose: str, arrays: Arrays, server_round: int) -> None:
        """Write what is left after a round, whole or not at all.

        A run that was stopped may repeat this round or, if its server's last checkpoint is damaged,
        the one before it; what those two start from is kept too, and all else removed.
        """
        about = {
            "manifest": self._manifest,
            "round": str(server_round),
            "digest": arrays_digest(arrays),
        }
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{purpose}-{server_round:06d}.safetensors"
        write_whole(path, save(dict(arrays), metadata=about))
        rounds = [held for held, _ in self._held(purpose) if held <= server_round]
        needed = {server_round, _newest(rounds, server_round), _newest(rounds, server_round - 1)}
        for held, file in list(self._held(purpose)):
            if held not in needed:
                file.unlink()

    def find(self, purpose: str, before: int) -> dict[str, NDArray[Any]] | None:
        """Read the newest of what was kept before a round, or ``None``.

        Raises
        ------
        Refusal
            If the file is damaged or belongs to another manifest.
        """
        files = {held: file for held, file in self._held(purpose) if held < before}
        return self._read(files[max(files)]) if files else None

    def rewind(self, server_round: int) -> None:
        """Remove what was kept in this round or later: it is to be trained now.

        What a torn attempt left would be taken for this round's if the new attempt failed.
        """
        if not self._run:  # a server that keeps no state need not name a run
            return
        sweep(self._folder())
        for file in list(self._folder().glob("*-*.safetensors")):
            number = file.stem.rpartition("-")[2]
            if number.isdigit() and int(number) >= server_round:
                file.unlink()

    def _folder(self) -> Path:
        return folder_of(self._run, self._partition)

    def _held(self, purpose: str) -> Iterator[tuple[int, Path]]:
        for file in sorted(self._folder().glob(f"{purpose}-*.safetensors")):
            number = file.stem.removeprefix(f"{purpose}-")
            if number.isdigit():
                yield int(number), file

    def _read(self, file: Path) -> dict[str, NDArray[Any]]:
        try:
            with safe_open(file, framework="numpy") as opened:
                about = opened.metadata() or {}
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise Refusal(f"{file} cannot be read ({error}); remove it to start anew") from error
        if about.get("manifest") != self._manifest:
            raise Refusal(
                f"{file} was kept under manifest {str(about.get('manifest'))[:16]},"
                f" {self._manifest[:16]} is this run's; remove it to start anew"
            )
        if about.get("digest") != arrays_digest(arrays):
            raise Refusal(f"{file} is damaged: its digest differs; remove it to start anew")
        return arrays


def _newest(rounds: list[int], before: int) -> int:
    return max((held for held in rounds if held < before), default=-1)


def folder_of(run: str, partition: int) -> Path:
    """Return the folder of what one partition keeps of a run; it need not be there.

    Raises
    ------
    Refusal
        If the run's token is no folder's name.
    """
    if not re.fullmatch(r"[0-9a-f]{8,64}", run):
        raise Refusal(
            f'run token "{run[:80]}": expected 8 to 64 hexadecimal digits, as this method keeps'
            " files by it; use the same fedloom version on the server"
        )
    return root() / run / f"{partition:05d}"


def root() -> Path:
    """Return the folder of all runs' homes on this machine."""
    told = os.environ.get(VARIABLE, "")
    return Path(told).expanduser() if told else platformdirs.user_state_path("fedloom")
