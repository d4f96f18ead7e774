# SPDX-License-Identifier: Apache-2.0
"""``flwr-simulation`` with workers that are started again when they die, and asked again.

Flower puts a worker of Ray's that has died (out of memory, a fault in a library) back on top of its
pool, where it swallows one message after another in no time: a run ends "completed" in which most
clients failed.  Ray would start the worker anew and repeat the message; Flower has no knob for
that, but hands the client's resources to Ray as they are.  So the command that our SuperLink starts
for a run comes through here, and two more words are among them.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

COMMAND = "flwr-simulation"
ENDURANCE = {"max_restarts": -1, "max_task_retries": 1}
"""Ray's words: a worker is started again however often, and a message is repeated once.

A client repeats it from the same start, so the bits are those of a run in which nothing died.  A
message that kills two workers fails like any other, by its client's name.
"""


def write_gate(folder: Path) -> Path:
    """Write a command of Flower's name that comes through here; for the front of a PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    script, python = folder / COMMAND, shlex.quote(sys.executable)
    script.write_text(f'#!/bin/sh\nexec {python} -P -m {__name__} {COMMAND} "$@"\n', "utf-8")
    script.chmod(0o755)
    return folder


def _endure() -> None:
    app: Any = importlib.import_module("flwr.simulation.app")
    given = app._run_simulation_settings  # absent in another Flower: then nothing starts

    def settings(told: Any) -> tuple[int, str, Any, bool, bool]:
        nodes, backend, config, verbose, growth = given(told)
        resources = config["client_resources"]
        if resources:  # else Flower's own defaults are to be taken
            resources.update(ENDURANCE)
        return nodes, backend, config, verbose, growth

    app._run_simulation_settings = settings


def main() -> None:
    """Run Flower's command."""
    sys.argv = sys.argv[1:]
    _endure()
    (entry,) = metadata.entry_points(group="console_scripts", name=COMMAND)
    sys.exit(entry.load()())


if __name__ == "__main__":
    main()
