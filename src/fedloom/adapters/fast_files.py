# SPDX-License-Identifier: Apache-2.0
"""Fast memories as files: one safetensors file, and a manifest without which it means nothing.

A file holds solved weights and read-outs, no sums and no text.  It is still a function of the text
that it was made from, and is written for its owner's eyes only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel

from fedloom import __version__, states
from fedloom.adapters.fast_weights import FastMemory, ReadOut
from fedloom.errors import Refusal

FORMAT = "fedloom-fast-1"


@dataclass(frozen=True)
class FastManifest:
    """What a memory file says of itself."""

    base: str
    """SHA-256 over the frozen weights."""
    tokenizer: str
    """SHA-256 over the tokenizer's files."""
    places: tuple[int, ...]
    """Blocks below each memory; all of the model's for the output memory."""
    pairs: float
    """Neighbouring tokens that were summed."""
    alpha: float
    r: float
    match_scale: bool
    version: str = __version__
    """fedloom's."""

    def to_metadata(self) -> dict[str, str]:
        """Write it as safetensors metadata: strings, each of them JSON."""
        tree = {"format": FORMAT, **asdict(self)}
        return {key: json.dumps(value, sort_keys=True) for key, value in tree.items()}


def save_memory(path: Path, memory: FastMemory, manifest: FastManifest) -> None:
    """Write a memory whole or not at all.

    Raises
    ------
    Refusal
        If the file cannot be written.
    """
    tensors = {f"W.{place}": w.detach() for place, w in memory.weights.items()}
    tensors |= {name: p.detach() for name, p in memory.parameters().items()}
    data = save_tensors(
        {name: x.float().cpu().contiguous() for name, x in tensors.items()},
        metadata=manifest.to_metadata(),
    )
    states.write_private(path, data)


def read_manifest(path: Path) -> FastManifest:
    """Read what a memory file says of itself, without its weights.

    Raises
    ------
    Refusal
        If the file is missing, cut short or no memory.
    """
    tree = read_header(path, "memory", FORMAT, "fedloom faast compile")
    try:
        places = tuple(int(place) for place in tree.pop("places"))
        return FastManifest(**tree, places=places)
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"memory {path} is no {FORMAT} file: expected one of fedloom faast compile"
        ) from error


def read_header(path: Path, what: str, form: str, maker: str) -> dict[str, Any]:
    """Read what a file of ours says of itself, without its tensors.

    Parameters
    ----------
    what
        Names the file in a refusal.
    form
        The format that it must have.
    maker
        The command that makes such files.

    Raises
    ------
    Refusal
        If it is missing, cut short or of another format.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        raise Refusal(f"{what} {path}: no such file; make one with {maker}") from error
    except (OSError, SafetensorError) as error:
        raise Refusal(
            f"{what} {path} cannot be read ({error}): it is cut short or no safetensors file"
        ) from error
    try:
        tree = {key: json.loads(value) for key, value in metadata.items()}
        if tree.pop("format") != form:
            raise ValueError("another format")
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(f"{what} {path} is no {form} file: expected one of {maker}") from error
    return tree


def check_owner(
    path: Path, what: str, manifest: Any, base: str, tokenizer: str, advice: str
) -> None:
    """Refuse a file of another model.

    Parameters
    ----------
    manifest
        Has the hashes ``base`` and ``tokenizer``.
    base, tokenizer
        Hashes of the model at hand.
    """
    for name, came, wanted in (
        ("base", manifest.base, base),
        ("tokenizer", manifest.tokenizer, tokenizer),
    ):
        if came != wanted:
            raise Refusal(
                f"{what} {path} belongs to {name} {str(came)[:16]}, this one is {wanted[:16]}:"
                f" {advice}"
            )


def load_memory(path: Path, model: PreTrainedModel, *, base: str, tokenizer: str) -> FastMemory:
    """Hang the memory that a file holds on its model.

    Parameters
    ----------
    base, tokenizer : str
        Hashes of the model at hand.

    Raises
    ------
    Refusal
        If the file is of another model, or does not hold what its manifest says.
    """
    manifest = read_manifest(path)
    advice = "use the model that it was compiled with, or compile it anew"
    check_owner(path, "memory", manifest, base, tokenizer, advice)
    try:
        tensors = load_tensors(path.read_bytes())
    except SafetensorError as error:
        raise Refusal(f"memory {path} cannot be read ({error}): it is cut short") from error
    last = int(model.config.get_text_config().num_hidden_layers)
    width = int(model.config.get_text_config().hidden_size)
    _check(path, tensors, manifest, last, width)
    return FastMemory(
        model,
        {place: tensors[f"W.{place}"].numpy() for place in manifest.places},
        r=manifest.r,
        match_scale=manifest.match_scale,
        readouts={p: _readout(tensors, p, width) for p in manifest.places if p != last},
    )


def _readout(tensors: dict[str, Tensor], place: int, width: int) -> ReadOut:
    readout = ReadOut(width)
    with torch.no_grad():
        for name, parameter in readout.named_parameters():
            parameter.copy_(tensors[f"middle.{place}.{name}"])
    return readout


def _check(
    path: Path, tensors: dict[str, Tensor], manifest: FastManifest, last: int, width: int
) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for place in manifest.places:
        wanted[f"W.{place}"] = (width, width)
        if place != last:
            wanted |= {f"middle.{place}.{n}": s for n, s in ReadOut.shapes(width).items()}
    if odd := sorted(tensors.keys() ^ wanted.keys()):
        raise Refusal(
            f"memory {path}: tensor {odd[0]} ({len(odd)} in all) is not as its manifest"
            " says; compile it anew"
        )
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape or not torch.isfinite(tensors[name]).all():
            raise Refusal(
                f"memory {path}: {name} is {tuple(tensors[name].shape)} or not finite, expected"
                f" finite numbers {shape}; compile it anew"
            )
