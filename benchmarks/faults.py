# SPDX-License-Identifier: Apache-2.0
"""Fifty rounds in which clients fail and the coordinator is killed, against the same without kills.

Run as ``python benchmarks/faults.py``; the last line printed is one JSON object.  SCAFFOLD with a
server that steps by FedAdam, so that server, clients and controls all remember something; a tiny
random model.  One message in five that asks for training fails, by a seed: half of those before
the client has done anything, half after it has trained and kept its state, as if its reply had been
lost.  The coordinator and its clients live in one process, which is killed with SIGKILL at three
moments drawn from the same seed, and started again with ``fedloom run --resume``'s own code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedloom import border, seeds
from fedloom.config import RunConfig

SEED, FAILING = 0, 0.2
CLIENTS = 3


def recipe(folder: Path, name: str, rounds: int) -> RunConfig:
    questions = folder / "questions.jsonl"
    if not questions.exists():
        write_questions(questions)
    return RunConfig.from_flat(
        {
            "name": name,
            "output": str(folder),
            "rounds": rounds,
            "seed": SEED,
            "baseline": "scaffold",
            "server.optimizer": "adam",
            "server.momentum": 0.9,
            "server.learning-rate": 1e-3,
            "model.source": "tiny:llama",
            "model.device": "cpu",
            "data.source": f"path:{questions}",
            "data.max-train": 4,
            "data.max-test": 2,
            "data.min-train": 4,
            "data.min-test": 2,
            "clients.count": CLIENTS,
            "train.max-steps": 1,
            "evaluation.every": 10,
        }
    )


def write_questions(path: Path) -> None:
    """Write made-up questions for the packaged split of MMLU's subjects."""
    from fedloom.data.mmlu import CLIENTS as OWNERS

    random, lines = seeds.generator(SEED, "questions"), []
    for _, subjects in OWNERS:
        for i in range(12):
            row = {
                "question": f"{i} of {subjects[0]}?",
                "subject": subjects[i % len(subjects)],
                "choices": [f"{word} {i}" for word in "abcd"],
                "answer": int(random.integers(4)),
            }
            lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def fault(server_round: int, partition: int) -> str:
    """Say what happens to one training message: nothing, or a failure before or after the work."""
    drawn = float(seeds.generator(SEED, server_round, partition, "faults").random())
    if drawn >= FAILING:
        return ""
    return "before" if drawn < FAILING / 2 else "after"


def child(folder: Path, name: str, rounds: int, again: bool) -> int:
    """Run, or go on, with failing clients; the shipped code knows nothing of them."""
    from fedloom.simulations import client_app, inprocess, runner

    class Faulty(inprocess.InProcessGrid):
        def _deliver(self, given: str, message: Message) -> Message:
            told = border.config_of(message.content)
            trains = message.metadata.message_type.startswith("train")
            partition = int(message.metadata.dst_node_id) - inprocess._FIRST_NODE
            kind = fault(int(told["round"]), partition) if trains else ""
            if kind == "before":
                message.metadata.__dict__["_message_id"] = given
                return border.failure(message, RuntimeError("made to fail before its work"))
            reply = super()._deliver(given, message)
            if kind == "after":
                return border.failure(message, RuntimeError("its reply was made to get lost"))
            return reply

    inprocess.InProcessGrid = Faulty  # type: ignore[misc]
    del client_app
    config = recipe(folder, name, rounds)
    if again:
        return runner.resume_run(config, folder / name, runtime="inprocess")
    return runner.run_recipe(config, runtime="inprocess")


def start(folder: Path, name: str, rounds: int, again: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", __file__, "--child", str(folder), "--name", name]
    command += ["--rounds", str(rounds)] + (["--again"] if again else [])
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def run_with_kills(folder: Path, name: str, rounds: int, kills: int) -> list[dict[str, Any]]:
    """Run to the end; return where each kill hit.

    A moment is a line of the journal of the run without kills, drawn from all between the frozen
    model's scores and the last round, and up to a tenth of a second after it.
    """
    random, hit = seeds.generator(SEED, "kills"), []
    lines = [e.get("round", 0) for e in rows(folder / "whole", "events")]
    moments = [i for i, server_round in enumerate(lines) if 0 < server_round < rounds]
    events = folder / name / "events.jsonl"
    for n, line in enumerate(sorted(random.choice(moments, size=kills, replace=False))):
        process = start(folder, name, rounds, again=n > 0)
        while process.poll() is None and count_of(events) < line + 1 + n:  # and n times "resumed"
            time.sleep(0.002)
        time.sleep(float(random.uniform(0, 0.1)))
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        if code != -signal.SIGKILL:
            raise SystemExit(f"{name} ended with {code} before it could be killed")
        hit.append({"round": lines[line], "last-line": phase_of(folder / name)})
    end(start(folder, name, rounds, again=kills > 0), folder / f"{name}.log")
    return hit


def count_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def phase_of(folder: Path) -> str:
    lines = (folder / "events.jsonl").read_text().split("\n")[:-1]
    row = json.loads(lines[-1])
    return f"{row['event']} {row.get('phase', '')}".strip()


def end(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait() != 0:
        raise SystemExit(f"the run failed: {log.read_text()[-2000:]}")


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]


def told(folder: Path) -> tuple[list[Any], list[Any]]:
    """Return metrics and ledger without what is of the process: times, ids, and their lengths."""
    process = {"seconds", "pid", "base-loads"}
    metrics = [
        {k: v for k, v in row.items() if k not in process} for row in rows(folder, "metrics")
    ]
    ledger = [row for row in rows(folder, "ledger") if row["dtype"] != border.FRAMING]
    return metrics, ledger


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    whole, killed = folder / "whole", folder / "killed"
    digests = [(f / "adapter" / "digest.txt").read_text() for f in (whole, killed)]
    done = [e["round"] for e in rows(killed, "events") if e["event"] == "round" and e["round"]]
    failed = [e for e in rows(killed, "events") if e["event"] == "client-failed"]
    train = ("train", "down", border.FRAMING)  # one row a message
    asked = [r for r in rows(killed, "ledger") if (r["phase"], r["direction"], r["dtype"]) == train]
    metrics, ledger = (a == b for a, b in zip(told(whole), told(killed), strict=True))
    return {
        "rounds": rounds,
        "rounds_lost": rounds - len(set(done)),
        "rounds_twice": len(done) - len(set(done)),
        "hash_equal": digests[0] == digests[1],
        "metrics_equal": metrics,
        "ledger_equal": ledger,
        "client_failures": len(failed),
        "failure_share": round(len(failed) / len(asked), 3),
        "digest": digests[0].strip()[:16],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--child", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    if given.child:
        sys.exit(child(given.child, given.name, given.rounds, given.again))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe(folder, "whole", given.rounds)
        end(start(folder, "whole", given.rounds, again=False), folder / "whole.log")
        hit = run_with_kills(folder, "killed", given.rounds, given.kills)
        found = compare(folder, given.rounds)
        resumes = rows(folder / "killed", "resumes")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    versions = {name: metadata.version(name) for name in ("flwr", "torch", "transformers", "numpy")}
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(f"versions: {versions}")
    for where in hit:
        print(f"killed in round {where['round']}, after '{where['last-line']}'")
    for cut in resumes:
        print(f"went on after round {cut['after']}; {cut['bytes']} bytes of traffic were cut")
    found |= {"kills": len(hit), "cpu_seconds": round(used.ru_utime + used.ru_stime, 1)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
