"""Classes by name, from a recipe: what is refused, in one line, and before which code runs."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from fedloom.config import CustomConfig, RunConfig
from fedloom.errors import Refusal
from fedloom.flat import toml_lines
from fedloom.references import named_class
from fedloom.simulations.own_code import check_own_code
from fedloom.simulations.server_app import STRATEGIES
from fedloom.strategies import AdapterStrategy, FedNL
from fedloom.strategies.choosing import strategy_of

PACKAGE = {
    "__init__.py": "",
    "mod.py": """
from collections import OrderedDict
from fedloom.strategies import AdapterStrategy, FedNL
class Ordered(OrderedDict): ...
class Mine(FedNL):
    own_keys = {"trim": 1, "rate": 0.5}
class Unfinished(AdapterStrategy): ...
class Elsewhere(FedNL):
    action = "elsewhere"
""",
    "broken.py": "import a_package_that_nobody_has",
    "raising.py": "raise RuntimeError('not on\\na Monday')",
}


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "site" / "refpkg"
    folder.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "refpkg"]:
        del sys.modules[name]


def test_a_class_is_found_and_checked(package):
    assert named_class("strategy", "refpkg.mod:Ordered", OrderedDict).__name__ == "Ordered"
    config = RunConfig.from_flat({"strategy": "refpkg.mod:Mine", "custom.rate": 2})
    mine = strategy_of(config, STRATEGIES)
    assert issubclass(mine, FedNL)
    assert strategy_of(RunConfig(), STRATEGIES) is FedNL
    assert config.custom.over(mine.own_keys) == {"trim": 1, "rate": 2.0}
    check_own_code(config, clients_here=True)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nopkg.mod:Mine", "no package nopkg is installed here"),
        ("refpk.mod:Mine", r"did you mean refpkg\?"),
        ("refpkg.mode:Mine", r"refpkg has no module mode \(did you mean mod\?\)"),
        ("refpkg.mod:Mind", r"refpkg.mod has no Mind \(did you mean Mine\?\)"),
        ("refpkg.mod:Ordered", "is a class: expected a subclass of fedloom.strategies"),
        ("refpkg.mod:__name__", "is an object of str: expected a subclass"),
        ("refpkg.mod:Unfinished", "has no fold"),
        ("refpkg.mod:Elsewhere", 'action = "elsewhere": no client answers that'),
        ("refpkg.broken:Mine", "No module named 'a_package_that_nobody_has'; install it here"),
        ("refpkg.raising:Mine", "cannot be imported: RuntimeError: not on$"),
        ("__main__:Mine", "strategy"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(package, reference, said):
    config = RunConfig.from_flat({"strategy": reference})
    with pytest.raises(Refusal, match=said) as refused:
        strategy_of(config, STRATEGIES)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("reference", ["mod", "mod:", ":Mine", "a/b:Mine", "a..b:Mine", "a:b.c"])
def test_what_is_no_reference_is_refused_before_any_import(reference):
    for key in ("strategy", "client"):
        with pytest.raises(Refusal, match="expected module:Class"):
            RunConfig.from_flat({key: reference})


def test_a_package_below_a_pushed_folder_runs_nothing(package):
    (package / "__init__.py").write_text("raise SystemExit('it ran')")
    for folder in (package.parent, package.parent.parent):
        with pytest.raises(Refusal, match="came with the app and is not installed here"):
            named_class("client", "refpkg.mod:Mine", AdapterStrategy, [folder])
    assert "refpkg" not in sys.modules


def test_custom_keys_are_free_typed_and_part_of_the_recipe(tmp_path):
    config = RunConfig.from_flat({"custom.trim": 2, "custom.deep.er": "x", "custom.on": True})
    assert RunConfig.from_flower(config.flat()) == config
    assert hash(config) == hash(RunConfig.from_flower(config.flat()))
    (tmp_path / "r.toml").write_text(toml_lines(config.flat()))
    assert RunConfig.from_toml(tmp_path / "r.toml") == config
    assert config.digest() != config.replaced(custom__trim=3).digest() != RunConfig().digest()
    assert config.replaced(rounds=9).custom == config.custom
    assert RunConfig.from_flat({"clients.warm": True}).digest() == RunConfig().digest()
    assert "custom" not in " ".join(RunConfig().flat())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"Trim": 1}, "lower-case"),
        ({"trim": [1]}, "is list: expected a bool"),
        ({"trim": float("nan")}, "finite"),
    ],
)
def test_bad_custom_keys_are_refused(keys, said):
    with pytest.raises(Refusal, match=said):
        RunConfig.from_flat({f"custom.{key}": value for key, value in keys.items()})


def test_misspelt_and_mistyped_custom_keys_are_refused(package):
    mine = {"strategy": "refpkg.mod:Mine"}
    for keys, said in (
        ({"custom.tirm": 1}, "did you mean trim"),
        ({"custom.trim": 1.5}, "is float: expected int"),
        ({"custom.trim": True}, "is bool: expected int"),
    ):
        with pytest.raises(Refusal, match=said):
            check_own_code(RunConfig.from_flat({**mine, **keys}), clients_here=True)
    with pytest.raises(Refusal, match="FedNL has no such key; its own_keys are none"):
        check_own_code(RunConfig.from_flat({"custom.trim": 1}), clients_here=True)
    assert CustomConfig({"rate": 1}).over({"rate": 0.0}) == {"rate": 1.0}
