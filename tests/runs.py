"""Run the real apps in process and look at what crossed and what was left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from flwr.app import Message
from safetensors.numpy import load_file

from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, serve_on

METRICS_THAT_MAY_LEAVE = {
    "ticket", "num-examples", "steps", "tokens", "loss", "loss-first", "loss-last", "seconds",
    "gate-mean", "gate-min", "gate-max", "gate-layer-00", "gate-layer-01",
    "gpu", "pid", "base-loads",
    "control-norm", "own-loss", "omega-norm", "omega-next", "ala-passes", "ala-mean", "ala-min",
    "correct", "first-token-correct",
    "gold-ce-sum", "gold-ce-sq-sum", "letter-ce-sum", "letter-ce-sq-sum",
    "chance-sum", "chance-ce-sum",
}  # fmt: skip


def rows(folder: Path, kind: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]


def adapter_of(config) -> dict[str, np.ndarray]:
    folder = Path(config.output) / config.name / "adapter"
    return load_file(folder / "adapter_model.safetensors") | load_file(
        folder / "memory.safetensors"
    )


def at_home(purpose: str, server_round: int) -> dict[int, dict[str, np.ndarray]]:
    """Return what the clients of the only run so far kept of a round, by partition."""
    file = f"*/*/{purpose}-{server_round:06d}.safetensors"
    found = sorted(Path(os.environ["FEDLOOM_STATE"]).glob(file))
    return {int(path.parent.name): load_file(path) for path in found}


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        (a[n].view(np.uint8) == b[n].view(np.uint8)).all() for n in a
    )


class Recorder(InProcessGrid):
    """The in-process grid, keeping what crossed it."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.sent, self.answered = [], []

    def _deliver(self, name: str, message: Message) -> Message:
        reply = super()._deliver(name, message)
        self.sent.append(message)
        self.answered.append(reply)
        return reply


class Meddler(Recorder):
    """The in-process grid, with hands on some messages or replies."""

    on_reply = staticmethod(lambda message, reply: reply)
    on_message = staticmethod(lambda message: message)

    def _deliver(self, name, message):
        message = self.on_message(message)
        return self.on_reply(message, super()._deliver(name, message))


def recorded(config) -> Recorder:
    grid = Recorder(client_app.app, config.clients.count, config.flat())
    serve_on(grid, server_app.app, config)
    return grid
