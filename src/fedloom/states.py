# SPDX-License-Identifier: Apache-2.0
"""Files of what a model keeps of one user's context: who they belong to, how old, how large.

A state is as private as the text that it was made from.  It lies in one safetensors file that its
owner alone may read, names the model and the adapter without which it means nothing, and may carry
a day from which it is refused.  It is never part of a message.  No torch here: what a state holds
can be inspected on a machine that could not use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fedloom.errors import Refusal

FORMAT = "fedloom-state-1"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True)
class Owner:
    """What a state is a function of, besides the context; it is refused by anything else."""

    base: str
    """SHA-256 over the frozen weights."""
    tokenizer: str
    """SHA-256 over the tokenizer's files."""
    adapter: str
    """SHA-256 over the adapter's arrays."""
    settings: str
    """SHA-256 over the recipe's keys that decide what the memory and the window do."""


@dataclass(frozen=True)
class Header:
    """What a state file says of itself."""

    owner: Owner
    tokens: int
    """Of the context so far."""
    created: str
    expires: str
    """ISO 8601 with its time zone; empty is never."""
    version: str
    """fedloom's."""

    def to_metadata(self) -> dict[str, str]:
        """Write it as safetensors metadata: strings, each of them JSON."""
        tree = {"format": FORMAT, **asdict(self)}
        return {key: json.dumps(value, sort_keys=True) for key, value in tree.items()}

    def expired(self, now: datetime | None = None) -> bool:
        """Whether its day has come."""
        return bool(self.expires) and _moment(self.expires) <= (now or datetime.now(UTC))


def read_header(path: Path) -> Header:
    """Read what a state file says of itself.

    Raises
    ------
    Refusal
        If the file is missing, cut short or no state.
    """
    with _opened(path) as file:
        metadata = file.metadata() or {}
    try:
        tree = {key: json.loads(value) for key, value in metadata.items()}
        if tree.pop("format") != FORMAT:
            raise ValueError("another format")
        header = Header(**{**tree, "owner": Owner(**tree["owner"])})
        if type(header.tokens) is not int or header.tokens < 1:
            raise ValueError("tokens")
        for text in (header.created, *([header.expires] if header.expires else [])):
            _moment(text)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refusal(
            f"state {path} is no {FORMAT} file: expected one of fedloom generate --save-state"
        ) from error
    return header


def check_use(path: Path, header: Header, owner: Owner) -> None:
    """Refuse a state that has expired or belongs to something else."""
    if header.expired():
        raise Refusal(
            f"state {path} expired at {header.expires}: start without it, and remove it with"
            f" fedloom state expire {path}"
        )
    for key, wanted in asdict(owner).items():
        came = asdict(header.owner)[key]
        if came != wanted:
            raise Refusal(
                f"state {path} differs in {key}: it was made with {str(came)[:16]}, this is"
                f" {wanted[:16]}; use the same model, adapter and memory settings, or start anew"
            )


@dataclass(frozen=True)
class Contents:
    """Sizes and norms of a state file."""

    layers: int
    """That carry a memory."""
    memory_bytes: int
    """``S`` and the pool's last raw keys."""
    attention_bytes: int
    """Keys and values that attention still sees."""
    norms: tuple[float, ...]
    """Frobenius norm of each layer's ``S``."""


def contents(path: Path) -> Contents:
    """Measure a state file."""
    layers, norms, sizes = set[str](), [], {"memory": 0, "attention": 0}
    with _opened(path) as file:
        for name in sorted(file.keys(), key=_natural):
            kind, _, rest = name.partition(".")
            if kind in sizes:
                sizes[kind] += _tensor_bytes(file.get_slice(name))
            if kind == "memory" and rest.endswith(".S"):
                layers.add(rest)
                norms.append(float(np.linalg.norm(file.get_tensor(name))))
    return Contents(len(layers), sizes["memory"], sizes["attention"], tuple(norms))


def states_in(place: Path) -> list[Path]:
    """List the state files of a folder, or the one file."""
    if not place.exists():
        raise Refusal(f"{place}: no such file or folder; expected a state or a folder of states")
    if place.is_file():
        return [place]
    found = []
    for path in sorted(place.glob("*.safetensors")):
        with contextlib.suppress(Refusal):  # other files may lie beside them
            read_header(path)
            found.append(path)
    return found


def write_private(path: Path, data: bytes) -> None:
    """Write whole or not at all, for the owner's eyes only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise Refusal(f"state {path}: {error.strerror}; expected a file to write") from error


def delete(path: Path) -> None:
    """Remove a state file, after a look at whether it is one."""
    read_header(path)
    path.unlink()


def lifetime(text: str) -> timedelta:
    """Read a duration: a whole number and s, m, h, d or w.

    >>> lifetime("7d"), lifetime("90m").total_seconds()
    (datetime.timedelta(days=7), 5400.0)
    """
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhdw])", text.strip())
    if not found:
        raise Refusal(f'"{text}": expected a duration such as 90m, 12h, 7d or 2w')
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


def age(header: Header, now: datetime | None = None) -> timedelta:
    """Return how long ago a state was written."""
    return (now or datetime.now(UTC)) - _moment(header.created)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:  # safetensors' methods have no types
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError as error:
        raise Refusal(f"state {path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise Refusal(
            f"state {path} cannot be read ({error}): the file is cut short or no safetensors file"
        ) from error


def _tensor_bytes(part: Any) -> int:
    dtype = part.get_dtype()
    bits = 8 if dtype == "BOOL" else int(re.sub(r"\D", "", dtype))
    return int(np.prod(part.get_shape(), dtype=np.int64)) * bits // 8


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return moment
