# SPDX-License-Identifier: Apache-2.0
"""What privacy costs an adapter: epsilon against cross-entropy, and what masks cost in seconds.

Run as ``OMP_NUM_THREADS=1 python benchmarks/privacy.py``; the last line is one JSON object.

The first part trains FFA-LoRA on a tiny random Llama through the real apps, over many clients who
each hold a few made-up questions.  Such a model can learn to answer with a letter and little else:
gold-letter cross-entropy falls from about the log of its vocabulary towards ln 4, so it tells how
much of an update the noise leaves.  The second part sums made-up updates of a real adapter's size
under masks, for several numbers of clients.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom import border, seeds
from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.clients.secure import masked, serve_sums
from fedloom.config import RunConfig
from fedloom.data import mmlu
from fedloom.local.work import Work
from fedloom.rules.fixed_point import rounding_bound
from fedloom.simulations.inprocess import InProcessGrid, run_in_process
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.strategies.secure_sum import SecureSum

GROUPS = 5  # clients that the question files know; each stands for several here
WORDS = ("amber", "brook", "cedar", "dune", "ember", "fjord", "grove", "harbor", "inlet", "kelp")
RUN = "5e" * 16
MEMORY, BS = 32_768, 230_400
"""FedNL's gates in its paper; B of LoRA on q, k, v of the default model at rank 8."""


def write_questions(path: Path, rows: int) -> None:
    """Write made-up questions in MMLU's columns, so many a client of the file."""
    random, lines = seeds.generator(0, "questions"), []
    for _, subjects in mmlu.CLIENTS:
        for i in range(rows):
            choices = [str(word) for word in random.choice(WORDS, 4, replace=False)]
            asked = f"{i} {random.choice(WORDS)}?"
            row = {"question": asked, "subject": subjects[i % len(subjects)], "choices": choices}
            lines.append(json.dumps({**row, "answer": int(np.argmin(choices))}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class OneOfMany(FedNLClient):
    """A client that holds every n-th row of a client of the file."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own, self.partition_id = self.partition_id, self.partition_id % GROUPS

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say which of the many this is."""
        told = super().get_properties(config)
        return {**told, "partition": self.own} if "partition" in told else told

    def _work(self, *given: Any) -> Work:
        work = super()._work(*given)
        shares = self.config.clients.count // GROUPS
        return replace(work, rows=work.rows[self.own // GROUPS :: shares], partition=self.own)


def adapted(config: RunConfig) -> dict[str, Any]:
    """Run a recipe; return its last scores and what was spent."""
    app = ClientApp()
    serve(app, OneOfMany, action="fednl")
    serve_sums(app)
    run_in_process(config, app)
    lines = (Path(config.output) / config.name / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    last = [e for e in events if e["event"] == "round"][-1]
    told = [e for e in events if e["event"] == "privacy"][-1:] or [{}]
    return {
        "gold_ce": last["gold-ce"],
        "accuracy": last["accuracy"],
        "epsilon": last.get("epsilon-spent"),
        "multiplier": told[0].get("multiplier"),
        "sigma": last.get("noise-sigma"),
    }


def curve(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train without privacy, with clipping alone, and at each epsilon."""
    write_questions(folder / "questions.jsonl", max(40, 2 * args.clients))
    base = RunConfig().replaced(
        model__source="tiny:llama",
        data__source=f"path:{folder / 'questions.jsonl'}",
        data__max_test=4,
        output=str(folder),
        rounds=args.rounds,
        clients__count=args.clients,
        evaluation__every=args.rounds,
        server__rule="ffa",
        lora__rank=2,
        lora__targets="q,v",
        train__max_steps=4,
        train__learning_rate=args.rate,
        memory__chunk=16,
    )
    rows = []
    ways: list[tuple[str, dict[str, Any]]] = [
        ("no privacy", {}),
        ("masks", {"privacy__masks": True}),
    ]
    ways.append(("clipped alone", {"privacy__clip": args.clip}))
    ways += [
        (f"epsilon {e:g}", {"privacy__clip": args.clip, "privacy__epsilon": e})
        for e in args.epsilons
    ]
    for number, (name, told) in enumerate(ways):
        draws = args.draws if "epsilon" in name else 1
        found = [adapted(base.replaced(name=f"run-{number}-{d}", **told)) for d in range(draws)]
        scores = [one["gold_ce"] for one in found]
        row = {"way": name, **found[0], "gold_ce": mean(scores), "draws": draws}
        row["gold_ce_low"], row["gold_ce_high"] = min(scores), max(scores)
        row["accuracy"] = mean(one["accuracy"] for one in found)
        rows.append(row)
        print(json.dumps(row), flush=True)
    lines = (folder / "run-0-0" / "metrics.jsonl").read_text().splitlines()
    frozen = [row for row in map(json.loads, lines) if row["phase"] == "frozen"]
    scores = [row["gold-ce-sum"] / row["num-examples"] for row in frozen]
    return [*rows, {"way": "frozen", "gold_ce": mean(scores)}]


class Timed(InProcessGrid):
    """Counts the clients' CPU seconds."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        super().__init__(app, nodes, {})
        self.seconds: Counter[str] = Counter()

    def _deliver(self, name: str, message: Message) -> Message:
        began = time.process_time()
        reply = super()._deliver(name, message)
        self.seconds[message.metadata.message_type] += time.process_time() - began
        return reply


def summed(clients: int, numbers: int) -> dict[str, Any]:
    """Sum updates of so many numbers over clients under masks; return errors, bytes, seconds."""
    app = ClientApp()
    serve_sums(app)

    def update(client: int) -> dict[str, np.ndarray]:
        random = seeds.generator(0, client, "update")
        return {"delta": 100 * random.normal(size=numbers) * 0.01}  # a hundred rows' worth

    @app.train("sum")
    def train(message: Message, context: Context) -> Message:
        made = update(int(context.node_config["partition-id"]))
        words = masked(context, border.config_of(message.content), made)
        return Message(border.content(words, metrics={}), reply_to=message)

    grid = Timed(app, clients)
    roster, journal = Roster({c: 1000 + c for c in range(clients)}, {}), Journal()
    stream, began = ReplyStream(grid, 60.0), time.process_time()
    sums = SecureSum(roster, RUN, journal)
    asked = sums.begin(stream, 1, roster.partitions)
    built = [Message(border.content({}, sums.told(c)), 1000 + c, "train.sum") for c in asked]
    for message in built:
        journal.weigh(message.content, server_round=1, phase="sum", direction="down", partition=0)
    for reply in stream.send_and_receive(built):
        journal.weigh(reply.content, server_round=1, phase="sum", direction="up", partition=0)
        sums.take(reply.metadata.src_node_id - 1000, border.arrays_of(reply.content))
    found = sums.finish()
    whole, working = time.process_time() - began, sum(grid.seconds.values())
    exact = sum(update(c)["delta"] for c in range(clients))
    return {
        "clients": clients,
        "numbers": numbers,
        "error": float(np.abs(found.arrays["delta"] - exact).max()),
        "bound": rounding_bound(clients),
        "up_bytes_per_client": round(journal.bytes_of(1, "up") / clients),
        "down_bytes_per_client": round(journal.bytes_of(1, "down") / clients),
        "bare_up_bytes": 4 * numbers,
        "client_seconds": round(working / clients, 4),
        "server_seconds": round(whole - working, 4),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--epsilons", type=float, nargs="*", default=[8.0, 64.0, 512.0])
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        rows = curve(Path(folder), args)
    sums = [summed(c, MEMORY) for c in (5, 20, 80)] + [summed(c, BS) for c in (5, 20)]
    for row in sums:
        print(json.dumps(row))
    told = {
        "curve": rows,
        "masked_sums": sums,
        "clients": args.clients,
        "rounds": args.rounds,
        "clip": args.clip,
        "delta": 1e-5,
        "largest_error_over_bound": max(row["error"] / row["bound"] for row in sums),
        "cpu_seconds": round(time.process_time() - began, 1),
        "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "versions": f"torch {torch.__version__}, numpy {np.__version__}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
