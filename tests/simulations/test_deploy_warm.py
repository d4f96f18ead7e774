"""A node's model server is kept going, dies with its keeper, and is nobody else's to reach."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.clients import warm, warm_frames
from fedloom.errors import Refusal
from fedloom.simulations.deploy_init import Plan, init
from fedloom.simulations.deploy_warm import Keeper, ModelServer
from fedloom.simulations.deployment import Deployment, Node
from fedloom.simulations.processes import marked, process_table

KEEP = """
import sys, time
from pathlib import Path
from fedloom.clients.warm_frames import socket_in
from fedloom.simulations.deploy_warm import Keeper, ModelServer
from fedloom.simulations.deployment import Node
node = Node.read(Path(sys.argv[1]))
keeper = Keeper(ModelServer(node, socket_in(node.warm_folder())), print)
while True:
    keeper.check()
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("kept") / "d"
    init(made, Plan(nodes=2, hosts=[]))
    for number in (1, 2):
        (made / f"nodes/{number}/home").mkdir(mode=0o700)
    return made


@pytest.fixture
def node(folder, monkeypatch) -> Node:
    monkeypatch.delenv(warm_frames.VARIABLE, raising=False)
    return Deployment.read(folder).nodes[1]


def server_of(node: Node) -> ModelServer:
    return ModelServer(node, warm_frames.socket_in(node.warm_folder()))


def pid_at(node: Node) -> int:
    """Return who answers at a node's socket; 0 if nobody does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(warm_frames.VARIABLE, str(node.warm_folder()))
        return warm.call(warm_frames.PING).get("pid", 0)


def wait_until(true: Callable[[], bool], check: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 300  # of a busy machine
    while not true():
        check()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_dies_is_started_again_and_ends_with_its_keeper(node):
    said: list[str] = []
    keeper = Keeper(server_of(node), said.append)
    try:
        wait_until(lambda: pid_at(node) > 0)
        first = pid_at(node)
        socket = node.warm_folder() / "model.sock"
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (socket.parent, socket)]
        assert modes == [0o700, 0o600]
        assert socket.parent == node.home / "warm"
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: pid_at(node) not in (0, first), keeper.check)
        told = "fedloom: node 1 model server ended with code -9, and is started again in 2 s"
        assert said == [told]
    finally:
        keeper.end()
    assert pid_at(node) == 0
    assert not socket.exists()
    assert marked(f"FLWR_HOME={node.home / 'model'}") == set()


def test_a_server_that_somebody_else_keeps_is_used_and_left_alone(node):
    server = server_of(node)
    with subprocess.Popen(server.command()) as theirs:
        try:
            wait_until(lambda: pid_at(node) == theirs.pid)
            keeper = Keeper(server, print)
            wait_until(lambda: keeper._running is None, keeper.check)
            keeper.check()
            keeper.end()
            assert pid_at(node) == theirs.pid
        finally:
            theirs.terminate()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word of a parent's death")
def test_no_server_outlives_whoever_kept_it(node):
    keeper = subprocess.Popen([sys.executable, "-c", KEEP, str(node.folder)])
    try:
        wait_until(lambda: pid_at(node) > 0)
        server = pid_at(node)
        keeper.kill()
        keeper.wait()
        wait_until(lambda: server not in process_table())
    finally:
        keeper.kill()
        keeper.wait()
    assert marked(f"FLWR_HOME={node.home / 'model'}") == set()


def test_the_nodes_word_and_the_environments(folder, node, tmp_path, monkeypatch):
    second = Deployment.read(folder).nodes[2]
    told = node.environment()
    assert (told["FEDLOOM_WARM"], told["FEDLOOM_WARM_KEPT"]) == (str(node.home / "warm"), "1")
    assert ModelServer(node, tmp_path).environment()["FLWR_HOME"] == str(node.home / "model")
    monkeypatch.setenv("FEDLOOM_WARM", str(tmp_path / "w"))
    assert [n.warm_folder() for n in (node, second)] == [tmp_path / "w/1", tmp_path / "w/2"]
    monkeypatch.setenv("FEDLOOM_WARM", "off")
    assert node.warm_folder() is None
    assert node.environment()["FEDLOOM_WARM"] == "off"
    monkeypatch.delenv("FEDLOOM_WARM")
    text = (second.folder / "node.toml").read_text()
    cold = tmp_path / "cold"
    cold.mkdir()
    (cold / "node.toml").write_text(text.replace('warm = "on"', 'warm = "off"'))
    assert Node.read(cold).warm_folder() is None
    (cold / "node.toml").write_text(text.replace('warm = "on"', 'warm = "hot"'))
    with pytest.raises(Refusal, match='warm = "hot", expected on or off'):
        Node.read(cold)
    deep = tmp_path / "/".join("d" * 20 for _ in range(5))
    deep.mkdir(parents=True)
    (deep / "node.toml").write_text(text)
    short = Node.read(deep).warm_folder()
    assert short is not None
    assert short.name.startswith(f"fedloom-{os.getuid()}-")


def test_where_a_server_is_kept_the_asker_starts_none(tmp_path, monkeypatch):
    """It waits for the keeper's next one; nobody would end a server that a message started."""
    monkeypatch.setattr(warm, "START_SECONDS", 0.3)
    monkeypatch.setenv(warm_frames.KEPT, "1")
    before = len(warm._STARTED)
    with pytest.raises(RuntimeError, match="no model server could be started"):
        warm._connected(tmp_path / "model.sock", warm.APP)
    assert len(warm._STARTED) == before
