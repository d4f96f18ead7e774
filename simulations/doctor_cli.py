# SPDX-License-Identifier: Apache-2.0
"""``fedloom doctor``: can this machine run this recipe?  Nothing is fetched, nothing is started."""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedloom import archives
from fedloom.config import RunConfig
from fedloom.errors import Refusal

GOOD, NOTE, BAD = "ok", "note", "problem"
_EXTRAS = {"torch": "node", "transformers": "node", "peft": "node", "ray": "simulation"}
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_PROCESS = 1e9  # of an interpreter with torch, transformers and Flower in it, measured
_ROOM = 3e9  # for a model that is fetched and its archive, at least


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: str
    said: str


def doctor(
    recipe: Annotated[
        str, typer.Argument(help="TOML recipe: a file, or the name of a packaged one.")
    ] = "fednl",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable."),
    ] = None,
) -> None:
    """Say what stands in a recipe's way on this machine: 0 nothing, 1 something, 2 a bad recipe."""
    from fedloom.simulations.cli import read_recipe

    config = read_recipe(recipe, settings or [], {})
    found = list(findings(config))
    rows = Table("looked at", "", "found", box=None, pad_edge=False)
    for finding in found:
        rows.add_row(finding.what, finding.state, finding.said)
    Console().print(rows)
    raise typer.Exit(int(any(finding.state == BAD for finding in found)))


def findings(config: RunConfig) -> Iterator[Finding]:
    """Look at everything that a simulation of a recipe needs."""
    yield Finding("recipe", GOOD, f"{config.method}, {config.clients.count} clients, valid")
    yield from packages()
    yield from processors(config)
    yield cache()
    yield from model(config)


def packages() -> Iterator[Finding]:
    """Look for what the extras install."""
    yield Finding("python", GOOD, sys.version.split()[0])
    for name, extra in {"flwr": "", **_EXTRAS}.items():
        try:
            yield Finding(name, GOOD, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, BAD, f"not installed: pip install 'fedloom[{extra}]'")


def processors(config: RunConfig) -> Iterator[Finding]:
    """Hold the clients' CPUs and GPUs against the machine's."""
    cores, clients = os.cpu_count() or 1, config.clients
    said = f"{cores} here, {clients.cpus} a client, {clients.threads} threads each"
    yield Finding("CPUs", BAD if clients.cpus > cores else GOOD, said)
    if clients.gpus:
        count = _gpus()
        said = f"{count} here, {clients.gpus:g} a client"
        yield Finding("GPUs", BAD if clients.gpus > count else GOOD, said)


def cache() -> Finding:
    """Look whether the cache can be written, and has room."""
    folder = archives.cache_dir()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        return Finding("cache", BAD, f"{folder} cannot be written: set FEDLOOM_CACHE")
    free = shutil.disk_usage(there).free
    state = GOOD if free > _ROOM else NOTE
    return Finding("cache", state, f"{folder}, {free / 1e9:.0f} GB free")


def model(config: RunConfig) -> Iterator[Finding]:
    """Look whether the model is here, and whether its processes fit into memory."""
    from fedloom.models.sources import find_local, parse_source

    source = parse_source(config.model.source)
    if source.kind == "tiny":
        yield Finding("model", GOOD, f"{source} is made in memory")
        return
    folder = find_local(source)
    if folder is None:
        own = source.kind in ("path", "gguf")
        said = "not a saved model" if own else "not on this machine: the first run fetches it"
        yield Finding("model", BAD if own else NOTE, f"{source} is {said}")
        return
    count = parameters(folder)
    yield Finding("model", GOOD, f"{source}, {count / 1e6:.0f} M parameters, on this machine")
    if not config.clients.gpus:
        yield memory(config, count)


def memory(config: RunConfig, count: int) -> Finding:
    """Hold the weights of all processes against the machine's memory; activations come on top."""
    cores = config.clients.total_cpus or os.cpu_count() or 1
    processes = max(1, min(config.clients.count, cores // config.clients.cpus))
    needed = processes * (count * _BYTES[config.model.dtype] + _PROCESS)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = (
        f"{processes} processes need {needed / 1e9:.1f} GB before they work, of {total / 1e9:.0f}"
    )
    return Finding("memory", BAD if needed > total else GOOD, said)


def parameters(folder: Path) -> int:
    """Count a model's numbers by the headers of its safetensors.

    Raises
    ------
    Refusal
        If there are none that can be read.
    """
    from safetensors import SafetensorError, safe_open

    count = 0
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as tensors:
                names = tensors.keys()
                count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{folder} holds weights that cannot be read: {error}") from error
    if not count:
        raise Refusal(f"{folder} holds no safetensors: expected a model that was saved so")
    return count


def _gpus() -> int:
    try:
        import torch
    except ModuleNotFoundError:
        return 0
    return int(torch.cuda.device_count())
