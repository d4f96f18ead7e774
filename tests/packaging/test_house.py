"""The house rules that a machine can count."""

from __future__ import annotations

import ast
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedloom

ROOT = Path(__file__).parents[2]
ROOMS = {"src/fedloom": "fedloom", "strategies": "fedloom.strategies", "clients": "fedloom.clients"}
ROOMS["simulations"] = "fedloom.simulations"
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def functions(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines(node) -> int:
    return node.end_lineno - node.lineno + 1


def test_functions_and_files_are_short():
    sizes = {(p.name, f.name): lines(f) for p in FILES for f in functions(p)}
    assert len(sizes) > 200
    assert {name: n for name, n in sizes.items() if n > 80} == {}
    assert statistics.median(sizes.values()) <= 12
    assert {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 400} == {}


def test_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fedloom.__version__


def test_package_list_names_every_package():
    """A package that is not listed is missing from the wheel, and only there."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = set()
    for room, name in ROOMS.items():
        for init in (ROOT / room).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / room).parts
            found.add(".".join((name, *inside)))
    assert set(listed) == found


def test_nothing_unpickles():
    """No pickle on any wire or disk: neither the module nor torch's loader that uses it.

    A pinned weights file of others is read by torch's own reader of tensors alone.
    """
    bad = re.compile(
        r"\b(import pickle|pickle\.|torch\.load|np\.load|joblib|cloudpickle|marshal)\b"
    )
    hits = [
        f"{p}:{i}"
        for p in FILES
        for i, x in enumerate(p.read_text().splitlines(), 1)
        if bad.search(x) and not re.search(r"torch\.load\(.*weights_only=True\)", x)
    ]
    assert hits == []


def test_no_print_and_no_bare_except():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), path
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            assert not (called and node.func.id == "print"), path


def test_a_coordinator_needs_no_torch():
    """Import what a server imports, in a process where torch and ray cannot be."""
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'peft', 'ray')));"
        "import fedloom.simulations.server_app, fedloom.strategies, fedloom.data.partition"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_recipe_page_is_current():
    script = "import runpy, sys; sys.stdout.write(runpy.run_path(sys.argv[1])['page']())"
    made = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / "docs" / "make_recipes.py")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert made.stdout == (ROOT / "docs" / "recipes.md").read_text(), "run docs/make_recipes.py"


def test_readme_names_commands_that_exist():
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z]+)\b", text)) - {"the"} <= targets
    helped = subprocess.run(
        [sys.executable, "-m", "fedloom.simulations", "--help"], capture_output=True, text=True
    ).stdout
    for command in set(re.findall(r"`?fedloom (run|fetch|partition|report|version)\b", text)):
        assert command in helped


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60


@pytest.mark.slow
def test_wheel_holds_the_four_rooms_and_no_tests(tmp_path):
    skipped = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=skipped)  # no stale build/lib
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    subprocess.run(
        [*command, "--outdir", str(tmp_path), str(source)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("fedloom-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in FILES:
        room = next(r for r in ROOMS if path.is_relative_to(ROOT / r))
        inside = path.relative_to(ROOT / room)
        assert f"{ROOMS[room].replace('.', '/')}/{inside}" in names
    assert "fedloom/simulations/fednl.toml" in names
    assert "fedloom/simulations/deploy-files/compose.yaml" in names
    assert "fedloom/py.typed" in names
    assert not [n for n in names if "test" in n.replace("fedloom/testing/", "")]


def test_fab_is_one_toml_file(tmp_path):
    """The wheel carries the code, the FAB carries the choice."""
    tool = Path(sys.executable).with_name("flwr")
    out = subprocess.run(
        [tool, "build", "--app", str(ROOT)], cwd=tmp_path, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stdout + out.stderr
    (fab,) = tmp_path.glob("*.fab")
    names = [n for n in zipfile.ZipFile(fab).namelist() if not n.startswith(".info/")]
    assert names == ["pyproject.toml"]
