# SPDX-License-Identifier: Apache-2.0
"""A deployment's folder: what the coordinator and each node are told, and how they are started.

``coordinator/`` and every ``nodes/N/`` is whole by itself: it is copied to the machine that it is
for, with a settings file, the keys that this machine needs, and no others.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import ssl
import tomllib
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from fedloom.errors import Refusal, nearest
from fedloom.local.home import VARIABLE as STATE
from fedloom.simulations import admission
from fedloom.simulations.superlink import environment, tool

REFUSE, ALLOW = "refuse", "allow"
HERE, ANYWHERE = "here", "anywhere"
ON, OFF = "on", "off"
WARM, WARM_KEPT = "FEDLOOM_WARM", "FEDLOOM_WARM_KEPT"  # fedloom.clients.warm_frames
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"  # seconds; Flower's own 1 s is a wait in each message


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """One machine's share of a deployment, read from a settings file in its folder."""

    FILE: ClassVar[str]
    KEY: ClassVar[str]
    """Its private key, for nobody else's eyes."""

    folder: Path
    port: int
    """Of the SuperLink, or of a node's own Runtime API, which only this machine reaches."""
    code: str = REFUSE
    """``refuse`` apps that bring code, or ``allow`` them."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a part's settings.

        Raises
        ------
        Refusal
            If there is no such file, or a key or value that is not known.
        """
        file = folder / cls.FILE
        try:
            told = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise Refusal(f"{file} is missing: expected what `fedloom deploy init` made") from error
        except (OSError, ValueError) as error:
            raise Refusal(f"{file} cannot be read: {error}") from error
        known = {field.name: field for field in fields(cls) if field.name != "folder"}
        for key, value in told.items():
            if key not in known:
                raise Refusal(f"{file}: unknown key {key}{nearest(key, known)}")
            wanted = int if known[key].type == "int" else str
            if type(value) is not wanted:
                raise Refusal(f"{file}: {key} = {value!r}, expected {wanted.__name__}")
        try:
            return cls(folder=folder.absolute(), **told)
        except TypeError as error:
            raise Refusal(f"{file} lacks a key: {error}") from error

    def __post_init__(self) -> None:
        if self.code not in (REFUSE, ALLOW):
            raise Refusal(f'{self.FILE}: code = "{self.code}", expected refuse or allow')
        if not 0 < self.port < 65536:
            raise Refusal(f"{self.FILE}: port = {self.port}, expected 1 to 65535")

    @property
    @abstractmethod
    def label(self) -> str:
        """Name the part in a log."""

    @property
    def home(self) -> Path:
        """Flower's folder of this part; it also marks the part's processes."""
        return self.folder / "home"

    @abstractmethod
    def flower_command(self) -> list[str]:
        """Return Flower's own command for this part."""

    def command(self) -> list[str]:
        """Return what ``fedloom deploy up`` starts."""
        return [tool(self.flower_command()[0]), *self.flower_command()[1:]]

    def environment(self) -> dict[str, str]:
        """Return the environment of a part's processes; the gates stand first on the PATH."""
        kept = {**environment(self.folder), POLL: os.environ.get(POLL, "0.2")}
        if self.code == REFUSE:
            gates = admission.write_gates(self.home / "gates")
            kept["PATH"] = os.pathsep.join([str(gates), kept["PATH"]])
        return kept

    @abstractmethod
    def healthy(self) -> bool:
        """Ask the part for its health."""


@dataclass(frozen=True, kw_only=True)
class Coordinator(Part):
    """The SuperLink's machine."""

    FILE: ClassVar[str] = "coordinator.toml"
    KEY: ClassVar[str] = "server.key"

    address: str
    """HOST:PORT that nodes dial."""
    bind: str = "127.0.0.1"
    control: str = HERE
    """Who may submit runs and register nodes: ``here`` this machine, or ``anywhere``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.control not in (HERE, ANYWHERE):
            raise Refusal(f'{self.FILE}: control = "{self.control}", expected here or anywhere')

    @property
    def label(self) -> str:
        """Name the part in a log."""
        return "coordinator"

    @property
    def certificate(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.crt"

    @property
    def local(self) -> str:
        """Return HOST:PORT as this machine itself reaches it."""
        open_to_all = self.bind in ("0.0.0.0", "::")
        host = "127.0.0.1" if open_to_all else self.bind
        return join(host, self.port)

    def public_keys(self) -> dict[int, Path]:
        """Return the public keys of the nodes that may join, by number."""
        found = (self.folder / "nodes").glob("*.pub")
        return {int(file.stem): file for file in sorted(found) if file.stem.isdigit()}

    def flower_command(self) -> list[str]:
        """Return Flower's own command for this part."""
        files = {
            "--ssl-ca-certfile": "ca.crt",
            "--ssl-certfile": "server.crt",
            "--ssl-keyfile": self.KEY,
        }
        told = ["flower-superlink", "--host", self.bind, "--port", str(self.port)]
        for option, name in files.items():
            told += [option, str(self.folder / name)]
        # No --database: with SQLite, payloads of hundreds of megabytes lock it up.
        return [*told, "--enable-supernode-auth"]

    def command(self) -> list[str]:
        """Return what ``fedloom deploy up`` starts: with its gate, unless orders may come in."""
        if self.control == ANYWHERE:
            return super().command()
        name, *options = self.flower_command()
        return [*admission.through(name), *options]

    def healthy(self) -> bool:
        """Ask the SuperLink for its health, over TLS and by its certificate."""
        return answers(f"https://{self.local}/health", self.certificate)


@dataclass(frozen=True, kw_only=True)
class Node(Part):
    """A SuperNode's machine."""

    FILE: ClassVar[str] = "node.toml"
    KEY: ClassVar[str] = "key"

    superlink: str
    """The coordinator's HOST:PORT."""
    partition: int
    partitions: int
    data: str = ""
    """Rows that only this node has: a file of the kind that ``data.source`` reads; never sent."""
    encoder: str = ""
    """The node's own frozen encoder, for recipes with ``faast.encoders``: as there, or
    ``path:DIR`` from the node's folder on."""
    revision: int = 1
    """Of this node's rows, for FAAST: a higher one after they changed, and it is asked again."""
    warm: str = ON
    """``on``: a model server beside the SuperNode keeps the model between messages; or ``off``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.partition < self.partitions:
            raise Refusal(
                f"{self.FILE}: partition = {self.partition}, expected 0 to {self.partitions - 1}"
            )
        if self.revision < 1:
            raise Refusal(f"{self.FILE}: revision = {self.revision}, expected 1 or above")
        if self.data and not self.rows().exists():
            raise Refusal(f"{self.FILE}: data = {self.data}, but {self.rows()} is not there")
        if self.warm not in (ON, OFF):
            raise Refusal(f'{self.FILE}: warm = "{self.warm}", expected on or off')
        for key, value in (("data", self.data), ("encoder", self.encoder)):
            if '"' in value or "'" in value:
                raise Refusal(f"{self.FILE}: {key} = {value}, expected a path without quotes")
        if (place := _place_in(self.encoder)) and not (self.folder / place[1]).exists():
            raise Refusal(
                f"{self.FILE}: encoder = {self.encoder}, but {self.folder / place[1]} is not there"
            )

    @property
    def label(self) -> str:
        """Name the part in a log."""
        return f"node {self.partition + 1}"

    def rows(self) -> Path:
        """Return where the node's own rows lie; a relative path starts at the node's folder."""
        return self.folder / Path(self.data).expanduser()

    def own_encoder(self) -> str:
        """Return the node's own encoder, a path in it as one from the root."""
        place = _place_in(self.encoder)
        return place[0] + str(self.folder / place[1]) if place else self.encoder

    def config(self) -> str:
        """Return Flower's node config."""
        told = f"partition-id={self.partition} num-partitions={self.partitions}"
        told += f" revision={self.revision}" if self.revision > 1 else ""
        told += f' data="{self.rows()}"' if self.data else ""
        return f'{told} encoder="{self.own_encoder()}"' if self.encoder else told

    def flower_command(self) -> list[str]:
        """Return Flower's own command for this part."""
        return [
            "flower-supernode",
            *("--superlink", self.superlink),
            *("--root-certificates", str(self.folder / "ca.crt")),
            *("--auth-supernode-private-key", str(self.folder / self.KEY)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--node-config", self.config()),
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment; what clients keep lies in the node's folder, by default."""
        told = {STATE: str(self.folder / "state"), **super().environment()}
        if (folder := self.warm_folder()) is not None:
            told |= {WARM: str(folder), WARM_KEPT: "1"}
        return told

    def warm_folder(self) -> Path | None:
        """Return the folder of the model server's socket, or nothing if none is wanted.

        ``FEDLOOM_WARM`` comes before the settings: ``off``, or a folder with one in it for each
        node.  In a node's folder by default, and in the user's own where a socket's path has no
        room for that.
        """
        named = os.environ.get(WARM, "")
        if OFF in (self.warm, named):
            return None
        from fedloom.clients.warm_frames import folder_for  # with Flower, which takes a second

        return folder_for(Path(named) / f"{self.partition + 1}" if named else self.home / "warm")

    def healthy(self) -> bool:
        """Ask the node's own API for its health; that it has joined is the coordinator's word."""
        return answers(f"http://127.0.0.1:{self.port}/health")


@dataclass(frozen=True)
class Deployment:
    """All that is in a folder: a whole federation, or what one machine was given of it."""

    folder: Path
    coordinator: Coordinator | None
    nodes: Mapping[int, Node]

    @classmethod
    def read(cls, folder: Path) -> Deployment:
        """Read a deployment's folder, a coordinator's or a node's.

        Raises
        ------
        Refusal
            If it is none of them.
        """
        if (folder / Coordinator.FILE).exists():
            return cls(folder, Coordinator.read(folder), {})
        if (folder / Node.FILE).exists():
            node = Node.read(folder)
            return cls(folder, None, {node.partition + 1: node})
        given = folder / "coordinator"
        coordinator = Coordinator.read(given) if given.is_dir() else None
        nodes = [Node.read(found) for found in (folder / "nodes").glob("*") if found.is_dir()]
        if coordinator is None and not nodes:
            raise Refusal(f"{folder} is no deployment: expected what `fedloom deploy init` made")
        return cls(folder, coordinator, {n.partition + 1: n for n in sorted(nodes, key=_place)})

    def parts(self, node: int = 0, coordinator_only: bool = False) -> list[Part]:
        """Return the parts that are asked for, the coordinator first.

        Raises
        ------
        Refusal
            If one that is asked for is not here.
        """
        if node and node not in self.nodes:
            here = ", ".join(map(str, self.nodes)) or "none"
            raise Refusal(f"--node {node}: {self.folder} has the nodes {here}")
        if coordinator_only and self.coordinator is None:
            raise Refusal(f"--coordinator: {self.folder} has no coordinator's folder")
        if node:
            return [self.nodes[node]]
        first: list[Part] = [self.coordinator] if self.coordinator else []
        return first if coordinator_only else [*first, *self.nodes.values()]

    def required(self) -> Coordinator:
        """Return the coordinator.

        Raises
        ------
        Refusal
            If this folder has none.
        """
        if self.coordinator is None:
            raise Refusal(f"{self.folder} has no coordinator's folder: expected the whole of it")
        return self.coordinator


def join(host: str, port: int) -> str:
    """Write HOST:PORT, with brackets around an IPv6 address.

    >>> join("::1", 8000), join("lab.example", 8000)
    ('[::1]:8000', 'lab.example:8000')
    """
    try:
        return f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"
    except ValueError:
        return f"{host}:{port}"


def answers(url: str, certificate: Path | None = None) -> bool:
    """Say whether an URL answers 200, directly and under the given authority."""
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    try:
        if certificate is not None:
            trust = ssl.create_default_context(cafile=str(certificate))
            handlers.append(urllib.request.HTTPSHandler(context=trust))
        with urllib.request.build_opener(*handlers).open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def shown(command: list[str]) -> str:
    """Write a command as a shell reads it, an option a line."""
    lines = [command[0]]
    for word in command[1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n    ".join(lines)


def _place_in(source: str) -> tuple[str, Path] | None:
    """Split a source of weights that names a place of this machine.

    >>> _place_in("relu:512:path:encoder"), _place_in("packaged:minilm")
    (('relu:512:path:', PosixPath('encoder')), None)
    """
    for kind in ("path:", "gguf:"):
        head, found, place = source.partition(kind)
        if found:
            return head + kind, Path(place).expanduser()
    return None


def _place(node: Node) -> int:
    return node.partition
