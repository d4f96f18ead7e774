"""All messages of a run, both ways, byte by byte: what must never be in them is looked for.

Looked for are every row's text, memory states, optimiser moments and gradients as they were in the
clients' memory; and, under masks, the updates themselves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.common.serde import recorddict_to_proto

from fedloom import border
from fedloom.clients.workbench import workbench
from fedloom.data.prompts import prompt
from fedloom.data.questions import load_questions
from fedloom.rules.fixed_point import encode, rounding_bound
from fedloom.simulations.inprocess import run_in_process
from fedloom.simulations.report import write_report

from runs import adapter_of, rows
from spies import Spied, found, of_numbers, of_tokens, of_words, spy
from summations import chi_square

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
        chunks = of_words(texts(config), codec)
        assert len(chunks) > 300
        assert not found(chunks, wires), codec
        longest = max(texts(config), key=len).encode(codec)
        assert found(chunks, [b"..." + longest + b"..."])  # the look does find
    encode_text = workbench(config).base.tokenizer.encode
    for kind in (np.int64, np.int32):
        held = of_tokens([encode_text(t) for t in texts(config) if len(t) > 20], kind)
        assert held
        assert not found(held, wires)
    for name, numbers in spied.secret_numbers().items():
        assert not found(numbers, wires), name
    sent = spied.updates()
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
