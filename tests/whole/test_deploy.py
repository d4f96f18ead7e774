"""A federation of processes: TLS, node keys, gates, and the same bits as in a simulation.

One SuperLink and three SuperNodes, each brought up by ``fedloom deploy up`` as on a machine of its
own.  On an idle machine of two cores no test takes two minutes; most of it is Flower starting a
process, with torch in it, for each message.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom import certificates
from fedloom.flat import toml_lines
from fedloom.simulations.deployed import DeployedSuperLink
from fedloom.simulations.deployment import Deployment
from fedloom.simulations.inprocess import run_in_process
from fedloom.simulations.processes import marked, process_table

from runs import rows

pytestmark = pytest.mark.slow
PATIENCE = 600  # seconds; only a machine that is busy with other things needs them

SERVER = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    messages = [Message(RecordDict(), node, "query.properties") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages, timeout=600))
    told = [r.error.reason if r.has_error() else "answered" for r in replies]
    Path(context.run_config["file"]).write_text("\\n".join(told))
"""
CLIENT = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
Path("{file}").write_text("code of the coordinator ran on a node")
app = ClientApp()

@app.query("properties")
def properties(message, context):
    return Message(RecordDict(), reply_to=message)
"""
APP = """
[project]
name = "with-code"
version = "0.1.0"
dependencies = []
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "withcode.server:app"
clientapp = "withcode.client:app"
[tool.flwr.app.config]
file = "{file}"
"""


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


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Iterator[tuple[Path, dict[int, Up]]]:
    """A coordinator that lets code in, for one test's sake, and three nodes that do not."""
    folder = tmp_path_factory.mktemp("federation") / "d"
    port, *node_ports = free_ports(4)
    began = time.monotonic()
    done = fedloom("deploy", "init", folder, "--nodes", "3", "--port", str(port))
    assert done.returncode == 0, done.stderr
    change(folder / "coordinator/coordinator.toml", '"refuse"', '"allow"')
    for number, own in enumerate(node_ports, start=1):
        change(folder / f"nodes/{number}/node.toml", f"{9100 + number}", str(own))
    coordinator = Up(folder / "coordinator")
    ups: dict[int, Up] = {}
    try:
        coordinator.wait_for("takes nodes at")
        ups |= {number: Up(folder / f"nodes/{number}") for number in (1, 2, 3)}
        for up in ups.values():
            up.wait_for("1 node connected")
        (folder / "joined").write_text(str(time.monotonic() - began))
        yield folder, ups
        assert [up.stop() for up in ups.values()] == [0, 0, 0]  # asked to stop, and did
        assert coordinator.stop() == 0
    finally:
        for up in (*ups.values(), coordinator):
            up.stop()
    for part in (coordinator, *ups.values()):
        assert marked(f"FLWR_HOME={part.part / 'home'}") == set()


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


def test_node_killed_in_a_round_is_named_and_joins_again(federation, digits, tmp_path):
    """The tests below want all three nodes, this one among them, and the simulation's bits."""
    folder, ups = federation
    # Flower starts a process for each message: what is long enough for that, this machine has told.
    patience = max(60.0, 1.5 * float((folder / "joined").read_text()))
    config = digits(
        clients__count=3, faast__alphas="0.6", data__dirichlet=1.0, name="killed",
        sampling__reply_seconds=patience,
    )  # fmt: skip
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toml_lines(config.flat()))
    command = [sys.executable, "-m", "fedloom.simulations", "run", str(recipe), "--on", str(folder)]
    began = time.monotonic()
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    events = tmp_path / "killed/events.jsonl"
    while not (events.exists() and '"phase": "train"' in events.read_text()):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < began + PATIENCE
        time.sleep(0.1)
    (root,) = [p for p, e in process_table().items() if e.parent == ups[3].process.pid]
    os.kill(root, signal.SIGKILL)
    assert ups[3].ends() == 1  # its supervisor's cue
    assert "node 3 ended with code -9" in ups[3].said()
    ups[3] = start_again(folder / "nodes/3")
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, said
    lost = [e for e in rows(tmp_path / "killed", "events") if e["event"] == "client-failed"]
    # Asked for its score in the minute before it may join again, it fails once more.
    assert {e["partition"] for e in lost} == {2}
    assert lost[0]["phase"] == "train"
    assert "client 2 dirichlet 2 failed in train" in said
    summed = [r["partition"] for r in rows(tmp_path / "killed", "metrics") if r["phase"] == "train"]
    assert sorted(summed) == [0, 1]
    last = json.loads(events.read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("end", "completed")
    status = fedloom("deploy", "status", folder)
    assert status.stdout.count("online") == 3, status.stdout


def test_faast_on_nodes_solves_the_simulations_weights(federation, digits, tmp_path):
    config = digits(clients__count=3, faast__alphas="0.6", data__dirichlet=1.0)
    there, here = run_both(config, federation[0], tmp_path)
    assert (there / "adapter/digest.txt").read_text() == (here / "adapter/digest.txt").read_text()
    assert values(there) == values(here)


def test_fednl_on_nodes_trains_the_simulations_adapter(federation, recipe, tmp_path):
    config = recipe(clients__count=3, rounds=1, model__device="cpu")
    there, here = run_both(config, federation[0], tmp_path)
    assert (there / "adapter/digest.txt").read_text() == (here / "adapter/digest.txt").read_text()
    assert values(there) == values(here)
    scores = [
        sorted(
            (r["partition"], r["gold-ce-sum"])
            for r in rows(f, "metrics")
            if r["phase"] == "evaluate"
        )
        for f in (there, here)
    ]
    assert scores[0] == scores[1]


def test_status_says_who_is_there(federation):
    done = fedloom("deploy", "status", federation[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("online") == 3
    again = Up(federation[0] / "nodes/1")  # the same node twice would take its own messages away
    assert again.ends() == 2
    assert "is up already" in again.said()


def stranger(federation: Path, tmp_path: Path) -> Path:
    """Copy a node's folder to another machine, so to say."""
    copy = tmp_path / "stranger"
    ignored = shutil.ignore_patterns("home", "state")
    shutil.copytree(federation / "nodes/1", copy, ignore=ignored)
    told = Deployment.read(copy).nodes[1]
    change(copy / "node.toml", f"port = {told.port}", f"port = {free_ports(1)[0]}")
    return copy


def test_node_whose_key_nobody_knows_is_refused(federation, tmp_path):
    copy = stranger(federation[0], tmp_path)
    private, _ = certificates.node_keys("stranger")
    (copy / "key").write_bytes(private)
    up = Up(copy)
    assert up.ends() == 1
    assert "Failed to activate SuperNode" in up.said()
    assert "fedloom: node 1 ended with code" in up.said()


def test_node_that_trusts_another_authority_is_not_talked_to(federation, tmp_path):
    copy = stranger(federation[0], tmp_path)
    (copy / "ca.crt").write_bytes(certificates.authority(2).certificate)
    up = Up(copy)
    assert up.ends() == 1
    assert "CERTIFICATE_VERIFY_FAILED" in up.said()


def test_app_with_code_is_refused_by_every_node(federation, tmp_path):
    ran, told = tmp_path / "ran.txt", tmp_path / "told.txt"
    app = tmp_path / "with-code"
    (app / "withcode").mkdir(parents=True)
    (app / "withcode/__init__.py").write_text("")
    (app / "withcode/server.py").write_text(SERVER)
    (app / "withcode/client.py").write_text(CLIENT.format(file=ran))
    (app / "pyproject.toml").write_text(APP.format(file=told))
    coordinator = Deployment.read(federation[0]).required()
    with DeployedSuperLink(coordinator, tmp_path / "log") as link:
        run = link.submit(app)
        status, details = link.wait(run, told.exists)
        assert status == "finished:completed", details + link.run_log(run)
    reasons = told.read_text().splitlines()
    assert len(reasons) == 3
    for reason in reasons:
        assert "the app brings withcode/" in reason
        assert "this machine runs only what is installed on it" in reason
    assert not ran.exists()
