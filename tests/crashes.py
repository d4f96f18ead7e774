"""Die in a run as ``kill -9`` would: in the middle of any write, and nobody cleans up."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fedloom.config import RunConfig
from fedloom.local import home
from fedloom.simulations import folder
from fedloom.simulations.inprocess import run_in_process
from fedloom.strategies import checkpoint, journal, shelf
from fedloom.wire import arrays_digest

_WRITERS = (home, folder, checkpoint, shelf)
_OF_THE_PROCESS = {
    "time", "seconds", "seconds-encoding", "seconds-summing", "solve-seconds", "forwards", "pid",
    "base-loads", "run",
}  # fmt: skip


def small(questions: Path, output: Path, **changes) -> RunConfig:
    """Three rounds of two clients, a step each."""
    build = {
        "rounds": 3,
        "clients__count": 2,
        "data__source": f"path:{questions}",
        "data__max_train": 4,
        "data__max_test": 2,
        "data__min_train": 4,
        "data__min_test": 2,
        "train__max_steps": 1,
        "train__learning_rate": 5e-3,
        "local__ala_passes": 2,
        "model__source": "tiny:llama",
        "memory__chunk": 16,
        "output": str(output),
    }
    return RunConfig().replaced(**{**build, **changes})


class Killed(BaseException):
    """Nobody catches this."""


@contextlib.contextmanager
def writes(die_at: str = "", nth: int = 1) -> Iterator[list[str]]:
    """Name all that is written; die half-way through the ``nth`` whose name begins so."""
    named: list[str] = []
    append, whole = journal._append_line, checkpoint.write_whole

    def seen(name: str) -> bool:
        named.append(name)
        return (
            bool(die_at)
            and name.startswith(die_at)
            and (sum(n.startswith(die_at) for n in named) == nth)
        )

    def appending(path: Path, text: str) -> None:
        row = json.loads(text)
        place = f"{row.get('event', row.get('direction', ''))} {row.get('phase', '')}"
        if seen(f"{path.stem} {row.get('round', '')} {place}"):
            with path.open("a") as file:
                file.write(text[: len(text) // 2])
            raise Killed
        append(path, text)

    def writing(path: Path, data: bytes) -> None:
        if seen(path.name):
            path.with_name(f".{path.name}.{os.getpid()}").write_bytes(data[: len(data) // 2])
            raise Killed
        whole(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_append_line", appending)
        for module in _WRITERS:
            patch.setattr(module, "write_whole", writing)
        yield named


def run_with_crashes(config, crashes: list[tuple[str, int]]) -> None:
    """Run, die at each of these places in turn, go on after each, and come to the end."""
    for place, nth in crashes:
        with writes(place, nth), pytest.raises(Killed):
            run_in_process(config)
        config = config.replaced(resume=True)
    run_in_process(config)


def told(config, kind: str) -> list[dict]:
    """Return a journal's rows without what is of the process that wrote them."""
    path = Path(config.output) / config.name / f"{kind}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k.removeprefix("local-") not in _OF_THE_PROCESS}
        for row in rows
        if row.get("event") != "resumed"
    ]


def left(folder: Path) -> dict[str, str]:
    """Return a digest of every file below a folder by its name, run tokens aside.

    Of arrays that of names and bits: safetensors writes its header in no fixed order.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = "/".join(p for p in path.relative_to(folder).parts if len(p) != 32)
        if path.suffix == ".safetensors":
            found[name] = arrays_digest(load_file(path))
        elif path.is_file():
            found[name] = path.read_text()
    return found
