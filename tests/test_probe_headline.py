"""Whose figures the probe study leads with: one reader's, whatever test rows say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PROBE = Path(__file__).parents[1] / "benchmarks" / "faast" / "probe.py"


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.syspath_prepend(str(PROBE.parent))
    spec = importlib.util.spec_from_file_location("probe_study", PROBE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "probe_study", module)
    spec.loader.exec_module(module)
    return module


def row(accuracy, seconds, size=100):
    return {"accuracy": accuracy, "seconds": seconds, "bytes": size}


@pytest.mark.parametrize("filter_alone", [0.5, 0.99])
def test_the_reader_does_not_depend_on_its_accuracy(probe, filter_alone):
    found = {
        "FAAST": row(filter_alone, 0.001),
        probe.OURS: row(0.90, 0.1),
        "logistic, tuned": row(0.903, 2.0),
        "kNN": row(0.9, 1.0, 4000),
    }
    told = probe.headline(found)
    assert (told["reader"], told["accuracy"]) == (probe.OURS, 0.9)
    assert (told["speedup_vs_probe"], told["within_margin"]) == (20.0, True)
    assert told["stored_bytes_vs_knn"] == 0.025


def test_what_was_not_run_has_no_figure(probe):
    found = {probe.OURS: row(0.9, 0.1), "logistic, tuned": row(0.91, 2.0)}
    told = probe.headline(found)
    for name in ("of_five_cs", "logistic_cv", "one_fit"):
        assert next(v for k, v in told.items() if k.endswith(name)) is None
    assert told["stored_bytes_vs_knn"] is None
    assert told["within_margin"] is False
    told = probe.headline(found | {"logistic, five folds": row(0.92, 5.0)})
    assert (told["speedup_vs_logistic_cv"], told["probe_accuracy"]) == (50.0, 0.92)
