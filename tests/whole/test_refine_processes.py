"""Senders in processes of their own, without a framework: one is killed amid a slice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from fedloom.refining import Sender, Terms, refine

from rooms import fuser_of, room

pytestmark = pytest.mark.slow
SENDER = """\
import json, sys, time
from fedloom.models.base import load_base
from fedloom.refining import Request, export, measured
told = json.loads(sys.stdin.readline())
base = load_base(told.pop("source"))
for name in ("key", "session"):
    told[name] = bytes.fromhex(told[name])
told["layers"] = tuple(told["layers"])
for number, frame in enumerate(export(base, measured(base), Request(**told))):
    sys.stdout.buffer.write(frame)
    sys.stdout.buffer.flush()
    if number == 1:  # the header and one layer are out
        sys.stderr.write("midway\\n")
        sys.stderr.flush()
        time.sleep(float(sys.argv[1]))
"""


def process_of(family: str, seconds: float, *, killed: bool) -> Sender:
    def ask(request):
        command = [sys.executable, "-c", SENDER, str(seconds)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as child:
            told = {"source": f"tiny:{family}", "text": request.text, "layers": request.layers}
            told |= {"key": request.key.hex(), "session": request.session.hex()}
            child.stdin.write(json.dumps(told).encode() + b"\n")
            child.stdin.flush()
            while b"midway" not in (line := child.stderr.readline()):
                assert line, "the sender ended too soon"
            if killed:
                os.kill(child.pid, signal.SIGKILL)
            while data := child.stdout.read1(1 << 16):
                yield data

    return Sender(room(family)[1], ask, fuser_of(family, "qwen3"), family)


def test_the_answer_comes_with_whoever_is_left():
    receiver, terms = room("qwen3")[0], Terms(deadline=500)
    senders = [process_of("llama", 900, killed=True), process_of("qwen2", 0, killed=False)]
    answer = refine(receiver, "what is it?", senders, terms=terms, max_new_tokens=5)
    sources = {source.name: source for source in answer.receipt.sources}
    assert (sources["llama"].status, sources["llama"].cause) == ("fallback", "gone")
    assert "truncated stream: 2 frames" in sources["llama"].reason
    assert (sources["qwen2"].status, sources["qwen2"].gates_open) == ("used", 2)
    assert answer.receipt.fallback == "fewer"
    assert answer.receipt.seconds["wait"] < 450  # nobody waited for the dead
