"""Three SuperNodes, three architectures; one is killed amid its pass: the answer still comes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from fedloom.simulations.processes import Family, marked
from fedloom.simulations.superlink import environment, tool

from meetings import MODELS, events, write_fusers

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]  # where the nodes find a client of their own


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Federation:
    """A SuperLink and its SuperNodes, each a process; nothing of them outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.families = folder, free_port(), {}

    def start(self, name: str, *command: str) -> str:
        home = self.folder / name / "home"
        home.mkdir(parents=True)
        token = f"FEDLOOM_TEST={uuid.uuid4()}"
        own = {"FLWR_HOME": str(home), "FEDLOOM_STATE": str(self.folder / name / "state")}
        own |= dict([token.split("=")]) | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        seen = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        own["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, seen)])
        with (self.folder / f"{name}.log").open("wb") as log:
            root = subprocess.Popen(
                [tool(command[0]), *command[1:]],
                env={**environment(self.folder / name), **own},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.families[name] = Family(root, token)
        return token

    def superlink(self) -> None:
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        self.start("superlink", "flower-superlink", "--insecure", *where)
        for _ in range(600):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", self.port)):
                    return
            time.sleep(0.1)
        raise AssertionError((self.folder / "superlink.log").read_text())

    def node(self, partition: int, family: str) -> str:
        told = f"partition-id={partition} num-partitions=3 model='tiny:{family}'"
        link = ("--insecure", "--superlink", f"127.0.0.1:{self.port}")
        here = ("--host", "127.0.0.1", "--port", str(free_port()))
        name = f"node{partition}"
        return self.start(name, "flower-supernode", *link, *here, "--node-config", told)

    def end(self) -> None:
        for family in self.families.values():
            family.end(grace_seconds=0.5)


def kill(token: str) -> int:
    """Take a SuperNode and all that it started off the machine, as a power cut would."""
    pids = marked(token)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def wait_for(flag: Path, asked: subprocess.Popen[bytes], seconds: float = 2400) -> str:
    """Return what a node wrote there from amid its pass."""
    until = time.monotonic() + seconds
    while not (flag.exists() and flag.read_text()):
        assert asked.poll() is None, asked.communicate()[1].decode()[-2000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    return flag.read_text()


def test_a_sender_killed_amid_its_pass_is_a_fallback(tmp_path):
    fusers, runs = write_fusers(tmp_path / "fusers"), tmp_path / "runs"
    federation, flag, asked = Federation(tmp_path), tmp_path / "reading", None
    try:
        federation.superlink()
        tokens = [federation.node(p, family) for p, family in enumerate(MODELS)]
        command = [sys.executable, "-m", "fedloom.simulations", "refine", "what is it?", "--json"]
        command += ["--on", f"127.0.0.1:{federation.port}", "--receiver", "0", "--deadline", "900"]
        command += ["--max-new-tokens", "6"]
        for setting in (
            "clients.count=3",
            f"refine.fusers={fusers}",
            f"output={runs}",
            "client=lingering:LingeringClient",
            "custom.lingers=1",
            f"custom.flag={flag}",
        ):
            command += ["--set", setting]
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        shape = wait_for(flag, asked)
        killed = kill(tokens[1])
        out, err = asked.communicate(timeout=1500)
    finally:
        if asked is not None and asked.poll() is None:
            asked.kill()
            asked.communicate()
        federation.end()
    assert asked.returncode == 0, err.decode()[-2000:]
    assert shape == "(1, 12, 64)"  # the question's tokens, in one layer and not in the next
    assert killed >= 3  # the SuperNode, its SuperExec, and the process that was reading
    told = json.loads(out)
    status = {s["name"]: (s["status"], s["cause"]) for s in told["receipt"]["sources"]}
    assert status == {"1 tiny:qwen3": ("fallback", "gone"), "2 tiny:qwen2": ("used", "")}
    assert told["receipt"]["fallback"] == "fewer"
    assert told["answer"] != told["standalone"]
    failed = events(runs / "fedrefine", "client-failed")
    assert [(e["phase"], e["partition"]) for e in failed] == [("export_cache", 1)]
    left = "".join(p.read_text() for p in (runs / "fedrefine").iterdir() if p.is_file())
    assert "what is it?" not in left
    assert json.dumps(told["answer"]) not in left  # sealed for who asked
