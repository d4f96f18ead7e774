"""All messages of a run, both ways, byte by byte: what must never be in them is looked for.

Looked for are every row's text, memory states, optimiser moments and gradients as they were in the
clients' memory; and, under masks, the updates themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.common.serde import recorddict_to_proto

from fedloom import border
from fedloom.adapters import memory
from fedloom.clients.workbench import workbench
from fedloom.data.prompts import prompt
from fedloom.data.questions import load_questions
from fedloom.rules.exchange import Exchange
from fedloom.rules.fixed_point import encode, rounding_bound
from fedloom.simulations.inprocess import run_in_process
from fedloom.simulations.report import write_report

from runs import adapter_of, recorded, rows
from summations import chi_square

NUMBERS = 16  # bytes: four float32 or two float64, which do not come twice by chance
LETTERS = 10


def pieces(data: bytes, size: int, step: int) -> set[bytes]:
    """Every run of so many bytes that says anything: zeros are anywhere."""
    cut = {data[at : at + size] for at in range(0, len(data) - size + 1, step)}
    return {piece for piece in cut if len(set(piece)) > 4}


def of_numbers(arrays: Iterable[np.ndarray]) -> set[bytes]:
    return set().union(*(pieces(a.tobytes(), NUMBERS, a.itemsize) for a in arrays))


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


def spy(config) -> Spied:
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


MODES = {
    "plain": {"server__rule": "ffa"},
    "masks": {"privacy__masks": True},
    "noise": {"privacy__clip": 0.05, "privacy__noise": 1.0},
    "masks-noise": {"privacy__masks": True, "privacy__clip": 0.05, "privacy__epsilon": 8.0},
}


SLOW = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("noise", "masks-noise")]


@pytest.fixture(params=["plain", "masks", *SLOW])
def spied(recipe, request) -> Spied:
    small = {"clients__count": 3, "evaluation__every": 2, "name": request.param}
    small |= {"data__max_train": 6, "data__max_test": 2, "train__learning_rate": 0.01}
    return spy(recipe(**small, **MODES[request.param]))


def texts(config) -> set[str]:
    asked = load_questions(config.data.source)
    assert len(asked) > 30
    return {t for q in asked for t in (prompt(q), q.question, *q.choices)}


def test_nothing_of_a_client_but_its_update_is_in_any_message(spied):
    config, wires = spied.config, spied.wires()
    mode = config.name
    assert len(wires) > 30
    for codec in ("utf-8", "utf-16-le", "utf-16-be"):
        wide = 1 if codec == "utf-8" else 2
        words = [text.encode(codec) for text in texts(config)]
        chunks = set().union(*(pieces(w, wide * LETTERS, wide) for w in words))
        assert len(chunks) > 300
        assert not found(chunks, wires), codec
        assert found(chunks, [b"..." + max(words, key=len) + b"..."])  # the look does find
    encode_text = workbench(config).base.tokenizer.encode
    for kind in (np.int64, np.int32):
        ids = [np.array(encode_text(text), kind) for text in texts(config) if len(text) > 20]
        held = set().union(*(pieces(i.tobytes(), 8 * i.itemsize, i.itemsize) for i in ids))
        assert held
        assert not found(held, wires)
    for name in ("states", "moments", "gradients"):
        kept = getattr(spied, name)
        assert len(kept) > 10, name
        numbers = of_numbers(kept) | of_numbers(a.astype("f8") for a in kept)
        assert len(numbers) > 500
        assert not found(numbers, wires), name
    sent = of_numbers(a for arrays in spied.trained for a in arrays.values())
    there = found(sent, spied.wires(down=False))
    assert there if mode == "plain" else not there
    contexts = [
        recorddict_to_proto(c.state).SerializeToString() for c in spied.grid._contexts.values()
    ]
    assert not found(sent, contexts)
    _check_what_is_told(spied, masked="masks" in mode, bare=mode == "plain")


def _check_what_is_told(spied: Spied, *, masked: bool, bare: bool) -> None:
    replies = spied.train_replies()
    assert len(replies) == 6
    for reply in replies:
        metrics = border.metrics_of(reply.content)
        assert bare == (metrics.keys() > {"num-examples"})
        arrays = border.arrays_of(reply.content)
        kinds = {str(a.dtype) for a in arrays.values()}
        assert kinds == ({"uint64"} if masked else {"float32"})
        if masked:
            assert chi_square(b"".join(a.tobytes() for a in arrays.values())) < 6
    called = [m for m in spied.grid.answered if m.metadata.message_type == "query.properties"]
    for message in called:
        told = border.config_of(message.content)
        assert ("train" in told, bool(told["partition-json"])) == (bare, bare)
    folder = Path(spied.config.output) / spied.config.name
    (end,) = [e for e in rows(folder, "events") if e["event"] == "end"]
    assert end["status"] == "completed"
    page = write_report(folder).read_text()
    assert ("The server saw" in page) != bare
    assert ("epsilon" in page) == ("noise" in spied.config.name)
    if masked:
        _check_fixed_point(spied)


def test_the_whole_app_under_masks_makes_the_plain_adapter(recipe):
    small = {"clients__count": 3, "rounds": 1, "train__learning_rate": 0.01, "server__rule": "ffa"}
    plain, masks = recipe(name="a", **small), recipe(name="b", **small, privacy__masks=True)
    for config in (plain, masks):
        run_in_process(config)
    ours, wanted = adapter_of(masks), adapter_of(plain)
    assert ours.keys() == wanted.keys()
    for name, array in wanted.items():
        single = 2 * np.abs(array).max() * np.finfo(np.float32).eps  # clients' own rounding
        assert np.abs(ours[name] - array).max() <= rounding_bound(3) + single
    told = {
        c.name: rows(Path(c.output) / c.name, "events")[-2]["train-loss"] for c in (plain, masks)
    }
    assert told["b"] == pytest.approx(told["a"])


def _check_fixed_point(spied: Spied) -> None:
    """Nor is a change, weighted or not, in the whole numbers that masks are added to."""
    first = spied.trained[:3]  # round 1 begins at B = 0, and gates at one number
    changes = [a.astype("f8") for arrays in first for n, a in arrays.items() if ".lora_B" in n]
    words = [encode(weight * a) for a in changes for weight in range(1, 7)]
    assert not found(of_numbers(words), spied.wires(down=False))
    assert not found(of_numbers(changes), spied.wires(down=False))
