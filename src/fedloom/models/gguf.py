# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes a folder of safetensors, once: transformers' own reader is right but slow."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedloom import archives
from fedloom.errors import Refusal
from fedloom.models import fingerprints

log = logging.getLogger(__name__)

_SEAL = ".sealed"  # SHA-256 over the converted files, beside them


def converted(sha256: str, provide: Callable[[Path], Path]) -> Path:
    """Return the converted folder of the GGUF file with this hash, making it if need be.

    Parameters
    ----------
    sha256
        Hash of the GGUF file; names the folder.
    provide
        Called with an empty folder only if the conversion has to be made; returns the GGUF file,
        which it may put there.

    Raises
    ------
    Refusal
        If transformers cannot read the file.
    """
    folder = folder_of(sha256)
    if _is_whole(folder):
        return folder
    with archives.locked(folder.with_name(folder.name + ".lock")):
        if _is_whole(folder):  # another process was quicker
            return folder
        if folder.is_dir():
            log.warning("%s is damaged (its files are not those of its seal): made again", folder)
            shutil.rmtree(folder)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as temporary:
            source, target = Path(temporary) / "source", Path(temporary) / "target"
            source.mkdir()
            _convert(provide(source), target)
            shutil.rmtree(source)
            (target / _SEAL).write_text(fingerprints.folder_hash(_sealed(target)), encoding="utf-8")
            os.replace(target, folder)  # whole or not at all
    return folder


def folder_of(sha256: str) -> Path:
    """Return where the converted file is, or would be."""
    return archives.cache_dir() / "models" / f"gguf-{sha256[:16]}-float16"


def _sealed(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != _SEAL)


def _is_whole(folder: Path) -> bool:
    """Hold what was converted against the seal it was given; one of an older version has none."""
    seal = folder / _SEAL
    if not folder.is_dir() or not seal.is_file():
        return folder.is_dir()
    return seal.read_text(encoding="utf-8") == fingerprints.folder_hash(_sealed(folder))


def check_magic(path: Path) -> None:
    """Refuse a file that is not GGUF."""
    try:
        with path.open("rb") as handle:
            magic = handle.read(4)
    except OSError as error:
        raise Refusal(f"gguf:{path}: {error.strerror}; expected a GGUF file") from error
    if magic != b"GGUF":
        raise Refusal(f"gguf:{path} starts with {magic!r}: expected a GGUF file")


def _convert(path: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    log.warning("converting %s to safetensors; this happens once and takes a minute", path.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    except (ImportError, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise Refusal(f"transformers cannot read {path.name}: {error}") from error
    # The weights are plain numbers now, but save_pretrained refuses while the quantizer is there.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):  # by version of transformers
        del model.config.quantization_config
    model.half().save_pretrained(target)
    tokenizer.save_pretrained(target)
