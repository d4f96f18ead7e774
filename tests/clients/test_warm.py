"""The node's model server: who may ask, what is refused, and that it lives on and comes back."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedloom import border
from fedloom.clients import warm, warm_frames
from fedloom.clients.warm_server import WarmServer
from fedloom.errors import Refusal


def message(value: float = 1.0) -> Message:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    arrays = ArrayRecord({"w": Array(np.full(3, value, np.float32))})
    made = Message(RecordDict({"arrays": arrays}), 7, "train.default")
    made.metadata.__dict__["_message_id"] = "asked"
    return made


def context(**config) -> Context:
    return Context(1, 7, {"partition-id": 0}, RecordDict(), dict(config))


class Doubler:
    """An app that doubles what came and counts in the context, as a secure sum's session does."""

    def __init__(self) -> None:
        self.calls, self.gate = 0, threading.Event()
        self.gate.set()

    def __call__(self, asked: Message, given: Context) -> Message:
        assert self.gate.wait(30)
        self.calls += 1
        before = given.state.config_records.get("seen", ConfigRecord({"n": 0}))
        given.state["seen"] = ConfigRecord({"n": int(before["n"]) + 1})
        if given.run_config.get("broken"):
            raise Refusal("this app wants none of it")
        arrays = {n: 2 * a for n, a in border.arrays_of(asked.content).items()}
        return Message(border.content(arrays, metrics={"pid": os.getpid()}), reply_to=asked)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(warm_frames.VARIABLE, str(tmp_path / "warm"))
    return tmp_path / "warm"


@contextlib.contextmanager
def served(app, **told) -> Iterator[WarmServer]:
    server = WarmServer(warm_frames.socket_path(), app, **told)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
        assert not server.path.exists()


def raw(path: Path, data: bytes) -> tuple[bytes, bytes]:
    """Write bytes and return the frame that comes back."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(30)
        line.connect(str(path))
        with contextlib.suppress(ConnectionError):  # it may have hung up with a word
            line.sendall(data)
        return warm_frames.receive(line)


def test_a_reply_and_the_contexts_state_come_back_as_without_a_server(folder):
    app, here, there = Doubler(), context(), context()
    direct = app(message(), here)
    with served(app):
        for _ in range(2):
            forwarded = warm.forward(message(), there, lambda *_: pytest.fail("not this process"))
    assert there.state["seen"]["n"] == 2
    one, other = (border.arrays_of(reply.content)["w"] for reply in (direct, forwarded))
    assert one.tobytes() == other.tobytes()
    assert forwarded.metadata.reply_to_message_id == "asked"
    assert app.calls == 3


def test_a_clients_refusal_is_still_one(folder):
    with served(Doubler()):
        reply = warm.forward(message(), context(broken=True), lambda *_: None)
    assert border.failure_reason(reply) == ("this app wants none of it", "", True)


@pytest.mark.parametrize(
    ("said", "key", "here"),
    [("", None, True), ("", True, False), ("off", True, True), ("DIR", False, False)],
)
def test_the_nodes_word_comes_before_the_recipes(monkeypatch, tmp_path, said, key, here):
    monkeypatch.setenv(warm_frames.VARIABLE, said.replace("DIR", str(tmp_path / "d")))
    given = context(**({} if key is None else {"clients.warm": key}))
    assert warm.wanted(given) is not here


def test_the_socket_is_this_users_alone(folder):
    with served(Doubler()) as server:
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(Refusal, match="mode 0700"):
        warm_frames.socket_path()
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))
    with pytest.raises(Refusal, match="mode 0700"):
        warm_frames.socket_path()


def test_another_users_process_is_turned_away_unread(folder):
    """By the kernel's word; here the server expects a user that we are not."""
    app = Doubler()
    with served(app, uid=os.getuid() + 1) as server:
        kind, said = raw(server.path, b"")
        reply = warm.forward(message(), context(), lambda *_: None)
    assert (kind, said[:20]) == (b"FAIL", b"you are another user")
    assert "another user" in border.failure_reason(reply)[0]
    assert app.calls == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_real_stranger_cannot_even_connect(folder):
    script = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with served(Doubler()) as server:
        command = ["python3", "-c", script, str(server.path)]
        done = subprocess.run(command, user=65534, capture_output=True, text=True, cwd="/")
    assert "PermissionError" in done.stderr


HEAD = struct.Struct(">4s4sQ")
GARBAGE = {
    "no frame": (b"GET / HTTP/1.1\r\n\r\n", "no frame"),
    "oversized": (HEAD.pack(b"FLW1", b"ASK ", 2**40), "is the most"),
    "a kind that asks nothing": (HEAD.pack(b"FLW1", b"DONE", 0), "asks for nothing"),
    "a short body": (HEAD.pack(b"FLW1", b"ASK ", 3) + b"abc", "no message of Flower's"),
    "a body of noise": (
        HEAD.pack(b"FLW1", b"ASK ", 300) + bytes(range(150)) * 2,
        "was said|no m",
    ),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_refused_and_the_server_lives_on(folder, kind):
    data, reason = GARBAGE[kind]
    app = Doubler()
    with served(app, largest=2**20) as server:
        came, said = raw(server.path, data)
        assert came == b"FAIL"
        assert re.search(reason, said.decode())
        with socket.socket(socket.AF_UNIX) as line:  # and one that hangs up in the middle
            line.connect(str(server.path))
            line.sendall(HEAD.pack(b"FLW1", b"ASK ", 99) + b"half")
        assert warm.ask(message(), context()).has_content()
    assert app.calls == 1


def test_mutated_messages_never_reach_the_app_as_something_else(folder):
    """Bits of a good request flipped by a seed: an answer or a refusal, and the server goes on."""
    app, random = Doubler(), np.random.default_rng(0)
    head, body, rest = warm_frames.pack_task(message(), context())
    whole = np.frombuffer(head + body + rest, np.uint8)
    with served(app) as server:
        for _ in range(60):
            data = whole.copy()
            data[random.integers(len(head), len(data), size=3)] ^= random.integers(1, 256, 3, "u1")
            frame = HEAD.pack(b"FLW1", b"ASK ", len(data)) + data.tobytes()
            kind, _ = raw(server.path, frame)
            assert kind in (b"FAIL", b"DONE")
        assert warm.ask(message(3.0), context()).has_content()


def test_few_may_wait_and_more_are_told_so(folder):
    app = Doubler()
    app.gate.clear()
    replies: list[Message] = []
    ask = lambda: replies.append(warm.forward(message(), context(), lambda *_: None))  # noqa: E731
    with served(app, waiting=1) as server:
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while len(replies) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        app.gate.set()
        for thread in threads:
            thread.join(30)
        assert server.answered == 2
    reasons = [border.failure_reason(reply)[0] for reply in replies if reply.has_error()]
    assert len(reasons) == 2
    assert all("busy: 1 messages are waiting" in reason for reason in reasons)


def test_one_server_a_socket_and_it_ends_when_idle(folder):
    with served(Doubler()) as server:
        assert WarmServer(server.path, Doubler()).run() is False
    assert WarmServer(server.path, Doubler(), idle_seconds=0.01).run() is True


def test_a_server_of_another_version_ends_itself(folder, monkeypatch):
    started: list[str] = []
    monkeypatch.setattr(warm, "_start", lambda *_: started.append("new") or _Ended())
    with served(Doubler()) as server:
        monkeypatch.setattr(warm_frames, "__version__", "0.0.0-old")
        request = warm_frames.pack_task(message(), context())
        monkeypatch.undo()
        head = HEAD.pack(b"FLW1", b"ASK ", sum(map(len, request)))
        assert raw(server.path, head + b"".join(request)) == (b"OLD ", b"")
        assert server._stop.wait(5)
    assert not started


class _Ended:
    def poll(self) -> int:
        return 1


APP = """
import os
from flwr.app import Message
from fedloom import border
calls = []
def app(message, context):
    calls.append(1)
    if context.run_config.get("die") and not os.path.exists(context.run_config["die"]):
        open(context.run_config["die"], "w").close()
        os.kill(os.getpid(), 9)
    told = {"pid": os.getpid(), "calls": len(calls)}
    return Message(border.content(metrics=told), reply_to=message)
"""


def test_a_killed_server_is_started_anew_and_the_caller_needs_no_torch(
    folder, tmp_path, monkeypatch
):
    (tmp_path / "kept_app.py").write_text(APP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = [border.metrics_of(warm.ask(message(), context(), "kept_app:app").content)]
    told.append(border.metrics_of(warm.ask(message(), context(), "kept_app:app").content))
    assert [row["calls"] for row in told] == [1, 2]
    assert told[0]["pid"] == told[1]["pid"] != os.getpid()
    dies = context(die=str(tmp_path / "died"))  # kill -9 in the middle of a message
    after = border.metrics_of(warm.ask(message(), dies, "kept_app:app").content)
    assert after["calls"] == 1
    assert after["pid"] != told[0]["pid"]
    assert warm.call(warm_frames.PING)["answered"] == 1
    script = (
        "import sys; from fedloom.simulations import client_app; from fedloom.clients import warm;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert warm.call(warm_frames.STOP)["pid"] == after["pid"]
    for process in warm._STARTED:
        process.wait(30)
    assert warm.call(warm_frames.PING) == {}
