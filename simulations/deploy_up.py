# SPDX-License-Identifier: Apache-2.0
"""``fedloom deploy up``: a deployment's processes in the foreground, until told to stop.

For one machine's part under systemd or in a container, and for a whole federation on one machine.
A process that ends by itself ends the command with 1: to start it again is the supervisor's work.
A node that keeps its model loaded is the exception, see ``deploy_warm``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedloom import certificates
from fedloom.errors import Refusal
from fedloom.simulations.deploy_process import Running, Say
from fedloom.simulations.deploy_warm import WarmNode
from fedloom.simulations.deployment import Coordinator, Deployment, Node, Part
from fedloom.simulations.processes import terminable
from fedloom.simulations.superlink import SuperLinkError

START_SECONDS = 120.0
WATCH_SECONDS = 1.0
REGISTERED = "registered.json"
_COMMANDS = """
import json, sys
from flwr.cli.app import app
for command in json.load(sys.stdin):
    app(command, standalone_mode=False)
"""


def up(parts: Sequence[Part], say: Say) -> None:
    """Run parts until interrupted, the coordinator first; what is started is ended.

    Raises
    ------
    SuperLinkError
        If one of them ends by itself, or the coordinator does not come up.
    """
    for part in parts:
        _check(part)
    with terminable(), ExitStack() as stack:
        running: list[Running | WarmNode] = []
        for part in parts:
            running.append(one := _start(part, say))
            stack.callback(one.end)
            if isinstance(part, Coordinator):
                _wait(part, running)
                register(part, say)
                where = f"{part.address} (TLS, keys of {len(part.public_keys())} nodes)"
                say(f"fedloom: the coordinator takes nodes at {where}")
        _follow(running, say)


def _start(part: Part, say: Say) -> Running | WarmNode:
    if isinstance(part, Node) and part.warm_folder() is not None:
        return WarmNode(part, say)
    return Running(part, say)


def _follow(running: Sequence[Running | WarmNode], say: Say) -> None:
    """Watch until interrupted; say once when every node has joined."""
    joining = [one for one in running if isinstance(one.part, Node)]
    while True:
        for one in running:
            one.check()
        if joining and all(one.connected.is_set() for one in joining):
            say(f"fedloom: up, {len(joining)} {'node' if len(joining) == 1 else 'nodes'} connected")
            joining = []
        time.sleep(WATCH_SECONDS)


def _wait(coordinator: Coordinator, running: Sequence[Running | WarmNode]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not coordinator.healthy():
        for one in running:
            one.check()
        if time.monotonic() > deadline:
            raise SuperLinkError(f"no sign of health within {START_SECONDS:.0f} s")
        time.sleep(0.2)
    running[-1].check()  # a stranger may hold the port


def _check(part: Part) -> None:
    """Refuse what is sure to fail, or is open to others, before anything starts."""
    key = part.folder / part.KEY
    if not key.is_file():
        raise Refusal(f"{key} is missing: expected what `fedloom deploy init` made")
    if key.stat().st_mode & 0o077:
        raise Refusal(f"{key} can be read by others than its owner: chmod 600 {key}")
    if not isinstance(part, Coordinator):
        return
    certificate = (part.folder / "server.crt").read_bytes()
    host = part.address.rpartition(":")[0].strip("[]")
    certificates.check_server(certificate, part.certificate.read_bytes(), host)
    if not part.public_keys():
        raise Refusal(f"{part.folder / 'nodes'} has no N.pub: no node could ever join")


def connection(home: Path, address: str, certificate: Path) -> None:
    """Write the connection file of Flower's own command into a home of it."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    told = f'address = "{address}"\nroot-certificates = "{certificate.absolute()}"\n'
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "fedloom"\n\n[superlink.fedloom]\n{told}', encoding="utf-8"
    )


def flwr(coordinator: Coordinator, *commands: Sequence[str]) -> list[dict[str, Any]]:
    """Run Flower's own commands against a coordinator on this machine, all in one process.

    Each would cost a second or two of imports, and there is one for every node.

    Raises
    ------
    SuperLinkError
        If one fails.
    """
    connection(coordinator.home, coordinator.local, coordinator.certificate)
    told = json.dumps([[*command, "--format", "json"] for command in commands])
    what = f"flwr {' '.join(commands[0][:2])}"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _COMMANDS],
            env=coordinator.environment(),
            cwd=coordinator.home,
            input=told.encode(),
            capture_output=True,
            timeout=120 + 5 * len(commands),
        )
        answers = _objects(done.stdout.decode("utf-8", "replace"))
    except subprocess.TimeoutExpired as error:
        raise SuperLinkError(f"{what} gave no answer in {error.timeout:.0f} s") from error
    except json.JSONDecodeError as error:
        said = (done.stdout + done.stderr).decode("utf-8", "replace")[-800:].strip()
        raise SuperLinkError(f"{what} failed: {said}") from error
    if bad := [answer for answer in answers if not answer.get("success")]:
        said = " ".join(str(bad[0].get("error-message", bad[0])).split())
        raise SuperLinkError(f"{what} failed: {said}")
    if len(answers) != len(commands):
        said = done.stderr.decode("utf-8", "replace")[-800:].strip()
        raise SuperLinkError(f"{what} failed: {said}")
    return answers


def _objects(text: str) -> list[dict[str, Any]]:
    """Read JSON objects that stand one after the other."""
    found, decoder = [], json.JSONDecoder()
    while text := text.strip():
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:]
    return found


def register(coordinator: Coordinator, say: Say) -> None:
    """Make the nodes' public keys known to a SuperLink that has just started; it keeps no list."""
    keys = sorted(coordinator.public_keys().items())
    commands = [
        ["supernode", "register", str(key), "fedloom", "--name", f"node-{number}"]
        for number, key in keys
    ]
    told = flwr(coordinator, *commands)
    known = {str(n): str(said["node-id"]) for (n, _), said in zip(keys, told, strict=True)}
    (coordinator.home / REGISTERED).write_text(json.dumps(known), encoding="utf-8")
    say(f"fedloom: {len(known)} nodes may join: {', '.join(known)}")


def status(deployment: Deployment) -> tuple[list[tuple[str, str]], bool]:
    """Return each part with its state, and whether all is well.

    The coordinator knows which nodes are online; without it a node's own health is all there is.
    """
    rows: list[tuple[str, str]] = []
    coordinator = deployment.coordinator
    if coordinator is None:
        for node in deployment.nodes.values():
            rows.append((node.label, "up" if node.healthy() else "down"))
        return rows, all(state == "up" for _, state in rows)
    if not coordinator.healthy():
        return [("coordinator", f"down: nothing answers at {coordinator.local}")], False
    rows.append(("coordinator", f"up at {coordinator.address}"))
    file = coordinator.home / REGISTERED
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    (told,) = flwr(coordinator, ["supernode", "list", "fedloom"])
    states = {str(row["node-id"]): str(row["status"]) for row in told["nodes"]}
    for number, node_id in sorted(known.items(), key=lambda pair: int(pair[0])):
        rows.append((f"node {number}", states.get(node_id, "unknown to the SuperLink")))
    online = [state for label, state in rows if label.startswith("node")]
    return rows, bool(online) and all(state == "online" for state in online)
