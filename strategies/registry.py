# SPDX-License-Identifier: Apache-2.0
"""``Registry``: fusers that a server has, by ordered pair of models; it reads cards, no weights.

A file is named by the SHA-256 of its bytes: a node that has it needs no other copy, and a copy that
was changed on its way is not taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.cards import FuserCard, fuser_files, read_card
from fedloom.errors import Refusal

Pair = tuple[str, str]
"""Hashes of the sender's and the receiver's model."""


@dataclass(frozen=True)
class Entry:
    """One fuser's file."""

    path: Path
    digest: str
    size: int
    card: FuserCard

    def data(self) -> NDArray[np.uint8]:
        """Read the file as it travels."""
        data = self.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise Refusal(f"fuser {self.path} was changed while the run went on: run it again")
        return np.frombuffer(data, np.uint8)

    def told(self) -> dict[str, Any]:
        """Describe it for a journal, or for a node that asks what there is."""
        card = self.card
        return {
            "sender": card.sender_name,
            "receiver": card.receiver_name,
            "digest": self.digest,
            "bytes": self.size,
            "origin": card.origin,
            "mode": str(card.config.get("mode", "")),
            "scores": dict(card.scores),
        }


class Registry:
    """All fusers of a folder and of the folders in it.

    Raises
    ------
    Refusal
        If there is no such folder, a file in it is no fuser, or a pair has two.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise Refusal(
                f"refine.fusers = {folder}: no such folder; expected fusers as fedloom fuser train"
                " writes them"
            )
        self.entries: dict[Pair, Entry] = {}
        for path in fuser_files(folder):
            card = read_card(path)
            pair = card.sender_model, card.receiver_model
            if pair in self.entries:
                other = self.entries[pair].path.relative_to(folder)
                raise Refusal(
                    f"{path} and {other} are of one pair,"
                    f" {card.sender_name} -> {card.receiver_name}: leave one of them in the folder"
                )
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self.entries[pair] = Entry(path, digest, path.stat().st_size, card)

    def among(self, models: Iterable[str], receiver: str) -> list[Entry]:
        """Return what a receiver needs to hear these models, in the order of their hashes."""
        found = (self.entries.get((sender, receiver)) for sender in sorted(set(models)))
        return [entry for entry in found if entry is not None]
