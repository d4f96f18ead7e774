# SPDX-License-Identifier: Apache-2.0
"""The part of a tokenizer that fedloom uses, and one that needs no files: a token is a byte."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Tokenizer(Protocol):
    """What a tokenizer must offer; those of transformers do."""

    @property
    def pad_token_id(self) -> int:
        """Token that fills up a batch."""

    @property
    def eos_token_id(self) -> int:
        """Token that ends a text."""

    @property
    def vocab_size(self) -> int:
        """Tokens without later additions."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn a text into token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids back into text."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The 256 bytes, then pad, bos and eos; bos opens a text as it does in Llama.

    >>> ByteTokenizer().encode("é"), ByteTokenizer().decode([257, 195, 169, 256])
    ([257, 195, 169], 'é')
    """

    pad_token_id: int = 256
    bos_token_id: int = 257
    eos_token_id: int = 258
    vocab_size: int = 259

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's UTF-8 bytes, after bos if special tokens are wanted."""
        ids = list(text.encode())
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Join the bytes, leaving special tokens out; broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")

    def digest(self) -> str:
        """Hash the definition."""
        return hashlib.sha256(repr(self).encode()).hexdigest()
