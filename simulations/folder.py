# SPDX-License-Identifier: Apache-2.0
"""The folder that a run leaves: it explains itself without the program that made it."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import save

from fedloom import __version__
from fedloom.config import RunConfig
from fedloom.disk import write_whole
from fedloom.flat import toml_lines
from fedloom.rules import is_side_array, without_controls
from fedloom.wire import Manifest, arrays_digest

_VERSIONS = ("flwr", "ray", "torch", "transformers", "peft", "numpy", "safetensors")


@dataclass(frozen=True)
class RunFolder:
    """``config.toml``, ``environment.json``, ``partition.json``, ``manifest.json``, ``adapter/``.

    The journal writes its JSON lines beside them, the report is made of all.
    """

    path: Path

    @classmethod
    def of(cls, config: RunConfig) -> RunFolder:
        """Return the folder that a recipe names, made if it is not there.

        One that holds another run's events is left alone: ``name-2``, ``name-3`` are next.  A run
        that goes on has its own.
        """
        parent = Path(config.output).expanduser().resolve()
        if config.resume:
            return cls(parent / config.name)
        names = (f"{config.name}-{n}" if n > 1 else config.name for n in itertools.count(1))
        path = next(
            parent / name for name in names if not (parent / name / "events.jsonl").exists()
        )
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    def begin(self, config: RunConfig) -> None:
        """Write what is known before anything runs; the recipe as one that begins."""
        self._write("config.toml", toml_lines({**config.flat(), "resume": False}))
        if not config.resume or not (self.path / "environment.json").exists():
            self._write("environment.json", json.dumps(_environment(config), indent=1))

    def keep_partition(self, text: str) -> None:
        """Write who holds which rows, if the nodes say so."""
        if text:
            self._write("partition.json", text)

    def keep_manifest(self, manifest: Manifest) -> None:
        """Write the adapter's names, shapes, dtypes and the hashes of its base."""
        self._write("manifest.json", manifest.to_json())

    def keep_adapter(self, arrays: dict[str, NDArray[Any]], manifest: Manifest, peft: str) -> str:
        """Write the adapter so that plain peft loads its LoRA; return the digest of all arrays.

        The memory's and the side adapter's arrays, which peft does not know, lie in files of their
        own: ``adapters.side`` loads them.  FAAST's and a solved fuser's are ``weights``: no peft.
        """
        digest = arrays_digest(without_controls(arrays))
        about = {"manifest": manifest.digest(), "base": manifest.base, "fedloom": __version__}
        own = without_controls(arrays)  # SCAFFOLD's controls are the server's, no adapter's
        lora = {name: array for name, array in own.items() if ".lora_" in name}
        side = {name: array for name, array in own.items() if is_side_array(name)}
        rest = {n: array for n, array in own.items() if n not in lora.keys() | side.keys()}
        others = "memory" if manifest.method == "fednl" else "weights"
        folder = self.path / "adapter"
        folder.mkdir(exist_ok=True)
        for file, part in (("adapter_model", lora), (others, rest), ("side", side)):
            if part:
                data = save(part, metadata={**about, "format": "pt", "digest": digest})
                write_whole(folder / f"{file}.safetensors", data)
        if peft:
            write_whole(folder / "adapter_config.json", peft.encode())
        write_whole(folder / "digest.txt", f"{digest}\n".encode())
        return digest

    def _write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text.encode())


def _environment(config: RunConfig) -> dict[str, Any]:
    installed = {name: _version(name) for name in _VERSIONS}
    return {
        "fedloom": __version__,
        "python": sys.version.split()[0],
        "versions": {name: version for name, version in installed.items() if version},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cpu": _cpu_model(),
        "threads": config.clients.threads,
        "started": datetime.now(UTC).isoformat(),
        "recipe": config.digest(),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")
