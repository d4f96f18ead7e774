"""What clients have in memory while they train, kept; and how to look for it in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from flwr.common.serde import recorddict_to_proto

from fedloom.adapters import memory
from fedloom.rules.exchange import Exchange

from runs import recorded

NUMBERS = 16  # bytes: four float32 or two float64, which do not come twice by chance
LETTERS = 10
TOKENS = 8


def pieces(data: bytes, size: int, step: int) -> set[bytes]:
    """Every run of so many bytes that says anything: zeros are anywhere."""
    cut = {data[at : at + size] for at in range(0, len(data) - size + 1, step)}
    return {piece for piece in cut if len(set(piece)) > 4}


def of_numbers(arrays: Iterable[np.ndarray]) -> set[bytes]:
    return set().union(*(pieces(a.tobytes(), NUMBERS, a.itemsize) for a in arrays))


def of_words(texts: Iterable[str], codec: str) -> set[bytes]:
    wide = 1 if codec == "utf-8" else 2
    return set().union(*(pieces(t.encode(codec), wide * LETTERS, wide) for t in texts))


def of_tokens(ids: Iterable[list[int]], kind: type[np.integer]) -> set[bytes]:
    arrays = [np.array(row, kind) for row in ids]
    return set().union(*(pieces(a.tobytes(), TOKENS * a.itemsize, a.itemsize) for a in arrays))


def found(needles: set[bytes], wires: Iterable[bytes]) -> set[bytes]:
    (size,) = {len(needle) for needle in needles}
    cut = (wire[at : at + size] for wire in wires for at in range(len(wire) - size + 1))
    return needles.intersection(cut)


@dataclass
class Spied:
    """What was in the clients' memory, and what crossed."""

    config: object = None
    states: list[np.ndarray] = field(default_factory=list)
    moments: list[np.ndarray] = field(default_factory=list)
    gradients: list[np.ndarray] = field(default_factory=list)
    trained: list[dict[str, np.ndarray]] = field(default_factory=list)
    grid: object = None

    def wires(self, up: bool = True, down: bool = True) -> list[bytes]:
        messages = [*(self.grid.answered if up else ()), *(self.grid.sent if down else ())]
        return [recorddict_to_proto(m.content).SerializeToString() for m in messages]

    def train_replies(self) -> list:
        return [m for m in self.grid.answered if m.metadata.message_type == "train.fednl"]

    def secret_numbers(self) -> dict[str, set[bytes]]:
        """Return what may leave nobody: states, moments and gradients, in either width."""
        kept = {name: getattr(self, name) for name in ("states", "moments", "gradients")}
        assert all(len(arrays) > 10 for arrays in kept.values())
        wide = {n: of_numbers(a) | of_numbers(x.astype("f8") for x in a) for n, a in kept.items()}
        assert all(len(numbers) > 500 for numbers in wide.values())
        return wide

    def updates(self) -> set[bytes]:
        return of_numbers(a for arrays in self.trained for a in arrays.values())


def spy(config) -> Spied:
    """Run in this process and look on."""
    seen, rule, step = Spied(config), memory.delta_rule, torch.optim.AdamW.step
    up = Exchange.up

    def watched_rule(*args, **kwargs):
        out, state = rule(*args, **kwargs)
        seen.states.append(state.detach().numpy().copy())
        return out, state

    def watched_step(self, *args, **kwargs):
        made = step(self, *args, **kwargs)
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter]
                seen.gradients.append(parameter.grad.numpy().copy())
                for key in ("exp_avg", "exp_avg_sq"):
                    seen.moments.append(held[key].numpy().copy())
        return made

    def watched_up(self, server_round, partition, arrays):
        sent = up(self, server_round, partition, arrays)
        seen.trained.append({n: a.copy() for n, a in sent.items()})
        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "delta_rule", watched_rule)
        patch.setattr(torch.optim.AdamW, "step", watched_step)
        patch.setattr(Exchange, "up", watched_up)
        seen.grid = recorded(config)
    return seen
