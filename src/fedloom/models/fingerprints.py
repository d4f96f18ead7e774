# SPDX-License-Identifier: Apache-2.0
"""SHA-256 over a model's files, remembered so that gigabytes are hashed once and not per message.

What is remembered lies in fedloom's cache, never in the model's folder, and holds as long as
names, sizes and modification times of the files stay the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fedloom import archives

VOLATILE = {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of JSON files that say who wrote the file and not what the model is."""


def weights_hash(folder: Path) -> str:
    """Hash the weights and the architecture of a model folder."""
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json"]
    return _remembered("weights", files, lambda: _hash(files))


def tokenizer_hash(folder: Path) -> str:
    """Hash the tokenizer of a model folder."""
    files = tokenizer_files(folder)
    return _remembered("tokenizer", files, lambda: _hash(files))


def tokenizer_files(folder: Path) -> list[Path]:
    """List what defines the tokenizer: ``tokenizer.json`` alone, or the files of the slow kind."""
    whole = folder / "tokenizer.json"
    slow = ("tokenizer.model", "vocab.json", "merges.txt")
    found = [whole] if whole.is_file() else [folder / n for n in slow if (folder / n).is_file()]
    config = folder / "tokenizer_config.json"
    return [*found, config] if found and config.is_file() else found


def folder_hash(files: Sequence[Path]) -> str:
    """Hash files to the byte, with their names."""
    return _remembered("folder", files, lambda: _plain_hash(files))


def file_hash(path: Path) -> str:
    """Return a file's plain SHA-256."""
    return _remembered("file", [path], lambda: archives.file_sha256(path))


def _remembered(purpose: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    stamps = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    key = hashlib.sha256(json.dumps([purpose, stamps]).encode()).hexdigest()
    return _recall(archives.cache_dir() / "hashes" / key, compute)


def _plain_hash(files: Sequence[Path]) -> str:
    named = {file.name: archives.file_sha256(file) for file in files}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _hash(files: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name}|{_content_hash(file)}|".encode())
    return whole.hexdigest()


def _content_hash(file: Path) -> str:
    if file.name not in ("config.json", "tokenizer_config.json"):
        return archives.file_sha256(file)
    # Two versions of transformers convert the same model with the same meaning, not the same text.
    tree = json.loads(file.read_bytes())
    kept = {key: value for key, value in tree.items() if key not in VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _recall(path: Path, compute: Callable[[], str]) -> str:
    if path.is_file():
        return path.read_text()
    with archives.locked(path.with_suffix(".lock")):
        if path.is_file():
            return path.read_text()
        text = compute()
        draft = path.with_suffix(".part")
        draft.write_text(text)
        os.replace(draft, path)
    return text
