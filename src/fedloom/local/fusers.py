# SPDX-License-Identifier: Apache-2.0
"""A node's own shelf of fusers: by the SHA-256 of their files, so each is fetched once.

They lie beside the clients' homes (``FEDLOOM_STATE``) and outlive a run.  A fuser steers a model as
weights do: what arrives is hashed before it is kept, and its card binds it to one pair.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from fedloom.adapters.fuser import CacheFuser
from fedloom.adapters.fuser_files import load_fuser
from fedloom.cards import read_card
from fedloom.errors import Refusal
from fedloom.local.home import root
from fedloom.slices.geometry import Geometry


def held() -> list[str]:
    """Return the digests of those that are here."""
    return sorted(path.stem for path in (root() / "fusers").glob("*.safetensors"))


def keep(digest: str, data: bytes) -> None:
    """Put a file on the shelf.

    Raises
    ------
    Refusal
        If it is not the file of this digest.
    """
    if (came := hashlib.sha256(data).hexdigest()) != digest:
        raise Refusal(
            f"a fuser of digest {came[:16]} came as {digest[:16]}: it was changed; refused"
        )
    path = _path(digest)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    draft.replace(path)


def find(digests: Iterable[str], sender: Geometry, receiver: Geometry) -> CacheFuser | None:
    """Load the fuser of a pair, if it is one of these.

    Raises
    ------
    Refusal
        If its file is damaged.
    """
    for digest in digests:
        path = _path(digest)
        if not path.is_file():
            continue
        card = read_card(path)
        if (card.sender_model, card.receiver_model) == (sender.model, receiver.model):
            return load_fuser(path, sender, receiver)[0]
    return None


def _path(digest: str) -> Path:
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise Refusal(f'fuser "{digest[:80]}": expected the 64 hexadecimal digits of a SHA-256')
    return root() / "fusers" / f"{digest}.safetensors"
