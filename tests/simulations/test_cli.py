# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from fedloom.config import RunConfig
from fedloom.data.partition import holdings
from fedloom.errors import Refusal

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")

QUESTION = '{"question": "q%d %s", "choices": ["a", "b", "c", "d"], "answer": 1, "subject": "%s"}\n'


def _fedloom(*arguments, cwd):
    command = [sys.executable, "-m", "fedloom.simulations", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def recipe(tmp_path):
    """A recipe over a handful of local rows, for no network."""
    subjects = ["professional_law", "philosophy", "anatomy", "machine_learning", "virology"]
    rows = [QUESTION % (i, s, s) for s in subjects for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    path = tmp_path / "recipe.toml"
    path.write_text('data.source = "path:rows.jsonl"\nmodel.source = "tiny:llama"\n')
    return path


REFUSED = {
    "no recipe": (["run", "none.toml"], "recipe none.toml"),
    "no run": (["run", "--resume", "none"], "none: no run is there"),
    "two names": (["run", "--resume", "none", "--name", "x"], "--name with --resume"),
    "nothing": (["run"], "no recipe: expected a TOML file"),
    "unknown key": (["run", "recipe.toml", "--set", "lora.rnak=3"], "did you mean lora.rank?"),
    "wrong type": (["run", "recipe.toml", "--set", "rounds=many"], "rounds = 'many' is str"),
    "out of range": (["run", "recipe.toml", "--set", "rounds=0"], "rounds = 0"),
    "no setting": (["run", "recipe.toml", "--set", "rounds"], "expected key=value"),
    "bad name": (["run", "recipe.toml", "--name", "../up"], "name = "),
    "runtime": (["run", "recipe.toml", "--runtime", "rya"], "did you mean ray?"),
    "no model": (["run", "recipe.toml", "--set", "model.source=path:none"], "none"),
    "model name": (["run", "recipe.toml", "--set", "model.source=embedded:smollm2"], "embedded"),
    "model kind": (["run", "recipe.toml", "--set", "model.source=smollm2"], "smollm2"),
    "no data": (["run", "recipe.toml", "--set", "data.source=path:none.csv"], "none.csv"),
    "few rows": (["run", "recipe.toml", "--set", "data.min-train=500"], "data.min-train"),
    "clients": (["run", "recipe.toml", "--set", "clients.count=6"], "clients.count = 6"),
    "cpus": (["run", "recipe.toml", "--set", "clients.cpus=9999"], "clients.cpus = 9999"),
    "no manifest": (["run", "recipe.toml", "--set", "data.manifest=none.json"], "none.json"),
    "no report": (["report", "none"], "none"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_refusal_is_one_line_and_code_2(recipe, arguments, said):
    done = _fedloom(*arguments, cwd=recipe.parent)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("fedloom: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (recipe.parent / "runs").exists()


def test_manifest_that_differs_is_refused_before_a_folder_is_made(recipe):
    folder = recipe.parent
    done = _fedloom("partition", "recipe.toml", "--write", "parts/p.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    for part in ("Law/Ethics", "Humanities", "STEM", "Math/CS", "Med/Psych", "digest "):
        assert part in done.stdout
    assert "q1 anatomy" not in (folder / "parts/p.json").read_text()
    settings = ["--set", "data.manifest=parts/p.json", "--set", "seed=1"]
    done = _fedloom("run", "recipe.toml", *settings, cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("fedloom: partitions differ in seed")
    assert not (folder / "runs").exists()


def test_preflight_lets_a_good_recipe_pass(recipe, monkeypatch):
    from fedloom.simulations import runner

    monkeypatch.chdir(recipe.parent)
    config = runner.with_absolute_paths(RunConfig.from_toml(recipe))
    manifest = recipe.parent / "p.json"
    manifest.write_text(holdings(config.data, config.seed)[1].to_json())
    runner.preflight(config.replaced(data__manifest=str(manifest)), "inprocess")


def test_coordinator_without_torch_skips_the_model(recipe, monkeypatch):
    from fedloom.simulations import runner

    monkeypatch.chdir(recipe.parent)
    config = runner.with_absolute_paths(RunConfig.from_toml(recipe))
    config = config.replaced(model__source="path:none")
    with pytest.raises(Refusal, match="none"):
        runner.preflight(config)
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    runner.preflight(config)
    with pytest.raises(Refusal, match=r"fedloom\[node\]"):
        runner.preflight(config, "inprocess")
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: name == "torch" or None)
    with pytest.raises(Refusal, match=r"fedloom\[simulation\]"):
        runner.preflight(config, "ray")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rounds=5", 5),
        ("memory.enabled=false", False),
        ("train.learning-rate=1e-3", 1e-3),
        ("lora.targets=q,k", "q,k"),
        ("lora.targets='q'", "q"),
        ("name=2026", "2026"),
        ("name=2026-01-02", "2026-01-02"),
        ("data.source=path:a=b.csv", "path:a=b.csv"),
        ("data.manifest=", ""),
    ],
)
def test_settings_are_toml_scalars_or_text(text, value):
    from fedloom.simulations.cli import parse_setting

    parsed = parse_setting(text)[1]
    assert parsed == value
    assert type(parsed) is type(value)


def test_options_win_over_settings_and_settings_over_the_recipe(tmp_path):
    from fedloom.simulations.cli import read_recipe

    path = tmp_path / "r.toml"
    path.write_text('rounds = 9\nname = "a"\nseed = 4\n')
    config = read_recipe(str(path), ["rounds=2", "name=b"], {"name": "c"})
    assert (config.rounds, config.name, config.seed) == (2, "c", 4)


def test_version_and_help(tmp_path):
    import fedloom

    assert _fedloom("version", cwd=tmp_path).stdout == f"{fedloom.__version__}\n"
    done = _fedloom("--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("run", "fetch", "report", "partition", "version"):
        assert command in done.stdout


def test_a_coordinator_needs_no_torch(recipe):
    """Everything but a run and a fetch works where the node's packages are missing."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'peft', 'ray', 'gguf'): sys.modules[name] = None\n"
        "from fedloom.simulations.cli import main\n"
        "main(sys.argv[1:])\n"
    )

    def without(*arguments):
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=recipe.parent, capture_output=True, text=True)

    assert without("version").returncode == 0
    assert without("partition", "recipe.toml").returncode == 0
    assert without("report", "none").returncode == 2
    done = without("run", "recipe.toml", "--set", "rounds=0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_wrong_option_has_code_2_and_no_traceback(tmp_path):
    done = _fedloom("run", "r.toml", "--nosuch", cwd=tmp_path)
    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_of_ours_keeps_its_traceback_without_local_variables(monkeypatch):
    from typer.testing import CliRunner

    from fedloom.simulations import cli

    def broken(*arguments, **options):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("fedloom.simulations.runner.run_recipe", broken)
    monkeypatch.setattr(cli, "read_recipe", lambda *arguments: RunConfig())
    result = CliRunner().invoke(cli.app, ["run", "r.toml"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert cli.app.pretty_exceptions_enable is False


@pytest.mark.parametrize(("error", "code"), [(Refusal("no"), 2), (KeyboardInterrupt(), 130)])
def test_main_turns_what_is_raised_into_an_exit_code(monkeypatch, capsys, error, code):
    from fedloom.simulations import cli

    def stop(*arguments):
        raise error

    monkeypatch.setattr(cli, "read_recipe", stop)
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "r.toml"])
    assert left.value.code == code
    assert capsys.readouterr().err == ("fedloom: no\n" if code == 2 else "")
