"""``fedloom deploy up`` and ``fedloom run --on`` as a user types them, each a process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.flat import toml_lines
from fedloom.simulations.inprocess import run_in_process
from fedloom.simulations.processes import process_table

from runs import rows

PATIENCE = 600  # seconds; only a machine that is busy with other things needs them


class Up:
    """``fedloom deploy up`` of one part, with what it says in a file."""

    def __init__(self, part: Path) -> None:
        self.part, self.log = part, part.parent / f"{part.name}.log"
        command = [sys.executable, "-m", "fedloom.simulations", "deploy", "up", str(part)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while words not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.3)

    def ends(self) -> int:
        return self.process.wait(PATIENCE)

    def stop(self) -> int:
        self.process.terminate()
        return self.ends()


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def fedloom(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedloom.simulations", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)


@contextmanager
def two_nodes(folder: Path, settle: Callable[[int, Path], None]) -> Iterator[None]:
    """Bring up a coordinator and two nodes with TLS and keys; ``settle`` is given each's folder."""
    port, *node_ports = free_ports(3)
    done = fedloom("deploy", "init", folder, "--nodes", "2", "--port", str(port))
    assert done.returncode == 0, done.stderr
    for number, own in enumerate(node_ports, start=1):
        node = folder / f"nodes/{number}"
        change(node / "node.toml", f"{9100 + number}", str(own))
        settle(number, node)
    ups = [Up(folder / "coordinator")]
    try:
        ups[0].wait_for("takes nodes at")
        ups += [Up(folder / f"nodes/{number}") for number in (1, 2)]
        for up in ups[1:]:
            up.wait_for("1 node connected")
        yield
    finally:
        for up in reversed(ups):
            up.stop()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def start_again(part: Path) -> Up:
    """Do as a supervisor would: for a minute the SuperLink has the dead node online still."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        (part.parent / f"{part.name}.log").unlink(missing_ok=True)
        up = Up(part)
        while up.process.poll() is None:
            if "1 node connected" in up.said():
                return up
            time.sleep(0.3)
        assert "Failed to activate SuperNode" in up.said(), up.said()
        time.sleep(5.0)
    raise AssertionError(f"{part} could not join again")


def change(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def run_both(config, folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Run a recipe on the nodes and in this process; return the two folders."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toml_lines(config.flat()))
    done = fedloom("run", recipe, "--on", folder, "--name", "nodes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report: " in done.stdout
    run_in_process(config.replaced(name="here"))
    there, here = (Path(config.output) / name for name in ("nodes", "here"))
    assert (there / "report.html").exists()
    assert {f.name for f in here.iterdir()} <= {f.name for f in there.iterdir()}
    return there, here


def values(folder: Path) -> list[tuple]:
    """Return who sent how many bytes of array values, when; framing holds node ids."""
    ledger = [row for row in rows(folder, "ledger") if row["dtype"] != "framing"]
    return sorted(
        (r["round"], r["phase"], r["direction"], r["partition"], r["bytes"]) for r in ledger
    )


def below(pid: int, word: str) -> set[int]:
    """Return the live descendants of a process whose command line holds a word."""
    table, told = process_table(), word.encode()

    def is_below(one: int) -> bool:
        return one in table and (table[one].parent == pid or is_below(table[one].parent))

    found = set()
    for one in filter(is_below, table):
        with contextlib.suppress(OSError):  # gone since the look
            if told in Path(f"/proc/{one}/cmdline").read_bytes():
                found.add(one)
    return found


def start_run(*arguments: str | Path, log: Path) -> subprocess.Popen[bytes]:
    """Begin ``fedloom run`` and go on."""
    command = [sys.executable, "-m", "fedloom.simulations", "run", *map(str, arguments)]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def wait_for_training(run: subprocess.Popen[bytes], folder: Path, server_round: int) -> None:
    """Wait until a run has asked its clients to train in a round."""

    def asked() -> bool:
        assert run.poll() is None, "the run ended before it could be hit"
        events = rows(folder, "events") if (folder / "events.jsonl").exists() else []
        return any((e.get("phase"), e.get("round")) == ("train", server_round) for e in events)

    wait_until(asked)
