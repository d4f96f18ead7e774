# SPDX-License-Identifier: Apache-2.0
"""Trained read-outs of middle memories as files, made once and used with any support text.

One safetensors file holds each place's ``P`` and ``u``, no fast weights and no text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fedloom import __version__, states
from fedloom.adapters.fast_files import check_owner, read_header
from fedloom.adapters.fast_weights import ReadOut
from fedloom.errors import Refusal

FORMAT = "fedloom-readouts-1"


@dataclass(frozen=True)
class ReadOutManifest:
    """What a file of read-outs says of itself."""

    base: str
    """SHA-256 over the frozen weights."""
    tokenizer: str
    """SHA-256 over the tokenizer's files."""
    width: int
    """Of the residual stream."""
    places: tuple[int, ...]
    """Blocks below each middle memory."""
    alpha: float
    """Filter of the memories that they were trained on; a compiled one should have the same."""
    steps: int
    version: str = __version__
    """fedloom's."""


def save_readouts(path: Path, readouts: Mapping[int, ReadOut], manifest: ReadOutManifest) -> None:
    """Write trained read-outs whole or not at all.

    Raises
    ------
    Refusal
        If the file cannot be written.
    """
    tensors = {
        f"middle.{place}.{name}": parameter.detach().float().cpu().contiguous()
        for place, readout in readouts.items()
        for name, parameter in readout.named_parameters()
    }
    tree = {"format": FORMAT, **asdict(manifest)}
    metadata = {key: json.dumps(value, sort_keys=True) for key, value in tree.items()}
    states.write_private(path, save_tensors(tensors, metadata=metadata))


def read_readout_manifest(path: Path) -> ReadOutManifest:
    """Read what a file of read-outs says of itself, without its weights.

    Raises
    ------
    Refusal
        If the file is missing, cut short or no such file.
    """
    tree = read_header(path, "read-outs", FORMAT, "fedloom faast train-readout")
    try:
        places = tuple(int(place) for place in tree.pop("places"))
        return ReadOutManifest(**tree, places=places)
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"read-outs {path} is no {FORMAT} file: expected one of fedloom faast train-readout"
        ) from error


def load_readouts(path: Path, *, base: str, tokenizer: str) -> dict[int, ReadOut]:
    """Return place -> read-out, not trainable.

    Parameters
    ----------
    base, tokenizer : str
        Hashes of the model at hand.

    Raises
    ------
    Refusal
        If they were trained on another model, or the file does not hold what it says.
    """
    manifest = read_readout_manifest(path)
    check_owner(path, "read-outs", manifest, base, tokenizer, "train them on this model")
    try:
        tensors = load_tensors(path.read_bytes())
    except SafetensorError as error:
        raise Refusal(f"read-outs {path} cannot be read ({error}): it is cut short") from error
    shapes = ReadOut.shapes(manifest.width)
    wanted_shapes = {f"middle.{p}.{n}": s for p in manifest.places for n, s in shapes.items()}
    for name in sorted(tensors.keys() | wanted_shapes.keys()):
        tensor, shape = tensors.get(name), wanted_shapes.get(name)
        if tensor is None or tuple(tensor.shape) != shape or not torch.isfinite(tensor).all():
            raise Refusal(
                f"read-outs {path}: {name} is not as the manifest says, expected finite numbers of"
                f" shape {shape}; train them anew"
            )
    readouts = {place: ReadOut(manifest.width) for place in manifest.places}
    with torch.no_grad():
        for place, readout in readouts.items():
            for name, parameter in readout.named_parameters():
                parameter.copy_(tensors[f"middle.{place}.{name}"])
            readout.requires_grad_(False)
    return readouts
