from __future__ import annotations

import pytest

from fedloom.config import RunConfig
from fedloom.rules.workload import lessons_of, reach, round_steps


def config(**changes) -> RunConfig:
    return RunConfig().replaced(**changes)


def test_a_curriculum_deals_every_row_out_and_never_none():
    train = config(train__curriculum=True).train
    spans = [lessons_of(10, train, 4, r) for r in (1, 2, 3, 4)]
    assert spans == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [lessons_of(1, train, 4, r) for r in (1, 4)] == [(0, 1), (0, 1)]
    assert lessons_of(10, train, 4, 5) == (0, 10)  # after the last round: fine-tuning
    assert lessons_of(0, train, 4, 1) == (0, 0)


def test_steps_follow_from_rows_and_recipe():
    assert [round_steps(config(), rows, 1) for rows in (4, 5, 200)] == [1, 2, 50]
    assert round_steps(config(train__epochs=3), 5, 1) == 6
    assert round_steps(config(train__max_steps=7), 5, 1) == 7


def test_reach_grows_with_steps_and_rank_and_under_sgd_with_the_scale():
    unlike = {"lora__ranks": "8,2,8,8,8", "server__rule": "flex"}
    assert reach(config(), 0, 200, 1) / reach(config(), 1, 4, 1) == 50
    ranks = config(**unlike)
    assert reach(ranks, 0, 8, 1) / reach(ranks, 1, 8, 1) == pytest.approx(2)
    sgd = config(**unlike, train__optimizer="sgd")
    assert reach(sgd, 1, 8, 1) / reach(sgd, 0, 8, 1) == pytest.approx(2)
    gates = config(lora__ranks="8,2,8,8,8", share="memory")
    assert reach(gates, 0, 8, 1) == reach(gates, 1, 8, 1)
