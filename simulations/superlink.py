# SPDX-License-Identifier: Apache-2.0
"""A SuperLink of our own for one run: start it, hand it an app, wait for the truth, leave nothing.

``flwr run`` alone reuses whichever SuperLink listens, with the environment and the working folder
of whoever started it, and returns 0 whatever becomes of the run.  Hence an own home, an own port,
an empty working folder, and a success that is read from the run's status.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import fedloom
from fedloom.config import RunConfig
from fedloom.flat import Scalar, toml_lines
from fedloom.simulations import ray_workers
from fedloom.simulations.processes import Family

APP = """\
# Written by fedloom for one run: the wheel carries the code, this file carries the choice.
[project]
name = "fedloom-run"
version = "{version}"
dependencies = []

[tool.flwr.app]
publisher = "fedloom"
fab-include = ["pyproject.toml"]

[tool.flwr.app.components]
serverapp = "fedloom.simulations.server_app:app"
clientapp = "fedloom.simulations.client_app:app"

[tool.flwr.app.config]
{config}"""

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # else each run makes a fresh environment with `uv sync` and puts it before the installed one
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "NO_COLOR": "1",
}
# A foreign Ray cluster would take the run; forced colour would end up inside flwr's JSON.
UNWANTED = ("RAY_ADDRESS", "FORCE_COLOR", "TTY_COMPATIBLE", "FLWR_INTERNAL_GRPC_CONTROL_API")
# On Linux the SuperLink is told to end when we are killed without a chance to end it ourselves;
# its own children watch it.  1 is PR_SET_PDEATHSIG, 15 is SIGTERM, and exec keeps the setting.
TETHER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)
# Ray puts Unix sockets below its folder, and their path may not be longer than about 107 bytes.
RAY_FOLDER_CHARACTERS = 40


class SuperLinkError(RuntimeError):
    """Flower itself did not do its part: no start, no answer, or a run that never begins."""


def tool(name: str) -> str:
    """Find one of Flower's commands beside this Python, else on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise SuperLinkError(f"{name} is neither beside {sys.executable} nor on the PATH")
    return found


def write_app(folder: Path, config: RunConfig) -> Path:
    """Write the Flower app of a run: one TOML file, and nothing else of the user's is uploaded."""
    folder.mkdir(parents=True, exist_ok=True)
    text = APP.format(version=fedloom.__version__, config=toml_lines(config.flat()))
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def federation_config(config: RunConfig) -> str:
    """Say in Flower's words how many clients there are and what Ray reserves for each.

    Ray hides every GPU from a client that asked for none, so ``clients.gpus`` must be above 0 for
    a client to see one.

    >>> federation_config(RunConfig.from_flat({"clients.count": 4, "clients.gpus": 0.25}))
    'num-supernodes=4 client-resources-num-cpus=1 client-resources-num-gpus=0.25'
    """
    clients = config.clients
    knobs: dict[str, int | float] = {
        "num-supernodes": clients.count,
        "client-resources-num-cpus": clients.cpus,
        "client-resources-num-gpus": clients.gpus,
    }
    if clients.total_cpus > 0:
        knobs["init-args-num-cpus"] = clients.total_cpus
    if clients.total_gpus > 0:
        knobs["init-args-num-gpus"] = clients.total_gpus
    return " ".join(f"{name}={value}" for name, value in knobs.items())


class LocalSuperLink:
    """One SuperLink in simulation mode, in memory, on a free port of this machine.

    Parameters
    ----------
    log
        File that keeps what the SuperLink says.
    start_seconds
        How long it may take to answer ``/health``.
    pending_seconds
        How long a run may wait for its process before that is called an error.
    """

    def __init__(
        self, log: Path, *, start_seconds: float = 90.0, pending_seconds: float = 60.0
    ) -> None:
        self.log = log
        self.start_seconds = start_seconds
        self.pending_seconds = pending_seconds
        self.folder = Path()
        self.port = 0
        self._family: Family | None = None
        self._environment: dict[str, str] = {}

    def __enter__(self) -> LocalSuperLink:
        self.folder = Path(tempfile.mkdtemp(prefix="fedloom-"))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def submit(
        self, app: Path, config: Mapping[str, Scalar] | None = None, federation: str = ""
    ) -> str:
        """Hand over an app; ``config`` may override keys that the app's TOML already has."""
        arguments = ["run", str(app)]
        if config:
            overrides = self.folder / "overrides.toml"
            overrides.write_text(toml_lines(config), encoding="utf-8")
            arguments += ["--run-config", str(overrides)]
        if federation:
            arguments += ["--federation-config", federation]
        return str(self._flwr(*arguments)["run-id"])

    def status(self, run_id: str) -> tuple[str, str]:
        """Return the run's status (``finished:completed``, ...) and its details."""
        run = self._flwr("ls", "--run-id", run_id)["runs"][0]
        details = str(run["status-details"])
        if details.startswith("No heartbeat received"):  # Flower's word for it, after a minute
            details = "the process that runs the ServerApp has died; go on with --resume"
        return str(run["status"]), "" if details == "N/A" else details

    def run_log(self, run_id: str) -> str:
        """Return what the run's processes printed, the ServerApp's traceback too.

        The SuperLink throws its children's output away; this is the only place that has it.
        """
        command = [tool("flwr"), "log", run_id, "--show"]
        try:
            done = subprocess.run(
                command, env=self._environment, cwd=self.folder, capture_output=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:  # the run's outcome stands without it
            return f"the log could not be had: {error}\n"
        return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout.decode("utf-8", "replace"))

    def wait(
        self,
        run_id: str,
        ended: Callable[[], bool] = lambda: False,
        *,
        poll_seconds: float = 2.0,
        calm_seconds: float = 20.0,
    ) -> tuple[str, str]:
        """Wait until the run has finished and return its last status and details.

        Each question to Flower costs a process of a second or more, so while the run's own process
        is alive and ``ended()`` is false it is asked only every ``calm_seconds``.
        """
        began = asked = time.monotonic()
        while True:
            calm = self.check() and not ended()
            now = time.monotonic()
            if now - asked >= (calm_seconds if calm else poll_seconds):
                status, details = self._patient_status(run_id)
                if status.startswith("finished"):
                    return status, details
                asked = time.monotonic()
                if status != "running" and asked - began > self.pending_seconds:
                    raise SuperLinkError(
                        f"the run is still {status} after {asked - began:.0f} s\n{self.log_tail()}"
                    )
            time.sleep(0.5)

    def _patient_status(self, run_id: str) -> tuple[str, str]:
        """Ask up to three times: one slow answer on a busy machine is no reason to end a run."""
        for _ in range(2):
            try:
                return self.status(run_id)
            except SuperLinkError:
                time.sleep(1.0)
        return self.status(run_id)

    def check(self) -> bool:
        """Say whether a run's process is alive; raise if the SuperLink or its SuperExec is not.

        ``/health`` stays green when the SuperExec is dead, and later runs stay pending for ever.
        """
        assert self._family is not None
        self._family.look()
        if self._family.root.poll() is not None:
            code = self._family.root.returncode
            raise SuperLinkError(f"flower-superlink ended with code {code}\n{self.log_tail()}")
        if not self._family.children:
            raise SuperLinkError(f"flower-superexec has died\n{self.log_tail()}")
        return bool(self._family.grandchildren)

    def log_tail(self, lines: int = 15) -> str:
        """Return the end of the log, for an error message."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        return "\n".join([f"end of {self.log}:", *plain[-lines:]])

    def close(self) -> None:
        """End every process of ours and remove the temporary folder. Safe to call twice."""
        try:
            if self._family is not None:
                self._family.end()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True) if self.folder.name else None
            self._family, self.folder = None, Path()

    def _start(self) -> None:
        home, empty = self.folder / "home", self.folder / "empty"
        home.mkdir()
        empty.mkdir()
        self._environment = environment(self.folder)
        gate = ray_workers.write_gate(self.folder / "gate")
        self._environment["PATH"] = os.pathsep.join([str(gate), self._environment["PATH"]])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "fedloom"\n\n'
            f'[superlink.fedloom]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        # No --database: the state stays in memory, where 100 MB payloads are no trouble.
        command = [tool("flower-superlink"), "--insecure", "--simulation"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        if sys.platform == "linux":
            command = [sys.executable, "-c", TETHER, *command]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # Ray's workers put the working folder before the app's: an empty one shadows nothing.
            root = subprocess.Popen(
                command,
                env=self._environment,
                cwd=empty,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family = Family(root, f"FLWR_HOME={home}")
        self._wait_for_health()

    def _wait_for_health(self) -> None:
        assert self._family is not None
        deadline = time.monotonic() + self.start_seconds
        while not _healthy(self.port):
            if self._family.root.poll() is not None:
                self.check()
            if time.monotonic() > deadline:
                raise SuperLinkError(
                    f"flower-superlink gave no sign of health on 127.0.0.1:{self.port} within"
                    f" {self.start_seconds:.0f} s\n{self.log_tail()}"
                )
            time.sleep(0.1)
        self.check()  # a stranger may have taken the port and answered for us

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Run one command of Flower's; with ``--format json`` it returns 0 even if it failed."""
        command = [tool("flwr"), *arguments, "--format", "json"]
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=120,
            )
            answer: dict[str, Any] = json.loads(done.stdout)
        except subprocess.TimeoutExpired as error:
            raise SuperLinkError(f"flwr {arguments[0]} gave no answer in 120 s") from error
        except json.JSONDecodeError as error:
            said = (done.stdout + done.stderr).decode("utf-8", "replace")[-800:]
            raise SuperLinkError(f"flwr {arguments[0]} failed: {said.strip()}") from error
        if not answer.get("success"):
            said = " ".join(str(answer.get("error-message", answer)).split())
            raise SuperLinkError(f"flwr {arguments[0]} failed: {said}")
        return answer


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the SuperLink, of all it starts and of each ``flwr`` command."""
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    tools = str(Path(tool("flower-superlink")).parent)  # it starts flower-superexec by bare name
    kept["PATH"] = os.pathsep.join([tools, kept.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):  # a proxy would take even 127.0.0.1
        kept[name] = ",".join(filter(None, [kept.get(name, ""), "127.0.0.1,localhost"]))
    if len(str(folder)) <= RAY_FOLDER_CHARACTERS:
        kept["RAY_TMPDIR"] = str(folder)
    kept["FEDLOOM_WARM"] = "off"  # a simulation's workers keep their models themselves
    return {**kept, **ENVIRONMENT, "FLWR_HOME": str(folder / "home")}


def _healthy(port: int) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
