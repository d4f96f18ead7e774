"""Fewer bits, and a budget of bytes, on the real apps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedloom import border
from fedloom.clients.workbench import workbench
from fedloom.errors import Refusal
from fedloom.simulations.inprocess import run_in_process
from fedloom.simulations.runner import COMPLETED, REFUSED, run_recipe

from runs import adapter_of, at_home, recorded, rows


def up(config, dtypes) -> int:
    ledger = rows(Path(config.output) / config.name, "ledger")
    return sum(
        r["bytes"]
        for r in ledger
        if (r["phase"], r["direction"]) == ("train", "up") and r["dtype"] in dtypes
    )


def test_fewer_bits_up_end_within_half_a_step_of_all_bits(recipe):
    """After one round, where nothing has yet been learnt from what was rounded."""
    ended, sizes = {}, {}
    for code in ("float32", "bfloat16", "int8", "int4"):
        config = recipe(name=code, rounds=1, server__rule="mean", wire__dtype=code)
        run_in_process(config)
        ended[code] = adapter_of(config)
        sizes[code] = up(config, ("float32", "bfloat16", "int8", "uint8"))
    assert sizes["bfloat16"] * 2 == sizes["float32"]
    assert sizes["int8"] < 0.27 * sizes["float32"]
    assert sizes["int4"] < 0.15 * sizes["float32"]
    bench = workbench(config)
    bench.adapter.reset()
    start = bench.adapter.arrays()
    largest = max(float(np.abs(x - start[n]).max()) for n, x in ended["float32"].items())
    # Five clients' changes, the largest of which may be a few times that of their mean.
    for code, half in (("bfloat16", 2**-9), ("int8", 1 / 254), ("int4", 1 / 14)):
        off = max(float(np.abs(ended[code][n] - x).max()) for n, x in ended["float32"].items())
        assert 0 < off < 3 * half * largest


def test_what_rounding_left_stays_at_home_by_partition(recipe):
    config = recipe(server__rule="mean", wire__dtype="int4", local__method="scaffold")
    run_in_process(config)
    first, second = at_home("rounding", 1), at_home("rounding", 2)
    assert first.keys() == second.keys() == set(range(5))
    names = workbench(config).manifest.arrays.keys()
    assert all(left.keys() == names for left in (*first.values(), *second.values()))
    assert any(name.startswith("control/") and left.any() for name, left in first[0].items())


def test_a_reply_in_other_bits_than_the_recipes_is_refused(recipe):
    config = recipe(rounds=1, server__rule="mean", wire__dtype="int8", clients__count=1)
    grid = recorded(config)
    (reply,) = (r for r in grid.answered if r.metadata.message_type == "train.fednl")
    assert border.code_of(reply.content) == "int8"
    start = {n: np.zeros(1, np.float32) for n in border.arrays_of(reply.content)}
    with pytest.raises(Refusal, match="numbers came in int8, expected float32"):
        border.update_of(reply.content, workbench(config).manifest, 0, "float32", start)


@pytest.mark.parametrize("rule", ["svd", "flex", "fedex", "flora"])
def test_rules_that_turn_factors_refuse_fewer_bits(recipe, rule):
    with pytest.raises(Refusal, match="turns factors between rounds"):
        recipe(server__rule=rule, wire__dtype="int8")
    assert recipe(server__rule="svd", share="memory", wire__dtype="int8")


def test_sums_are_exact_or_not_at_all(digits):
    with pytest.raises(Refusal, match="sums must be exact"):
        digits(wire__dtype="int8")
    with pytest.raises(Refusal, match="no round to stop before"):
        digits(wire__budget_bytes=10**9)


def bound(recipe, **changes):
    """Return a recipe whose budget ends it early, though it wants nine rounds."""
    free = recipe(name="free", rounds=2, evaluation__every=5, train__max_steps=1, **changes)
    run_in_process(free)
    spent = sum(r["bytes"] for r in rows(Path(free.output) / "free", "ledger"))
    return free.replaced(name="bound", rounds=9, wire__budget_bytes=int(1.3 * spent))


def kept_to(config) -> None:
    """Check what a run that the budget ended has left."""
    folder = Path(config.output) / "bound"
    events = rows(folder, "events")
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "completed")
    assert events[-1]["reason"].startswith("byte budget: round")
    trained = {r["round"] for r in rows(folder, "metrics") if r["phase"] == "train"}
    last = max(trained)
    assert trained == set(range(1, last + 1))
    assert last < 9
    scored = {r["round"] for r in rows(folder, "metrics") if r["phase"] == "evaluate"}
    assert last in scored  # though evaluation.every would not have it yet
    total = sum(r["bytes"] for r in rows(folder, "ledger"))
    assert total <= config.wire.budget_bytes


def test_a_budget_stops_before_a_round_and_the_run_is_complete(recipe, capsys):
    config = bound(recipe)
    assert run_recipe(config, runtime="inprocess") == COMPLETED
    assert "stopped early by byte budget" in capsys.readouterr().out
    kept_to(config)
    folder = Path(config.output) / "bound"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reason"].startswith("byte budget")
    assert "ended before its last round" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_budget_holds_where_what_goes_down_grows(recipe):
    config = bound(recipe, server__rule="fedex")
    run_in_process(config)
    kept_to(config)


def test_a_budget_for_no_round_at_all_is_refused_with_what_one_takes(recipe, capsys):
    assert run_recipe(recipe(wire__budget_bytes=1000), runtime="inprocess") == REFUSED
    assert "one round takes up to" in capsys.readouterr().err
