"""The translation study: whole on a tiny random model, and how its pairs are made and dealt."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedloom.paired import paired_bootstrap

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "faast"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("translation_study", SCRIPTS / "translation.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "translation_study", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pairs(study):
    return sys.modules["translation_pairs"]


def example(text, label):
    return {"input": text, "target_scores": {"good": 0, "bad": 0, label: 1}}


def test_pairs_share_no_sentence_on_either_side(pairs):
    rows = [
        ("The room was very clean.", "La chambre était propre."),
        ("the room was very clean .", "La chambre fut très propre."),
        ("The room was clean indeed.", "LA CHAMBRE, était propre."),
        ("Too short.", "La chambre était propre là."),
        ("Hotel Grand Miramar Palace", "Hotel Grand Miramar Palace"),
        ("A long walk to the old town", "x" * 161),
        ("The beach is rather far away.", "La plage est plutôt loin."),
    ]
    assert pairs.distinct(rows) == [rows[0], rows[-1]]


def test_parts_are_disjoint_and_only_support_goes_by_seed(pairs):
    rows = pairs.sentence_pairs(pairs.MADE_UP, Path("unused"))
    pool, held, test = pairs.dealt(rows, 6, 8)
    assert (len(held), len(test)) == (6, 8)
    assert sorted(pool + held + test) == sorted(rows)
    first, second = (pairs.drawn(pool, 24, seed) for seed in (0, 1))
    assert set(first) <= set(pool)
    assert set(first) != set(second)
    with pytest.raises(SystemExit, match=r"--support 1000: expected at most"):
        pairs.drawn(pool, 1000, 0)


@pytest.mark.parametrize("count", [2, 3, 40])
def test_the_control_has_the_same_texts_and_no_pair(pairs, count):
    rows = pairs.sentence_pairs(pairs.MADE_UP, Path("unused"))[:count]
    mixed = pairs.shuffled(rows, 0)
    assert [left for left, _ in mixed] == [left for left, _ in rows]
    assert sorted(right for _, right in mixed) == sorted(right for _, right in rows)
    assert not set(mixed) & set(rows)


def test_files_of_another_order_are_refused(pairs):
    left = [example("one", "good"), example("two", "bad")]
    right = [example("un", "good"), example(" deux\tmots ", "bad")]
    assert pairs.aligned("ab", {"a": left, "b": right}) == [("one", "un"), ("two", "deux mots")]
    for other in (right[::-1], right[:1]):
        with pytest.raises(SystemExit, match="expected two files with one order"):
            pairs.aligned("ab", {"a": left, "b": other})


def test_an_interval_per_token_is_about_the_ratio_of_sums(study):
    random = np.random.default_rng(0)
    tokens = random.integers(5, 40, 60)
    gap = random.normal(-0.2, 0.1, 60) * tokens
    told = study.per_token([gap], tokens)
    assert told.value == pytest.approx(gap.sum() / tokens.sum())
    picked = random.integers(60, size=(4000, 60))
    ratios = gap[picked].sum(1) / tokens[picked].sum(1)
    limits = np.quantile(ratios, (0.025, 0.975))
    # The tangent and another draw: both are small beside the interval's width.
    assert [told.low, told.high] == pytest.approx(limits, abs=0.1 * (limits[1] - limits[0]))
    even = study.per_token([gap], [1] * 60)  # one token each: the plain mean
    assert even.value == pytest.approx(paired_bootstrap([gap], seed=0).value)


def test_words_are_counted_as_often_as_both_have_them(study):
    assert study.unigram_f1("Le lit, le lit.", "le lit .") == pytest.approx(2 * 3 / (6 + 3))
    assert study.unigram_f1("", "le lit") == 0
    assert study.unigram_f1("LE LIT", "le lit") == 1


@pytest.mark.slow
def test_the_study_runs_whole(tmp_path):
    command = [sys.executable, str(SCRIPTS / "translation.py"), "--quick", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["laws"]["r0_bit_equal"]
    assert found["laws"]["detached_bit_equal"]
    assert found["laws"]["largest_gap_to_hung"] < 1e-4  # float32, another order of sums
    told = found["likelihood"]
    # Even a random model's memory learns which words the support has.
    assert told["memory"]["nats"] < told["base"]["nats"]
    assert told["memory"]["nats_over_base"][0] < 0
    assert found["greedy"]["sentences"] == 2
    (kept,) = tmp_path.glob("answers-*.jsonl")
    assert len(kept.read_text().splitlines()) == 2
