# SPDX-License-Identifier: Apache-2.0
"""Texts to keys: the mean of a transformer's last hidden states, normalised to length one."""

from __future__ import annotations

import functools
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from fedloom import archives
from fedloom.data.labelled import Items
from fedloom.errors import Refusal
from fedloom.models.base import load_base
from fedloom.models.encoders import digest_of
from fedloom.models.sources import Location, Source, locate

TOKENS = 256
"""A text's tokens beyond these are not read, as in all-MiniLM-L6-v2."""
_BATCH = 32


class TextEncoder:
    """A transformer whose last hidden states are averaged over a text's tokens.

    Parameters
    ----------
    model : nn.Module
        Called with ``input_ids`` and ``attention_mask``; frozen here.
    tokenise : Callable
        Returns the ids of a text, no more than the model should see.
    padding : int
        Token that fills up a batch; masked.
    width : int
    digest : str
    first : bool
        Take the first token's state in place of the mean, as some sentence encoders are trained.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenise: Callable[[str], Sequence[int]],
        padding: int,
        *,
        width: int,
        digest: str,
        first: bool = False,
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.width, self.digest = width, digest
        self._tokenise, self._padding, self._first = tokenise, padding, first

    def encode(self, items: Items) -> NDArray[np.float32]:
        """Return a key for each text, one forward pass each.

        Raises
        ------
        Refusal
            If the items are no texts.
        """
        if not all(isinstance(item, str) for item in items):
            raise Refusal("items that are no texts: expected texts; use an encoder of images")
        rows = [list(self._tokenise(str(item))) or [self._padding] for item in items]
        keys = np.empty((len(rows), self.width), np.float32)
        with torch.inference_mode():
            for batch in _batches(rows):
                keys[batch] = self._keys([rows[i] for i in batch]).float().cpu().numpy()
        return keys

    def label_keys(self, classes: Sequence[str]) -> NDArray[np.float32]:
        """Encode the names, ``_`` and ``.`` read as spaces (``sci.space``)."""
        return self.encode([" ".join(name.replace("_", " ").split(".")) for name in classes])

    def _keys(self, rows: Sequence[Sequence[int]]) -> Tensor:
        device = next(self.model.parameters()).device
        ids = torch.full((len(rows), max(map(len, rows))), self._padding)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        ids, mask = ids.to(device), mask.to(device)
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        if self._first:
            return nn.functional.normalize(hidden[:, 0], dim=-1)
        heard = mask[..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * heard).sum(1) / heard.sum(1), dim=-1)


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield places of rows, longest first: rows of a batch are about equally long."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    for start in range(0, len(order), _BATCH):
        yield order[start : start + _BATCH]


def minilm(device: str = "cpu") -> TextEncoder:
    """Return all-MiniLM-L6-v2 (22.7M, 384 wide) out of a wheel, read as data."""
    return sentence_encoder(locate(Source("path", str(_unpacked(archives.MINILM)))), device)


def sentence_encoder(location: Location, device: str = "cpu") -> TextEncoder:
    """Load a sentence encoder from a folder of safetensors.

    A folder of sentence-transformers says in ``1_Pooling`` whether states are averaged, which is
    taken for granted without it.

    Raises
    ------
    Refusal
        If its weights do not fit its architecture, or it pools in another way.
    """
    folder = location.folder
    if folder is None:
        raise Refusal("a tiny model is no sentence encoder: use lm:tiny:FAMILY")
    model = load_whole(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    limit = min(TOKENS, int(getattr(model.config, "max_position_embeddings", TOKENS)))
    first = _takes_first(folder)
    return TextEncoder(
        model.to(device),
        functools.partial(tokenizer.encode, truncation=True, max_length=limit),
        tokenizer.pad_token_id or 0,
        width=int(model.config.hidden_size),
        digest=digest_of(
            "first" if first else "mean", limit, location.base_hash, location.tokenizer_hash
        ),
        first=first,
    )


def language_model(source: str, device: str = "cpu") -> TextEncoder:
    """Use a causal language model: the mean of its last hidden states, after the last norm."""
    base = load_base(source, "float32", device)
    trunk = base.model.base_model
    return TextEncoder(
        _Uncached(trunk),
        lambda text: base.tokenizer.encode(text)[:TOKENS],
        base.tokenizer.pad_token_id,
        width=int(trunk.config.hidden_size),
        digest=digest_of("lm mean", TOKENS, base.base_hash, base.tokenizer_hash),
    )


def load_whole(folder: Path) -> Any:
    """Load a model by its config, refusing one that lacks weights.

    Raises
    ------
    Refusal
        If it cannot be loaded or transformers would fill gaps with random numbers.
    """
    try:
        model, report = AutoModel.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise Refusal(f"{folder} cannot be loaded by transformers: {error}") from error
    gaps = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if gaps := [name for name in gaps if not name.startswith("pooler.")]:  # never used
        raise Refusal(f"{folder} lacks {gaps[0]} ({len(gaps)} in all): save the model anew")
    return model


class _Uncached(nn.Module):
    """A decoder that keeps nothing for a next token."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)


def _takes_first(folder: Path) -> bool:
    told = folder / "1_Pooling" / "config.json"
    if not told.is_file():
        return False
    modes = {k for k, v in json.loads(told.read_bytes()).items() if v and k.startswith("pooling")}
    if len(modes) != 1 or not modes <= {"pooling_mode_mean_tokens", "pooling_mode_cls_token"}:
        raise Refusal(f"{folder} pools by {sorted(modes)}: expected the mean or the first token")
    return modes == {"pooling_mode_cls_token"}


def _unpacked(archive: archives.Archive) -> Path:
    """Copy the wheel's folder ``model`` into the cache, whole or not at all."""
    folder = archives.cache_dir() / "models" / f"{archive.project}-{archive.sha256[:16]}"
    if folder.is_dir():
        return folder
    with archives.locked(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():  # another process was quicker
            return folder
        draft = folder.with_name(folder.name + ".part")
        shutil.rmtree(draft, ignore_errors=True)
        with zipfile.ZipFile(archives.fetch(archive)) as wheel:
            for name in wheel.namelist():
                _, inside, rest = name.partition("/model/")
                if inside and rest and (rest.endswith((".json", ".safetensors", "vocab.txt"))):
                    target = draft / rest
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with wheel.open(name) as source, target.open("wb") as copy:
                        shutil.copyfileobj(source, copy, 1 << 20)
        os.replace(draft, folder)
    return folder
