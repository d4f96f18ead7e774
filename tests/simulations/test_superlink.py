# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import uuid
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.simulations import runner
from fedloom.simulations.processes import Family, marked, process_table
from fedloom.simulations.superlink import (
    LocalSuperLink,
    SuperLinkError,
    federation_config,
    toml_lines,
    write_app,
)

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")

ODD = 'quote " back \\ tab\t del\x7f café \N{GRINNING FACE} [x]'
EXACT_ODD = 0.1 + 0.2


def test_lines_read_back_to_the_same_scalars():
    values = {
        "a": ODD,
        "b": "",
        "x.c": True,
        "x.d": 1e-5,
        "x.e": EXACT_ODD,
        "y.f": 10**15,
        "g": 1e16,
    }
    tree = tomllib.loads(toml_lines(values))
    assert tree["a"] == ODD
    assert tree["x"] == {"c": True, "d": 1e-5, "e": EXACT_ODD}
    assert isinstance(tree["g"], float)
    assert tree["y"]["f"] == 10**15


def test_app_has_every_key_of_the_recipe_with_its_value(tmp_path):
    config = RunConfig.from_flat({"rounds": 7, "lora.rank": 2, "data.source": f"path:{ODD}"})
    tree = tomllib.loads((write_app(tmp_path, config) / "pyproject.toml").read_text("utf-8"))
    assert tree["project"]["dependencies"] == []
    assert "federations" not in tree["tool"]["flwr"]
    assert RunConfig.from_flat(_flat(tree["tool"]["flwr"]["app"]["config"])) == config


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_only_the_toml_is_uploaded(tmp_path):
    from flwr.cli.build import build_fab_from_disk

    write_app(tmp_path, RunConfig())
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("{}")
    (tmp_path / "code.py").write_text("")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path))) as fab:
        assert [n for n in fab.namelist() if not n.startswith(".info")] == ["pyproject.toml"]


def test_federation_config_says_only_what_was_asked():
    assert federation_config(RunConfig()) == (
        "num-supernodes=5 client-resources-num-cpus=1 client-resources-num-gpus=0.0"
    )
    config = RunConfig.from_flat(
        {"clients.gpus": 0.5, "clients.total-gpus": 2, "clients.total-cpus": 8, "clients.cpus": 3}
    )
    assert federation_config(config) == (
        "num-supernodes=5 client-resources-num-cpus=3 client-resources-num-gpus=0.5"
        " init-args-num-cpus=8 init-args-num-gpus=2"
    )


def test_run_folder_is_never_overwritten(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    config = runner.with_absolute_paths(RunConfig.from_flat({"output": str(tmp_path)}))
    names = []
    for _ in range(3):
        placed, folder = runner.take_folder(config, console)
        names.append(folder.name)
        assert RunConfig.from_toml(folder / "config.toml") == placed
        assert Path(placed.output, placed.name) == folder
    assert names == ["fednl", "fednl-2", "fednl-3"]
    assert "fednl is not empty: this run goes to" in console.file.getvalue()


def test_empty_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "fednl").mkdir()
    config = RunConfig.from_flat({"output": str(tmp_path)})
    assert runner.take_folder(config, Console(file=io.StringIO()))[1].name == "fednl"


def test_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = RunConfig.from_flat({"output": str(tmp_path / "file")})
    with pytest.raises(Refusal, match="output = "):
        runner.take_folder(config, Console(file=io.StringIO()))


def test_paths_become_absolute_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig.from_flat({"model.source": "path:m", "data.manifest": "p.json"})
    placed = runner.with_absolute_paths(config)
    assert placed.model.source == f"path:{tmp_path / 'm'}"
    assert placed.data.manifest == str(tmp_path / "p.json")
    assert placed.data.source == config.data.source


def test_family_ends_children_that_changed_session_and_orphans(tmp_path):
    token = f"FEDLOOM_TEST={uuid.uuid4()}"
    name, _, value = token.partition("=")
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    command = [sys.executable, str(script), "elder"]
    root = subprocess.Popen(command, env={**os.environ, name: value})
    family = Family(root, token)
    _until(lambda: len(marked(token)) == 3)
    family.end(grace_seconds=1.0)
    assert marked(token) == set()
    assert root.returncode is not None


def test_superlink_that_cannot_start_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it is broken\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr("fedloom.simulations.superlink.tool", lambda name: str(broken))
    with (
        pytest.raises(SuperLinkError, match=r"ended with code 3\n(.|\n)*it is broken"),
        LocalSuperLink(tmp_path / "superlink.log") as link,
    ):
        pass
    assert "link" not in locals()


def test_run_that_stays_pending_is_an_error(tmp_path, monkeypatch):
    link = LocalSuperLink(tmp_path / "superlink.log", pending_seconds=0.0)
    monkeypatch.setattr(link, "check", lambda: False)
    monkeypatch.setattr(link, "status", lambda run: ("pending", ""))
    with pytest.raises(SuperLinkError, match="still pending after"):
        link.wait("1", poll_seconds=0.0)


def test_quiet_run_is_seldom_asked_for_until_its_end_is_seen(tmp_path, monkeypatch):
    link = LocalSuperLink(tmp_path / "superlink.log")
    asked, looks = [], []
    monkeypatch.setattr(link, "check", lambda: not looks.append(1))
    monkeypatch.setattr(link, "status", lambda run: asked.append(1) or ("finished:completed", ""))
    assert link.wait("1", lambda: len(looks) >= 3, poll_seconds=0.0) == ("finished:completed", "")
    assert (len(asked), len(looks)) == (1, 3)


@pytest.mark.slow
def test_app_completes_and_nothing_lingers(tmp_path):
    app = _toy(tmp_path / "toy")
    log = tmp_path / "superlink.log"
    with LocalSuperLink(log) as link:
        home, mark = link.folder, f"FLWR_HOME={link.folder / 'home'}"
        run = link.submit(app, {"mode": "fine"}, "num-supernodes=2")
        assert link.wait(run) == ("finished:completed", "")
        assert "2 replies, sum 6.0" in link.run_log(run)
        assert marked(mark)
    _nothing_lingers(mark, home)
    assert log.stat().st_size > 0


@pytest.mark.slow
def test_server_that_raises_is_a_failed_run(tmp_path):
    app = _toy(tmp_path / "toy")
    with LocalSuperLink(tmp_path / "superlink.log") as link:
        home, mark = link.folder, f"FLWR_HOME={link.folder / 'home'}"
        run = link.submit(app, {"mode": "raise"}, "num-supernodes=2")
        status, details = link.wait(run)
        assert status == "finished:failed"
        assert "no such luck" in details
        assert "ValueError: no such luck" in link.run_log(run)
    _nothing_lingers(mark, home)


@pytest.mark.slow
def test_dead_superexec_is_an_error_and_no_endless_wait(tmp_path):
    app = _toy(tmp_path / "toy")
    with LocalSuperLink(tmp_path / "superlink.log") as link:
        home, mark = link.folder, f"FLWR_HOME={link.folder / 'home'}"
        link.check()
        for pid in link._family.children:
            os.kill(pid, signal.SIGKILL)
        run = link.submit(app, {}, "num-supernodes=2")
        with pytest.raises(SuperLinkError, match="flower-superexec has died"):
            link.wait(run)
    _nothing_lingers(mark, home)


@pytest.mark.slow
def test_submission_error_is_an_error_although_flwr_returns_0(tmp_path):
    app = _toy(tmp_path / "toy")
    with LocalSuperLink(tmp_path / "superlink.log") as link:
        with pytest.raises(SuperLinkError, match="flwr run failed"):
            link.submit(app, {"no-such-key": 1}, "num-supernodes=2")
        with pytest.raises(SuperLinkError, match="Run ID not found"):
            link.status("12345")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [("fine", 0, ""), ("raise", 1, "no such luck"), ("refuse", 2, "the manifest differs")],
)
def test_exit_code_tells_the_truth(tmp_path, mode, code, said):
    done = subprocess.run(
        [sys.executable, str(_script(tmp_path, mode))], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    rows = [json.loads(r) for r in (tmp_path / "runs/fednl/events.jsonl").read_text().splitlines()]
    assert rows[-1]["event"] == "end"
    assert rows[-1]["status"] == ("completed" if code == 0 else "failed")
    if code == 2:
        assert done.stderr == "fedloom: the manifest differs\n"
    if code == 1:
        assert "ValueError: no such luck" in (tmp_path / "runs/fednl/run.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_run_leaves_nothing(tmp_path, number):
    value = str(uuid.uuid4())
    command = [sys.executable, str(_script(tmp_path, "sleep"))]
    process = subprocess.Popen(command, env={**os.environ, "FEDLOOM_TEST": value})
    events = tmp_path / "runs/fednl/events.jsonl"
    _until(lambda: events.exists() and '"round"' in events.read_text(), 120)
    family = Family(process, f"FEDLOOM_TEST={value}").look()
    assert len(family) > 8  # SuperLink, SuperExec, simulation, Ray
    process.send_signal(number)
    assert process.wait(60) == 130
    after = process_table()
    assert not [p for p, entry in family.items() if p in after and after[p].born == entry.born]
    assert marked(f"FEDLOOM_TEST={value}") == set()
    assert json.loads(events.read_text().splitlines()[-1])["reason"] == "interrupted"


FAMILY = """\
import subprocess, sys, time
def bring(role, **how):
    return subprocess.Popen([sys.executable, __file__, role], **how)
if sys.argv[1] == "elder":
    bring("sleeper", start_new_session=True)
    bring("parent").wait()  # its child is an orphan now
if sys.argv[1] == "parent":
    bring("sleeper")
else:
    time.sleep(300)
"""

TOY = """\
[project]
name = "toy-run"
version = "0.1.0"
dependencies = []
[tool.flwr.app]
publisher = "fedloom"
fab-include = ["toyapp/*.py"]
[tool.flwr.app.components]
serverapp = "toyapp.server:app"
clientapp = "toyapp.client:app"
[tool.flwr.app.config]
mode = "fine"
output = ""
name = ""
"""

SERVER = """\
import json, time
from pathlib import Path
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    def tell(event, **more):
        if config["output"]:
            with open(Path(config["output"], config["name"], "events.jsonl"), "a") as file:
                file.write(json.dumps({"event": event, **more}) + "\\n")
    tell("start", method="fednl", rounds=1, clients=2, seed=0)
    if config["mode"] == "raise":
        raise ValueError("no such luck")
    if config["mode"] == "refuse":
        tell("refused", reason="the manifest differs")
        raise ValueError("the manifest differs")
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    ask = RecordDict({"m": MetricRecord({"x": 1.0})})
    asked = [Message(ask, dst_node_id=n, message_type="train") for n in nodes]
    got = [r.content["m"]["x"] for r in grid.send_and_receive(asked)]
    print(f"{len(got)} replies, sum {sum(got)}")
    tell("round", round=1, rounds=1, seconds=1.0, accuracy=0.5)
    time.sleep(300 if config["mode"] == "sleep" else 0)
    tell("end", status="completed", reason="")
"""

CLIENT = """\
import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    total = float(np.ones(3).sum() * message.content["m"]["x"])
    return Message(RecordDict({"m": MetricRecord({"x": total})}), reply_to=message)
"""

# run_recipe with the toy in the place of Fedloom's app, in a process that can be signalled
SCRIPT = """\
import signal, sys
from pathlib import Path
from fedloom.config import RunConfig
from fedloom.simulations import runner

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" had it ignored
TOY, OUTPUT, MODE = {toy!r}, {output!r}, {mode!r}

def write_app(folder, config):
    toml = Path(TOY, "pyproject.toml")
    values = f'output = "{{config.output}}"\\nname = "{{config.name}}"\\nmode = "{{MODE}}"\\n'
    head = toml.read_text().partition("[tool.flwr.app.config]")[0]
    toml.write_text(head + "[tool.flwr.app.config]\\n" + values)
    return Path(TOY)

runner.write_app = write_app
runner.preflight = lambda config, runtime: None
runner._conclude = lambda folder, picture, console: None
sys.exit(runner.run_recipe(RunConfig.from_flat({{"output": OUTPUT, "clients.count": 2}})))
"""


def _toy(folder: Path) -> Path:
    (folder / "toyapp").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(TOY)
    (folder / "toyapp" / "__init__.py").write_text("")
    (folder / "toyapp" / "server.py").write_text(SERVER)
    (folder / "toyapp" / "client.py").write_text(CLIENT)
    return folder


def _script(folder: Path, mode: str) -> Path:
    toy, output = _toy(folder / "toy"), folder / "runs"
    path = folder / "script.py"
    path.write_text(SCRIPT.format(toy=str(toy), output=str(output), mode=mode))
    return path


def _nothing_lingers(mark: str, home: Path) -> None:
    # Ray's renamed processes overwrite their environment: the interrupted run is counted by parents
    assert marked(mark) == set()
    assert not home.exists()
    commands = [
        (Path("/proc") / str(pid) / "cmdline").read_bytes()
        for pid in process_table()
        if (Path("/proc") / str(pid) / "cmdline").exists()
    ]
    assert not [command for command in commands if str(home).encode() in command]


def _until(holds, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _flat(tree, prefix=""):
    rows = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        rows |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return rows
