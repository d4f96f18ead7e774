"""What kills a real federation's processes, and what its lines carry meanwhile.

One SuperLink and two SuperNodes with files of their own, brought up as on three machines; between
them stands a recorder that takes TLS off and puts it on again.  Two runs share them.  In the first
the coordinator's machine loses its power in round 2; all that the lines carried, before and after,
is looked through.  In the second a node's client process is killed, and then the ServerApp.  Both
are held against runs in this process with the same seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Error, Message

from fedloom import border
from fedloom.clients.workbench import workbench
from fedloom.config import RunConfig
from fedloom.data.prompts import prompt
from fedloom.data.questions import load_questions
from fedloom.flat import toml_lines
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, serve_on

from crashes import told
from deployments import (
    Up,
    below,
    change,
    fedloom,
    free_ports,
    start_again,
    start_run,
    values,
    wait_for_training,
    wait_until,
)
from runs import rows
from spies import Spied, found, of_tokens, of_words, spy
from wiretap import heard, tap

pytestmark = pytest.mark.slow


@dataclass
class Lab:
    """A federation's processes, and where its wires are written down."""

    folder: Path
    tables: Path
    wires: Path
    ups: dict[int, Up] = field(default_factory=dict)
    """By node; the coordinator is 0."""

    def recipe(self, name: str, **changes) -> RunConfig:
        small = {
            "name": name,
            "output": str(self.folder.parent),
            "rounds": 2,
            "clients__count": 2,
            "model__source": "tiny:llama",
            "model__device": "cpu",
            "data__source": f"path:{self.tables}",
            "data__split": "files",
            "data__max_train": 6,
            "data__max_test": 2,
            "data__min_train": 4,
            "data__min_test": 2,
            "memory__chunk": 16,
            "train__max_steps": 2,
            "train__learning_rate": 0.01,
            "evaluation__with_training": True,
        }
        return RunConfig().replaced(**{**small, **changes})

    def write(self, config: RunConfig) -> Path:
        file = self.folder.parent / f"{config.name}.toml"
        file.write_text(toml_lines(config.flat()))
        return file

    def log(self, config: RunConfig) -> Path:
        return self.folder.parent / f"{config.name}.log"

    def resume(self, config: RunConfig) -> None:
        run = self.folder.parent / config.name
        done = fedloom("run", "--resume", run, "--on", self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "goes on after round 1" in done.stdout


def write_rows(path: Path, seed: int) -> None:
    """Write questions in words that nobody else has: what is found of them was theirs."""
    random = np.random.default_rng(seed)

    def words(count: int) -> str:
        letters = random.choice(list("bcdfghjklmnpqrstvwxz"), (count, 5))
        return " ".join(map("".join, letters))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(12):
            choices = [words(2) for _ in range(4)]
            row = {"question": words(6), "choices": choices, "subject": "astronomy"}
            file.write(json.dumps({**row, "answer": int(np.argmin(choices))}) + "\n")


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    """Node 1 keeps its model loaded, as nodes do; node 2 trains in the process Flower starts."""
    place = tmp_path_factory.mktemp("lab")
    lab = Lab(place / "d", place / "tables", place / "wires")
    lab.tables.mkdir()
    port, tapped, *node_ports = free_ports(4)
    done = fedloom("deploy", "init", lab.folder, "--nodes", "2", "--port", str(port))
    assert done.returncode == 0, done.stderr
    for number, own in enumerate(node_ports, start=1):
        node = lab.folder / f"nodes/{number}"
        write_rows(lab.tables / f"node {number}.jsonl", number)
        (node / "rows.jsonl").write_bytes((lab.tables / f"node {number}.jsonl").read_bytes())
        change(node / "node.toml", 'data = ""', 'data = "rows.jsonl"')
        change(node / "node.toml", f"{9100 + number}", str(own))
        change(node / "node.toml", f":{port}", f":{tapped}")
    change(lab.folder / "nodes/2/node.toml", 'warm = "on"', 'warm = "off"')
    recorder = tap(lab.folder / "coordinator", tapped, port, lab.wires)
    try:
        lab.ups[0] = Up(lab.folder / "coordinator")
        lab.ups[0].wait_for("takes nodes at")
        lab.ups |= {number: Up(lab.folder / f"nodes/{number}") for number in (1, 2)}
        for number in (1, 2):
            lab.ups[number].wait_for("1 node connected")
        yield lab
    finally:
        for up in reversed(lab.ups.values()):
            up.stop()
        recorder.terminate()
        recorder.wait()


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cut(lab) -> Spied:
    """A run whose coordinator's machine loses its power in round 2, and the same run unhurt."""
    config = lab.recipe("cut", server__rule="ffa")
    run = start_run(lab.write(config), "--on", lab.folder, log=lab.log(config))
    wait_for_training(run, lab.folder.parent / "cut", server_round=2)
    wait_until(lambda: bool(below(lab.ups[2].process.pid, "flwr-clientapp")))
    doomed = below(lab.ups[0].process.pid, "")
    assert len(doomed) >= 3  # SuperLink, SuperExec, ServerApp
    kill([run.pid, lab.ups[0].process.pid, *doomed])
    assert run.wait() == lab.ups[0].ends() == -signal.SIGKILL
    lab.ups[0].log.unlink()
    lab.ups[0] = Up(lab.folder / "coordinator")  # its supervisor, when the power is back
    lab.ups[0].wait_for("takes nodes at")
    assert lab.ups[2].ends() == 1  # a stranger to the new SuperLink; node 1 is seen to by ``up``
    lab.ups[2] = start_again(lab.folder / "nodes/2")
    lab.resume(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_STATE", str(lab.folder.parent / "clients"))
        return spy(config.replaced(name="whole"))


def same(lab: Lab, one: str, other: str) -> None:
    """Hold two runs against each other: adapter, metrics and ledger."""
    there, here = (lab.folder.parent / name for name in (one, other))
    assert (there / "adapter/digest.txt").read_text() == (here / "adapter/digest.txt").read_text()
    metrics, wanted = (
        sorted(
            json.dumps({k: v for k, v in row.items() if k != "gpu"}, sort_keys=True)
            for row in told(lab.recipe(name), "metrics")
        )
        for name in (one, other)
    )
    assert metrics == wanted
    assert values(there) == values(here)
    assert rows(there, "events")[-1]["status"] == "completed"


def test_a_coordinator_that_lost_its_power_goes_on_to_the_same_bits(lab, cut):
    same(lab, "cut", "whole")
    (resumed,) = [e for e in rows(lab.folder.parent / "cut", "events") if e["event"] == "resumed"]
    assert (resumed["after"], resumed["absent"]) == (1, [])


def test_the_lines_carried_updates_and_nothing_else_of_a_client(lab, cut):
    """What the nodes had in memory is what this process had: their adapters are equal."""
    wires = heard(lab.wires)
    asked = [q for file in lab.tables.iterdir() for q in load_questions(f"path:{file}")]
    texts = [text for q in asked for text in (q.question, *q.choices)]
    assert len(texts) == 2 * 12 * 5
    for codec in ("utf-8", "utf-16-le", "utf-16-be"):
        assert not found(of_words(texts, codec), wires), codec
    tokens = [workbench(cut.config).base.tokenizer.encode(prompt(q)) for q in asked]
    for kind in (np.int64, np.int32):
        assert not found(of_tokens(tokens, kind), wires)
    for name, numbers in cut.secret_numbers().items():
        assert not found(numbers, wires), name
    updates = cut.updates()
    assert len(found(updates, wires)) > 0.99 * len(updates)  # the look does find
    for known in (b"gold-ce-sum", b"lora_B", b'"tiny:llama"'):  # plain, in zlib, in a zip file
        assert any(known in wire for wire in wires), known


class Losing(InProcessGrid):
    """Client 1's answer of round 1 is lost."""

    def _deliver(self, name: str, message: Message) -> Message:
        trains = message.metadata.message_type.startswith("train")
        first = trains and border.config_of(message.content)["round"] == 1
        if first and message.metadata.dst_node_id == list(self._contexts)[1]:
            message.metadata.__dict__["_message_id"] = name
            return Message(Error(8, "ClientApp stopped responding."), reply_to=message)
        return super()._deliver(name, message)


def test_a_killed_client_process_is_named_and_a_killed_server_app_goes_on(
    lab, tmp_path, monkeypatch
):
    """SCAFFOLD: the server and each client remember something from round to round."""
    config = lab.recipe("killed", baseline="scaffold")
    run = start_run(lab.write(config), "--on", lab.folder, log=lab.log(config))
    folder = lab.folder.parent / "killed"
    wait_for_training(run, folder, server_round=1)
    training: set[int] = set()

    def torch_is_there() -> bool:
        """Whether node 2's client process has the message: torch is imported for it."""
        for pid in below(lab.ups[2].process.pid, "flwr-clientapp"):
            with contextlib.suppress(OSError):  # gone since the look
                if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                    training.add(pid)
        return bool(training)

    wait_until(torch_is_there)
    kill(training)
    wait_for_training(run, folder, server_round=2)
    lost = [e for e in rows(folder, "events") if e["event"] == "client-failed"]
    assert [(e["phase"], e["round"], e["partition"]) for e in lost] == [("train", 1, 1)]
    assert "stopped responding" in lost[0]["reason"]
    wait_until(lambda: bool(below(lab.ups[1].process.pid, "flwr-clientapp")))
    (server,) = below(lab.ups[0].process.pid, "flwr-serverapp")
    kill([run.pid, server])
    assert run.wait() == -signal.SIGKILL
    lab.resume(config)
    monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path / "own"))
    whole = config.replaced(name="unkilled")
    serve_on(Losing(client_app.app, 2, whole.flat()), server_app.app, whole)
    same(lab, "killed", "unkilled")
