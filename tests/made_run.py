# SPDX-License-Identifier: Apache-2.0
"""A made-up run folder with numbers that can be worked out by hand, and its page taken apart."""

import json
from html.parser import HTMLParser

import numpy as np

from fedloom.config import RunConfig
from fedloom.simulations.report import write_report
from fedloom.wire import Manifest

CLIENTS = ("Law/Ethics", "Humanities", "STEM", "Math/CS", "Med/Psych")
TEST_ROWS = (12, 12, 12, 8, 12)
TRAIN_ROWS = (48, 60, 55, 40, 50)
CORRECT = {"frozen": (3, 4, 2, 2, 3), "local": (5, 4, 3, 2, 4), "evaluate": (4, 4, 3, 3, 3)}
# Mean gold-letter CE of the last round; STEM gets worse, Math/CS better by less than its spread.
GOLD = {
    "frozen": (2.8, 2.6, 1.9, 2.0, 2.7),
    "local": (1.3, 1.4, 2.0, 1.8, 1.35),
    "evaluate": (1.4, 1.5, 2.1, 1.9, 1.4),
}
LETTER = {
    "frozen": (1.42, 1.40, 1.39, 1.41, 1.40),
    "local": (1.30, 1.35, 1.40, 1.38, 1.33),
    "evaluate": (1.35, 1.37, 1.41, 1.38, 1.36),
}
ARRAYS = {
    "layers.0.q.lora_A": np.zeros((8, 576), np.float32),
    "layers.0.q.lora_B": np.zeros((576, 8), np.float32),
    "layers.0.memory.gate": np.zeros(576, np.float32),
    "memory.beta": np.zeros(4, np.float32),
}
PAYLOAD = 4 * (2 * 8 * 576 + 576 + 4)
ROUNDS = 3


def scored(phase, round_, k, gold, letter):
    """One row as a node reports it: half the rows a bit above the mean, half a bit below."""
    n, spread = TEST_ROWS[k], 0.3
    return {
        "round": round_,
        "phase": phase,
        "partition": k,
        "name": CLIENTS[k],
        "num-examples": n,
        "correct": CORRECT[phase][k],
        "first-token-correct": CORRECT[phase][k] - 1,
        "gold-ce-sum": n * gold,
        "gold-ce-sq-sum": n * (gold**2 + spread**2),
        "letter-ce-sum": n * letter,
        "letter-ce-sq-sum": n * (letter**2 + spread**2),
        "tokens": 100 * n,
        "seconds": 3.2,
    }


def metrics():
    rows = [scored("frozen", 0, k, GOLD["frozen"][k], LETTER["frozen"][k]) for k in range(5)]
    for r in range(1, ROUNDS + 1):
        early = 0.1 * (ROUNDS - r)
        for k in range(5):
            rows.append(trained(r, k))
            if r == ROUNDS:
                rows.append(scored("local", r, k, GOLD["local"][k], LETTER["local"][k]))
            gold, letter = GOLD["evaluate"][k] + early, LETTER["evaluate"][k] + early / 10
            rows.append(scored("evaluate", r, k, gold, letter))
    return rows


def trained(r, k):
    told = {"loss": 2 / r, "loss-first": 2.5 / r, "loss-last": 1.5 / r, "steps": 12}
    told |= {"gate-mean": 0.047 + 0.001 * r, "gate-max": 0.06 + 0.001 * r}
    head = {"round": r, "phase": "train", "partition": k, "name": CLIENTS[k]}
    return head | told | {"num-examples": TRAIN_ROWS[k], "tokens": 6000, "seconds": 21.5}


def ledger():
    return [
        {"round": r, "phase": phase, "direction": way, "partition": k, "dtype": dtype, "bytes": n}
        for r in range(1, ROUNDS + 1)
        for phase, ways in (("train", ("down", "up")), ("evaluate", ("down",)))
        for way in ways
        for k in range(5)
        for dtype, n in (("float32", PAYLOAD), ("framing", 300))
    ]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder):
    """Leave what a finished run of five clients and three rounds leaves."""
    folder.mkdir()
    config = RunConfig.from_flat({"name": "mmlu-five", "rounds": ROUNDS, "seed": 7})
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in config.flat().items())
    (folder / "config.toml").write_text("".join(lines))
    clients = [
        {"name": name, "train": list(range(a)), "test": list(range(b))}
        for name, a, b in zip(CLIENTS, TRAIN_ROWS, TEST_ROWS, strict=True)
    ]
    (folder / "partition.json").write_text(json.dumps({"clients": clients}))
    manifest = Manifest.of(
        ARRAYS, method="fednl", version="0.1.0", base="ab" * 32, tokenizer="cd" * 32
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    environment = {
        "versions": {"fedloom": "0.1.0", "torch": "2.9"},
        "cpu": "some CPU",
        "threads": 1,
    }
    environment |= {"command": "fedloom run", "started": "2026-01-01T00:00:00Z", "seconds": 321.5}
    (folder / "environment.json").write_text(json.dumps(environment))
    rounds = [{"event": "round", "round": r, "agg-error": 0.01 * r} for r in (1, 2, 3)]
    end = {"event": "end", "status": "completed", "reason": ""}
    write_lines(folder / "events.jsonl", [{"event": "start"}, *rounds, end])
    write_lines(folder / "metrics.jsonl", metrics())
    write_lines(folder / "ledger.jsonl", ledger())
    return folder


class Page(HTMLParser):
    """Collect tags and text, and check that every element is closed in order."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.attributes = [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""


def page_of(folder):
    path = folder / "report.html"
    page = Page((path if path.exists() else write_report(folder)).read_text("utf-8"))
    assert page.open == []
    page.text = " ".join(page.text.split())
    return page
