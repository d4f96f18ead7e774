from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedloom.config import BASELINES, RunConfig
from fedloom.errors import Refusal
from fedloom.flat import toml_lines

ROOT = Path(__file__).parents[1]


def test_flat_and_back_is_the_same_config():
    config = RunConfig().replaced(lora__rank=4, memory__gate="scalar", train__learning_rate=1e-3)
    assert RunConfig.from_flower(config.flat()) == config


def test_recipe_as_toml_reads_back_equal(tmp_path):
    config = RunConfig().replaced(
        name="a.b",
        output="/tmp/\U0001f600 \x7f",
        sampling__fraction=0.3,
        memory__negative_eigenvalues=True,
    )
    (tmp_path / "r.toml").write_text(toml_lines(config.flat()))
    assert RunConfig.from_toml(tmp_path / "r.toml") == config


def test_flower_app_config_lists_every_key_with_its_default():
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    flat = RunConfig.from_flat({}).flat()
    (ROOT / "pyproject.toml").read_text()

    def walk(node, prefix=""):
        for key, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    assert dict(walk(tree)) == flat


@pytest.mark.parametrize(
    "path", sorted((ROOT / "simulations").glob("*.toml")), ids=lambda p: p.name
)
def test_every_shipped_recipe_is_valid(path):
    assert RunConfig.from_toml(path).rounds >= 1


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("lora.rnak", 8, "did you mean lora.rank?"),
        ("lora.rank", "8", "expected int"),
        ("lora.rank", True, "expected int"),
        ("lora.rank", 0, "at least 1"),
        ("train.learning-rate", float("nan"), "positive"),
        ("memory.gate", "vectr", "did you mean vector?"),
        ("memory.window", -1, "at least 0"),
        ("lora.targets", "q,z", "expected one of"),
        ("lora.targets", "q,x", "names of one family"),
        ("lora.targets", "dt", "expected one of"),
        ("memory.kernel", "triton", "expected one of auto, torch, fla"),
        ("sampling.fraction", 0.0, "above 0"),
        ("data.test-share", 1.0, "between 0 and 1"),
        ("name", "../up", "becomes a folder"),
        ("seed", -1, "at least 0"),
        ("server.momentum", 1.0, "below 1"),
        ("server.rule", "svdd", "did you mean svd?"),
        ("method", "fedwhat", "expected one of fednl"),
    ],
)
def test_bad_value_is_refused_in_one_line(key, value, expected):
    with pytest.raises(Refusal, match=expected) as caught:
        RunConfig.from_flat({key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", ["mean", "ffa", "rolora", "fedsa", "fedex"])
def test_ranks_are_refused_by_rules_that_need_one(rule):
    with pytest.raises(Refusal, match=r"take one of svd, flex, flora") as caught:
        RunConfig().replaced(server__rule=rule, lora__ranks="8,4,2,4,8")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lora__ranks": "8,4"}, "2 ranks for clients.count = 5"),
        ({"lora__ranks": "8,4,2,four,8"}, "expected whole numbers"),
        ({"lora__ranks": "8,4,2,9,8"}, "from 1 to lora.rank, 8 here"),
        ({"lora__ranks": "8,4,2,0,8"}, "from 1 to lora.rank"),
        ({"server__side_rank": 4}, "only flora and fedex"),
        ({"server__side_rank": -1, "server__rule": "flora"}, "at least 0"),
        ({"server__momentum": 0.9}, 'set server.rule = "mean"'),
        ({"server__rule": "flora", "share": "memory"}, "nothing to do"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_in_one_line(changes, expected):
    with pytest.raises(Refusal, match=expected) as caught:
        RunConfig().replaced(**changes)
    assert "\n" not in str(caught.value)


def test_ranks_and_scales_by_partition():
    lora = RunConfig().replaced(lora__ranks=" 8, 4,2,4,8 ").lora
    assert [lora.rank_of(p) for p in range(5)] == [8, 4, 2, 4, 8]
    assert [lora.scale_of(p) for p in range(3)] == [2.0, 4.0, 8.0]
    with pytest.raises(Refusal, match="no rank for partition 5"):
        lora.rank_of(5)


def test_a_baseline_is_one_line_and_keeps_its_rule():
    made = {name: RunConfig.from_flat({"baseline": name}) for name in BASELINES}
    assert {c.server.rule for c in made.values()} >= {"mean", "ffa", "rolora", "fedsa", "flora"}
    for name, config in made.items():
        assert RunConfig.from_flat(config.flat()) == config
        assert config.server.rule == BASELINES[name].get("server.rule", config.server.rule)


def test_whole_number_is_a_float_too():
    assert RunConfig.from_flat({"lora.alpha": 32}).lora.alpha == 32.0


def test_digest_ignores_where_and_sees_what():
    config = RunConfig()
    assert config.replaced(output="elsewhere", name="x").digest() == config.digest()
    assert config.replaced(seed=1).digest() != config.digest()


def test_recipe_that_is_no_toml_is_refused(tmp_path):
    (tmp_path / "r.toml").write_text("rounds = = 3")
    with pytest.raises(Refusal, match="is not TOML"):
        RunConfig.from_toml(tmp_path / "r.toml")
    with pytest.raises(Refusal, match="expected a TOML file"):
        RunConfig.from_toml(tmp_path / "none.toml")
