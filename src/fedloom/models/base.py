# SPDX-License-Identifier: Apache-2.0
"""``load_base``: the frozen language model, loaded once a process however many clients use it."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from fedloom.errors import Refusal, nearest
from fedloom.models import tiny
from fedloom.models.sources import Location, Source, locate, parse_source, read_tokenizer
from fedloom.models.tokenizer import ByteTokenizer, Tokenizer

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Base:
    """A frozen model with its tokenizer; shared by all clients of a process."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    base_hash: str
    tokenizer_hash: str
    source: Source


def load_base(source: Source | str, dtype: str = "float32", device: str = "cpu") -> Base:
    """Return the base model in evaluation mode without gradients; the same object at each call.

    Raises
    ------
    Refusal
        If the source, the dtype or the files cannot be used.
    """
    if dtype not in DTYPES:
        hint = nearest(dtype, DTYPES)
        raise Refusal(f'dtype "{dtype}": expected one of {", ".join(DTYPES)}{hint}')
    parsed = source if isinstance(source, Source) else parse_source(source)
    return _load(parsed, dtype, str(torch.device(device)))


def pick_device(told: str = "auto") -> str:
    """Return the name of a device that is here; ``auto`` is the first GPU, else the CPU.

    Raises
    ------
    Refusal
        If torch knows no such device, or sees none on this machine.
    """
    gpu = torch.cuda.is_available()
    if told == "auto":
        return "cuda:0" if gpu else "cpu"
    try:
        device = torch.device(told)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        here = "auto, cpu or cuda:0" if gpu else "auto or cpu, for torch sees no GPU here"
        raise Refusal(f'device "{told}": expected {here}') from error
    return str(device)


def bases_loaded() -> int:
    """Count the loads that this process has done."""
    return _FORGOTTEN.total() + _load.cache_info().misses


def forget_bases() -> None:
    """Let go of every base: a process that lives on has room for the next run's."""
    _FORGOTTEN["loads"] += _load.cache_info().misses
    _load.cache_clear()


_FORGOTTEN: Counter[str] = Counter()


@functools.cache
def _load(source: Source, dtype: str, device: str) -> Base:
    location = locate(source)
    log.info("loading %s as %s on %s", source, dtype, device)
    model, tokenizer = _read(source, location, DTYPES[dtype])
    model = model.to(device).requires_grad_(False).eval()
    return Base(model, tokenizer, location.base_hash, location.tokenizer_hash, source)


def _read(
    source: Source, location: Location, dtype: torch.dtype
) -> tuple[PreTrainedModel, Tokenizer]:
    if location.folder is None:
        return tiny.build(source.name).to(dtype), ByteTokenizer()
    try:
        return _read_model(source, location.folder, dtype), read_tokenizer(location.folder)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{source} cannot be loaded by transformers: {error}") from error


def _read_model(source: Source, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    # transformers would fill the gaps with random numbers, different on every node.
    if gaps := sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"])):
        raise Refusal(
            f"{source} lacks {gaps[0]} ({len(gaps)} in all): expected the weights of a"
            f" {type(model).__name__}; save the model anew"
        )
    return model
