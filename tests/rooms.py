"""Pairs of tiny models of other architectures, and what one reads of the other."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.models import tiny
from fedloom.models.base import Base, load_base
from fedloom.slices.geometry import Geometry, geometry_of
from fedloom.slices.slice import export_cache

TEXT = list("ein Käse für Zoë".encode())
PROMPT = list(b"what is it?")
PAIRS = (("llama", "qwen3"), ("qwen3", "qwen2"), ("qwen2", "gemma3"), ("gemma3", "llama"))


@functools.cache
def room(family: str, dtype: str = "float64") -> tuple[Base, Geometry]:
    base = load_base(f"tiny:{family}", dtype)
    return base, geometry_of(base.model, base.base_hash, base.tokenizer_hash)


def save_with_tokenizer(folder: Path, family: str) -> Path:
    """Save a tiny model as ``save_pretrained`` does, with a real tokenizer, a byte a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny.build(family).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<|end|>"])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>").save_pretrained(folder)
    return folder


def fuser_of(sender: str, receiver: str, dtype: str = "float64", **told) -> CacheFuser:
    """An untrained fuser: what it says is noise, but noise that matters."""
    config = FuserConfig(width=16, **told)
    made = CacheFuser(room(sender)[1], room(receiver)[1], config).eval().requires_grad_(False)
    return made.to(getattr(torch, dtype))


def piece_of(family: str, text=TEXT, dtype: str = "float64", **told):
    base, geometry = room(family, dtype)
    return export_cache(base.model, geometry, text, **told)


def shut(fuser: CacheFuser, *places: int) -> CacheFuser:
    """Shut some gates, or all."""
    with torch.no_grad():
        fuser.gates.logit[list(places) or slice(None)] = -1.0
    return fuser


@torch.no_grad()
def alone(receiver: Base, ids, tokens: int = 8):
    """The receiver's own logits and answer, by transformers' own loop."""
    row = torch.tensor([list(ids)])
    out = receiver.model.generate(
        row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return receiver.model(row).logits[0], out[0, len(ids) :].tolist()
