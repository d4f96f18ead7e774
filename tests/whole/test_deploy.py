"""A federation of processes: TLS, node keys, gates, and the same bits as in a simulation.

One SuperLink and three SuperNodes, each brought up by ``fedloom deploy up`` as on a machine of its
own.  On an idle machine of two cores no test takes two minutes; most of it is Flower starting a
process for each message, on one of the nodes with torch in it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom import certificates
from fedloom.clients import warm, warm_frames
from fedloom.config import RunConfig
from fedloom.flat import toml_lines
from fedloom.simulations.deployed import DeployedSuperLink
from fedloom.simulations.deployment import Deployment
from fedloom.simulations.processes import marked, process_table

from crashes import told
from deployments import (
    PATIENCE,
    Up,
    change,
    fedloom,
    free_ports,
    run_both,
    start_again,
    values,
    wait_until,
)
from meetings import MODELS, write_fusers
from runs import rows

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Iterator[tuple[Path, dict[int, Up]]]:
    """A coordinator that lets code in, for one test's sake, and three nodes that do not.

    Two keep their model loaded, as nodes do by default; the third starts anew for each message.
    """
    folder = tmp_path_factory.mktemp("federation") / "d"
    port, *node_ports = free_ports(4)
    began = time.monotonic()
    done = fedloom("deploy", "init", folder, "--nodes", "3", "--port", str(port))
    assert done.returncode == 0, done.stderr
    change(folder / "coordinator/coordinator.toml", '"refuse"', '"allow"')
    for number, own in enumerate(node_ports, start=1):
        change(folder / f"nodes/{number}/node.toml", f"{9100 + number}", str(own))
    change(folder / "nodes/3/node.toml", 'warm = "on"', 'warm = "off"')
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
        for home in ("home", "home/model"):
            assert marked(f"FLWR_HOME={part.part / home}") == set()
        assert not list(part.part.glob("home/warm/*.sock"))


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


@pytest.fixture
def meeting(questions, tmp_path):
    """``meeting()``: three small models of three architectures, two questions each."""
    flat = {
        "method": "fedrefine",
        "rounds": 1,
        "refine.models": ",".join(f"tiny:{family}" for family in MODELS),
        "refine.fusers": str(write_fusers(tmp_path / "fusers")),
        "refine.questions": 2,
        "refine.deadline-seconds": float(PATIENCE),
        "data.source": f"path:{questions}",
        "data.min-train": 4,
        "data.min-test": 2,
        "clients.count": 3,
        "output": str(tmp_path),
    }
    return lambda **changes: RunConfig.from_flat({**flat, **changes})


def test_fedrefine_on_nodes_gives_the_simulations_scores(federation, meeting, tmp_path):
    """Keys and nonces are fresh in each run; what is read out of the caches is the same."""
    config = meeting()
    there, here = run_both(config, federation[0], tmp_path)
    sent = [[row for row in values(f) if row[1] != "keep_fusers"] for f in (there, here)]
    assert sent[0] == sent[1]  # but fusers, which a node that has them is not sent again
    scores, others = (
        [
            {key: value for key, value in row.items() if "seconds" not in key}
            for row in told(config.replaced(name=f.name), "metrics")
        ]
        for f in (there, here)
    )
    assert scores == others
    pairs, others = (
        [row for row in told(config.replaced(name=f.name), "events") if row["event"] == "pair"]
        for f in (there, here)
    )
    assert pairs == others
    assert len(pairs) == 6
    assert all(pair["used"] == pair["rows"] == 2 for pair in pairs)
    scored = {(row["phase"], row["partition"]): row for row in scores if "partition" in row}
    for partition in range(3):  # what came over the wire was heard
        among, alone = (scored[phase, partition] for phase in ("evaluate", "frozen"))
        assert among["gold-ce-sum"] != alone["gold-ce-sum"]


@pytest.mark.parametrize("mutual", [0, 2])
def test_fedrefine_on_nodes_gives_the_simulations_answers(federation, meeting, tmp_path, mutual):
    """One receiver's; and in two exchanges among all, everyone's."""
    one = {"refine.question": "what is it?", "refine.new-tokens": 6}
    one |= {"refine.mutual": mutual} if mutual else {"refine.receiver": 2}
    found = []
    for folder in run_both(meeting(**one), federation[0], tmp_path):
        answers = [row for row in rows(folder, "events") if row["event"] == "answer"]
        said = {row["partition"]: json.loads(bytes.fromhex(row["sealed"])) for row in answers}
        assert sorted(said) == ([0, 1, 2] if mutual else [2])
        found.append(said)
    assert found[0] == found[1]
    assert all(said["answer"] != said["standalone"] for said in found[0].values())


def test_a_restarted_node_answers_with_the_base_that_its_server_has(
    federation, recipe, tmp_path, monkeypatch
):
    """Its SuperNode is killed with no warning; ``deploy up`` starts it again by itself."""
    folder, ups = federation
    own = folder / "nodes/1/home/warm"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert stat.S_IMODE((own / "model.sock").stat().st_mode) == 0o600
    monkeypatch.setenv(warm_frames.VARIABLE, str(own))
    before = warm.call(warm_frames.STOP)["pid"]  # a user's `fedloom node stop`
    wait_until(lambda: warm.call(warm_frames.PING).get("pid", before) != before)
    server = warm.call(warm_frames.PING)["pid"]
    config = recipe(clients__count=3, rounds=1, model__device="cpu")
    file = tmp_path / "recipe.toml"
    file.write_text(toml_lines(config.flat()))

    def loads(name: str) -> list[tuple[int, int]]:
        done = fedloom("run", file, "--on", folder, "--name", name)
        assert done.returncode == 0, done.stdout + done.stderr
        trained = [row for row in rows(tmp_path / name, "metrics") if row["phase"] == "train"]
        return [(row["base-loads"], row["pid"]) for row in trained if row["partition"] == 0]

    assert loads("before") == [(1, server)]
    (root,) = {p for p, e in process_table().items() if e.parent == ups[1].process.pid} - {server}
    os.kill(root, signal.SIGKILL)
    ups[1].wait_for("node 1 has joined again")
    assert "its model stays, and it is started again" in ups[1].said()
    assert loads("after") == [(1, server)]


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
