# SPDX-License-Identifier: Apache-2.0
"""``fedloom deploy init``: a folder with all that a federation needs, each machine's part apart.

Everything is made in a folder beside DIR and moved there when it is whole; nothing that exists is
written over.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fedloom import __version__, certificates
from fedloom.errors import Refusal
from fedloom.flat import Scalar, toml_lines
from fedloom.simulations.deployment import Deployment, join, shown

HERE_TOO = ("localhost", "127.0.0.1")  # so that the coordinator reaches itself
SECRET, PLAIN = 0o600, 0o644
FIRST_NODE_PORT = 9101
NODES = 1000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to make."""

    nodes: int
    hosts: Sequence[str]
    """Names and addresses of the coordinator; nodes dial the first."""
    port: int = 8000
    node_port: int = FIRST_NODE_PORT
    """Of the first node's own API; the next node's is one more, for those who share a machine."""
    days: int = 365

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= NODES:
            raise Refusal(f"--nodes {self.nodes}: expected 1 to {NODES}")
        if not 1 <= self.days <= 3650:
            raise Refusal(f"--days {self.days}: expected 1 to 3650")
        for option, port in (("port", self.port), ("node-port", self.node_port + self.nodes - 1)):
            if not 0 < port < 65536:
                raise Refusal(f"--{option}: {port} is no port, expected 1 to 65535")

    @property
    def first(self) -> str:
        """Return the host that nodes dial."""
        return self.hosts[0] if self.hosts else HERE_TOO[1]

    @property
    def address(self) -> str:
        """Return HOST:PORT that nodes dial."""
        return join(self.first, self.port)

    @property
    def bind(self) -> str:
        """Return what the SuperLink listens on: this machine alone if it has no other name."""
        return "127.0.0.1" if set(self.hosts) <= {*HERE_TOO, "::1"} else "0.0.0.0"

    @property
    def named(self) -> list[str]:
        """Return all that the server's certificate is for."""
        return list(dict.fromkeys([*self.hosts, *HERE_TOO]))


def init(folder: Path, plan: Plan) -> Deployment:
    """Make a deployment.

    Raises
    ------
    Refusal
        If the folder is there and not empty, or cannot be made.
    """
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refusal(
            f"{folder} is not empty: init overwrites nothing, least of all keys; name a new folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise Refusal(f"{folder}: {error.strerror}; expected a place to write to") from error
    try:
        _fill(made, plan, folder)
        if folder.exists():
            folder.rmdir()  # refuses, if somebody has put something there
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return Deployment.read(folder)


def _fill(made: Path, plan: Plan, folder: Path) -> None:
    ca = certificates.authority(plan.days)
    issued = certificates.server(ca, plan.named, plan.days)
    _write(made / "ca/ca.key", ca.key, SECRET)
    _write(made / "ca/ca.crt", ca.certificate)
    there = made / "coordinator"
    _write(there / "server.key", issued.key, SECRET)
    _write(there / "server.crt", issued.certificate)
    _write(there / "ca.crt", ca.certificate)
    told: dict[str, Scalar] = {"address": plan.address, "bind": plan.bind, "port": plan.port}
    _write(there / "coordinator.toml", _settings("coordinator.toml", told))
    for number in range(1, plan.nodes + 1):
        private, public = certificates.node_keys(f"fedloom-node-{number}")
        node = made / "nodes" / str(number)
        _write(node / "key", private, SECRET)
        _write(node / "key.pub", public)
        _write(node / "ca.crt", ca.certificate)
        _write(there / "nodes" / f"{number}.pub", public)
        _write(node / "node.toml", _settings("node.toml", _node(plan, number)))
    connection = f'address = "{plan.address}"\nroot-certificates = "{folder / "ca/ca.crt"}"\n'
    _write(
        made / "flwr/config.toml",
        f'[superlink]\ndefault = "fedloom"\n\n[superlink.fedloom]\n{connection}'.encode(),
    )
    _write(made / "compose.yaml", _compose(plan).encode())
    for name in ("fedloom-coordinator.service", "fedloom-node@.service"):
        _write(made / "systemd" / name, _template(name).encode())
    _write(made / "README.txt", _readme(made, plan, folder).encode())


def _node(plan: Plan, number: int) -> dict[str, Scalar]:
    return {
        "superlink": plan.address,
        "partition": number - 1,
        "partitions": plan.nodes,
        "port": plan.node_port + number - 1,
    }


def _settings(name: str, told: dict[str, Scalar]) -> bytes:
    return (toml_lines(told) + _template(name)).encode()


def _template(name: str) -> str:
    file = resources.files("fedloom.simulations") / "deploy-files" / name
    return file.read_text(encoding="utf-8")


def _compose(plan: Plan) -> str:
    """Write the compose file: one coordinator and all nodes, for a look at the whole."""
    head, _, one = _template("compose.yaml").partition("#--node--\n")
    inside = [one.replace("{n}", str(n)) for n in range(1, plan.nodes + 1)]
    network, joined = _networks(plan)
    volumes = "".join(
        f"  {name}-{n}:\n" for n in range(1, plan.nodes + 1) for name in ("state", "cache")
    )
    named = {"{network}": network, "{joined}": joined, "{version}": __version__}
    text = head + "".join(inside) + "\nvolumes:\n  runs:\n" + volumes
    for mark, value in named.items():
        text = text.replace(mark, value)
    return text


def _networks(plan: Plan) -> tuple[str, str]:
    """Say how the coordinator's container is reached, and what a node's needs for it."""
    if plan.bind == "127.0.0.1":
        return ("    network_mode: host\n",) * 2
    ports = f'    ports: ["{plan.port}:{plan.port}"]\n'
    try:
        ipaddress.ip_address(plan.first)
    except ValueError:  # a name, which the containers beside it are to know as well
        alias = f'    networks: {{default: {{aliases: ["{plan.first}"]}}}}\n'
        return ports + alias, ""
    return ports, ""


def _readme(made: Path, plan: Plan, folder: Path) -> str:
    """Write which file goes where, and Flower's own commands."""
    deployment = Deployment.read(made)
    keys = sorted((made / "coordinator/nodes").glob("*.pub"), key=lambda file: int(file.stem))
    register = [f"flwr supernode register {file} fedloom --name node-{file.stem}" for file in keys]
    nodes = "\n".join(shown(node.flower_command()) for node in deployment.nodes.values())
    marks = {
        "{folder}": str(folder),
        "{address}": plan.address,
        "{days}": str(plan.days),
        "{nodes}": str(plan.nodes),
        "{superlink}": shown(deployment.required().flower_command()),
        "{register}": "\n".join(register),
        "{supernodes}": nodes,
    }
    text = _template("README.txt")
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text.replace(str(made), str(folder))


def _write(path: Path, data: bytes, mode: int = PLAIN) -> None:
    """Write a file that nobody could read before its mode was set; its folders are the owner's."""
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
