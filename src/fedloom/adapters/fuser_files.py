# SPDX-License-Identifier: Apache-2.0
"""Fusers as files: one safetensors file with its card in the header, never a pickle.

A fuser steers its receiver as weights do, so a file is taken only for the very models that it was
made for, and only if it holds what its card says: sizes are compared before memory is taken.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.cards import Fact, FuserCard, read_card
from fedloom.errors import Refusal
from fedloom.slices.geometry import Geometry

__all__ = ["FuserCard", "card_of", "load_fuser", "read_card", "save_fuser"]


def card_of(
    fuser: CacheFuser,
    sender_name: str,
    receiver_name: str,
    *,
    data: Mapping[str, Fact] | None = None,
    scores: Mapping[str, float] | None = None,
    steps: int = 0,
    seed: int = 0,
    origin: str = "trained",
) -> FuserCard:
    """Write the card of a fuser at hand; ``origin`` is trained, closed-form or federated."""
    return FuserCard(
        sender_name=sender_name,
        receiver_name=receiver_name,
        sender=fuser.sender.to_json(),
        receiver=fuser.receiver.to_json(),
        config=asdict(fuser.config),
        data=dict(data or {}),
        scores=dict(scores or {}),
        steps=steps,
        seed=seed,
        origin=origin,
    )


def save_fuser(path: Path, fuser: CacheFuser, card: FuserCard) -> None:
    """Write a fuser whole or not at all; what had the name before is replaced.

    Raises
    ------
    ValueError
        If the card is of another pair or build.
    Refusal
        If the file cannot be written.
    """
    own = card_of(fuser, card.sender_name, card.receiver_name)
    for name in ("sender", "receiver", "config"):
        if getattr(own, name) != getattr(card, name):
            raise ValueError(f"the card has another {name} than the fuser")
    tensors = {n: x.detach().cpu().contiguous() for n, x in fuser.state_dict().items()}
    data = save_tensors(tensors, metadata=card.to_metadata())
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(data)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise Refusal(f"fuser {path}: {error.strerror}; expected a file to write") from error


def load_fuser(path: Path, sender: Geometry, receiver: Geometry) -> tuple[CacheFuser, FuserCard]:
    """Read the fuser of this pair, in evaluation mode and frozen.

    Raises
    ------
    Refusal
        If the file is of other models, or does not hold what its card says.
    """
    card = read_card(path)
    for side, told, wanted in (
        ("sender", card.sender, sender),
        ("receiver", card.receiver, receiver),
    ):
        _check_side(path, side, Geometry.from_json(told), wanted)
    try:
        with torch.device("meta"):
            fuser = CacheFuser(sender, receiver, FuserConfig(**card.config))  # type: ignore[arg-type]
    except (TypeError, Refusal) as error:
        raise Refusal(f"fuser {path}: its card describes no fuser ({error})") from error
    _check_sizes(path, fuser)
    tensors = load_file(path)
    if odd := sorted(n for n, x in tensors.items() if not torch.isfinite(x).all()):
        raise Refusal(f"fuser {path}: {odd[0]} is not finite; fetch or make it anew")
    fuser.load_state_dict(tensors, assign=True)
    return fuser.eval().requires_grad_(False), card


def _check_side(path: Path, side: str, told: Geometry, wanted: Geometry) -> None:
    if told == wanted:
        return
    for what in ("model", "tokenizer"):
        came, here = getattr(told, what), getattr(wanted, what)
        if came != here:
            raise Refusal(
                f"fuser {path} belongs to {side} {what} {came[:16]}, this one is {here[:16]}: use"
                " the models that it was made for, or make one for these"
            )
    raise Refusal(f"fuser {path} describes its {side} as another shape than it is: make it anew")


def _check_sizes(path: Path, fuser: CacheFuser) -> None:
    """Compare names, shapes and kinds of numbers with what the card promises."""
    try:
        with safe_open(path, framework="numpy") as file:
            found = {n: file.get_slice(n) for n in sorted(file.keys())}
            shapes = {n: (tuple(x.get_shape()), x.get_dtype()) for n, x in found.items()}
    except (OSError, SafetensorError) as error:
        raise Refusal(f"fuser {path} cannot be read ({error}): it is cut short") from error
    own = fuser.state_dict()
    if odd := sorted(own.keys() ^ shapes.keys()):
        raise Refusal(f"fuser {path}: tensor {odd[0]} ({len(odd)} in all) is not as its card says")
    for name, (shape, kind) in shapes.items():
        if shape != tuple(own[name].shape) or kind not in ("F32", "F64", "F16", "BF16"):
            raise Refusal(
                f"fuser {path}: {name} is {kind} {shape}, its card promises floats"
                f" {tuple(own[name].shape)}"
            )
