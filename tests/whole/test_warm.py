"""A process for each message, as a SuperNode starts them, and one model server behind them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Message

from fedloom.clients import warm, warm_frames
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on

from runs import adapter_of, equal, rows

pytestmark = pytest.mark.slow

CLIENT_APP = """
import sys
from pathlib import Path
from flwr.supercore.task_identity import TaskIdentity
from fedloom.clients import warm_frames
from fedloom.simulations.client_app import app
path = Path(sys.argv[1])
task = warm_frames.unpack_task(path.read_bytes())
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.ids
reply = app(task.message, task.context)
path.write_bytes(b"".join(warm_frames.pack_task(reply, task.context)))
sys.exit(3 if "torch" in sys.modules else 0)
"""


class Spawning(InProcessGrid):
    """Starts a ClientApp's process for each message; kills the model server before one of them."""

    def __init__(self, *given, folder: Path, kill_before: int = -1) -> None:
        super().__init__(*given)
        self.folder, self.kill_before, self.spawned, self.servers = folder, kill_before, 0, set()

    def _deliver(self, name: str, message: Message) -> Message:
        if self.spawned == self.kill_before:
            os.kill(warm.call(warm_frames.PING)["pid"], signal.SIGKILL)
        self.spawned += 1
        message.metadata.__dict__["_message_id"] = name
        context = self._contexts[message.metadata.dst_node_id]
        path = self.folder / name
        path.write_bytes(b"".join(warm_frames.pack_task(message, context)))
        done = subprocess.run(
            [sys.executable, "-c", CLIENT_APP, str(path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr  # 3: the thin caller imported torch
        self.servers.add(warm.call(warm_frames.PING)["pid"])
        answer = warm_frames.unpack_task(path.read_bytes())
        context.state = answer.context.state
        return answer.message


@pytest.fixture
def model_server(tmp_path, monkeypatch):
    monkeypatch.setenv(warm_frames.VARIABLE, str(tmp_path / "warm"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    warm.call(warm_frames.STOP)


@pytest.mark.parametrize("kill_before", [-1, 6], ids=["left alone", "killed between two messages"])
def test_many_processes_load_the_base_once_and_give_the_same_bits(
    recipe, tmp_path, model_server, kill_before
):
    config = recipe(clients__count=2, rounds=1)
    folder = tmp_path / "messages"
    folder.mkdir()
    told = {"folder": folder, "kill_before": kill_before}
    grid = Spawning(client_app.app, 2, config.flat(), **told)
    serve_on(grid, server_app.app, config)
    assert grid.spawned == 9
    assert len(grid.servers) == (1 if kill_before < 0 else 2)
    trained = [r for r in rows(Path(config.output) / config.name, "metrics") if "base-loads" in r]
    assert len(trained) == 2
    assert {row["base-loads"] for row in trained} == {1}
    assert {row["pid"] for row in trained} <= grid.servers
    status = warm.call(warm_frames.PING)
    assert status["base-loads"] == 1
    direct = config.replaced(name="direct")
    run_in_process(direct)  # heeds no FEDLOOM_WARM
    assert warm.call(warm_frames.PING)["answered"] == status["answered"]
    assert equal(adapter_of(config), adapter_of(direct))
