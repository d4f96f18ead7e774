# SPDX-License-Identifier: Apache-2.0
"""``FuserCard``: what a fuser's file says of itself, readable where there is no torch.

A registry must know which pair a fuser belongs to, what it was taught and how well it did, without
opening gigabytes.  All of that lies in the header of the safetensors file; models are bound by
their hashes, never by their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedloom import __version__
from fedloom.errors import Refusal

FORMAT = "fedloom-fuser-1"
CHECKPOINT = "checkpoint.safetensors"
"""What a training leaves beside its fuser until that is written."""
ORIGINS = ("trained", "closed-form", "federated")
"""By gradients, from sums in one process, from sums that clients of a federation sent."""
Fact = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class FuserCard:
    """The pair, the build, the lessons and the scores of one fuser.

    Attributes
    ----------
    sender_name, receiver_name : str
        Model sources, for people.
    sender, receiver : str
        What ``Geometry.to_json`` wrote: shapes, and the SHA-256 of weights and tokenizer.
    config : mapping
        The fields of ``FuserConfig``.
    data : mapping
        What it was taught: source, rows, tokens, the setting, a digest of the rows; never text.
    scores : mapping
        Measured on held-out rows, by name; what a registry may offer a node.
    """

    sender_name: str
    receiver_name: str
    sender: str
    receiver: str
    config: Mapping[str, Fact]
    data: Mapping[str, Fact] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    seed: int = 0
    origin: str = "trained"
    version: str = __version__
    """fedloom's."""

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(f'origin "{self.origin}": expected one of {", ".join(ORIGINS)}')

    @property
    def sender_model(self) -> str:
        """SHA-256 of the sender's weights."""
        return str(json.loads(self.sender)["model"])

    @property
    def receiver_model(self) -> str:
        """SHA-256 of the receiver's weights."""
        return str(json.loads(self.receiver)["model"])

    def to_metadata(self) -> dict[str, str]:
        """Write it as safetensors metadata: strings, each of them JSON."""
        tree = {"format": FORMAT, **asdict(self)}
        return {key: json.dumps(value, sort_keys=True) for key, value in tree.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> FuserCard:
        """Read what ``to_metadata`` wrote.

        Raises
        ------
        ValueError
            If it is of another format, or a field is missing, unknown or of another kind.
        """
        tree: dict[str, Any] = {key: json.loads(value) for key, value in metadata.items()}
        if (told := tree.pop("format", None)) != FORMAT:
            raise ValueError(f"its format is {told}")
        for name, kind in _KINDS.items():
            if name in tree and type(tree[name]) is not kind:
                raise ValueError(f"its {name} is a {type(tree[name]).__name__}")
        try:
            made = cls(**tree)
            told_hashes = made.sender_model, made.receiver_model
        except (TypeError, KeyError) as error:
            raise ValueError(f"its fields do not fit: {error}") from error
        if not all(told_hashes):
            raise ValueError("it names no models")
        return made

    def facts(self) -> list[tuple[str, str]]:
        """List what there is to know, for people."""
        return [
            ("sender", f"{self.sender_name} {self.sender_model[:16]}"),
            ("receiver", f"{self.receiver_name} {self.receiver_model[:16]}"),
            ("origin", f"{self.origin}, {self.steps} steps, seed {self.seed}"),
            ("made by", f"fedloom {self.version}"),
            *((f"config.{name}", str(x)) for name, x in sorted(self.config.items())),
            *((f"data.{name}", str(x)) for name, x in sorted(self.data.items())),
            *((f"score.{name}", f"{x:.6g}") for name, x in sorted(self.scores.items())),
        ]

    def to_text(self) -> str:
        """Describe it in Markdown."""
        lines = [
            f"# Fuser {self.sender_name} -> {self.receiver_name}",
            "",
            "| | |",
            "| --- | --- |",
        ]
        return "\n".join([*lines, *(f"| {name} | {x} |" for name, x in self.facts()), ""])


_KINDS = {
    "sender_name": str,
    "receiver_name": str,
    "sender": str,
    "receiver": str,
    "config": dict,
    "data": dict,
    "scores": dict,
    "steps": int,
    "seed": int,
    "origin": str,
    "version": str,
}


def fuser_files(folder: Path) -> list[Path]:
    """List the fusers in a folder and the folders in it, as ``fedloom fuser`` makes them.

    Checkpoints, and what has a name that begins with a dot, are none.
    """
    return [
        path
        for path in sorted(folder.rglob("*.safetensors"))
        if path.name != CHECKPOINT
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def read_card(path: Path) -> FuserCard:
    """Read what a fuser's file says of itself, without its weights.

    Raises
    ------
    Refusal
        If the file is missing, cut short, no fuser or of a format that this version cannot read.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        raise Refusal(
            f"fuser {path}: no such file; make one with fedloom fuser train or fuser solve"
        ) from error
    except (OSError, SafetensorError) as error:
        raise Refusal(
            f"fuser {path} cannot be read ({error}): it is cut short or no safetensors file"
        ) from error
    try:
        return FuserCard.from_metadata(metadata)
    except ValueError as error:
        raise Refusal(
            f"fuser {path} is no {FORMAT} file ({error}): expected one of fedloom fuser"
        ) from error
