"""What ``privacy`` refuses before any model is loaded, and the rule it takes by itself."""

from __future__ import annotations

import pytest

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.simulations.cli import read_recipe

MASKS, CLIP = {"privacy.masks": True}, {"privacy.clip": 0.5}


@pytest.mark.parametrize("rule", ["svd", "flex", "flora", "fedex"])
@pytest.mark.parametrize("hidden", [MASKS, CLIP])
def test_rules_that_are_no_sum_are_refused_with_advice(rule, hidden):
    with pytest.raises(Refusal, match=rf'"{rule}": that rule needs .* set server.rule = "ffa"'):
        RunConfig.from_flat({"server.rule": rule, **hidden})


@pytest.mark.parametrize("hidden", [MASKS, CLIP])
def test_ffa_stands_where_no_rule_is_named(hidden, tmp_path):
    config = RunConfig.from_flat(hidden)
    assert config.server.rule == "ffa"
    assert RunConfig.from_flower(config.flat()) == config
    assert config.replaced(rounds=4).server.rule == "ffa"
    assert RunConfig().replaced(privacy__masks=True).server.rule == "ffa"
    assert RunConfig.from_flat({**hidden, "baseline": "fedavg"}).server.rule == "mean"
    assert RunConfig.from_flat({**hidden, "share": "memory"}).server.rule == "svd"  # no LoRA goes
    (tmp_path / "r.toml").write_text("rounds = 2\n")
    settings = [f"{key}={str(value).lower()}" for key, value in hidden.items()]
    assert read_recipe(str(tmp_path / "r.toml"), settings, {}).server.rule == "ffa"
    assert RunConfig().server.rule == "svd"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"privacy.noise": 1.0}, "without privacy.clip"),
        ({"privacy.epsilon": 1.0}, "without privacy.clip"),
        ({**CLIP, "privacy.noise": 1.0, "privacy.epsilon": 1.0}, "leave one of them out"),
        ({**CLIP, "privacy.noise": float("nan")}, "expected a finite number"),
        ({"privacy.clip": -1.0}, "expected a finite number"),
        ({**CLIP, "privacy.delta": 1.0}, "expected between 0 and 1"),
        ({**MASKS, "privacy.threshold": 0.5}, "privacy.threshold = 0.5: expected above 0.5"),
        ({**MASKS, "privacy.bits": 53}, "privacy.bits = 53: expected 24 to 52"),
        ({**CLIP, "privacy.sampling": "secret"}, "without noise that the server adds"),
        (
            {**MASKS, **CLIP, "privacy.noise": 1.0, "privacy.sampling": "secret"},
            "no secret to a server that masks protect from",
        ),
        ({**MASKS, "share": "none"}, "nothing is sent that could be hidden"),
        ({**MASKS, "baseline": "scaffold"}, "sends or shows more than one update"),
        ({**MASKS, "baseline": "pooled"}, "sends or shows more than one update"),
        ({**CLIP, "baseline": "ditto"}, "expected one of plain"),
        ({**MASKS, "clients.count": 1}, "a sum of one is that client's update"),
        ({**MASKS, "sampling.fraction": 0.2}, "a sum of one is that client's update"),
        (
            {**MASKS, "method": "faast", "data.task": "classes", "faast.encoder": "pixels"},
            'privacy = "..." with method = "faast"',
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(values, says):
    with pytest.raises(Refusal, match=says.replace(".", r"\.").replace("'", ".")):
        RunConfig.from_flat(values)


@pytest.mark.parametrize("baseline", ["ditto", "fedala", "fedssi", "fedavg-ft", "fedsa-lora"])
def test_what_stays_at_home_goes_with_masks(baseline):
    assert RunConfig.from_flat({**MASKS, "baseline": baseline}).privacy.masks


@pytest.mark.parametrize(
    ("key", "value"),
    [("wire.dtype", "int8"), ("wire.budget-bytes", 10**9), ("sampling.rest-after", 2)],
)
def test_what_must_see_each_change_is_refused_beside_privacy(key, value):
    told = {"server__rule": "ffa", "privacy__masks": True}
    with pytest.raises(Refusal, match=f"{key} with privacy"):
        RunConfig().replaced(**told, **{key.replace(".", "__").replace("-", "_"): value})
