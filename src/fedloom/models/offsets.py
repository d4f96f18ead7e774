# SPDX-License-Identifier: Apache-2.0
"""Where in a text each token ends: what two tokenizers have in common."""

from __future__ import annotations

from typing import Any, cast

from fedloom.errors import Refusal
from fedloom.models.tokenizer import ByteTokenizer, Tokenizer


def token_ends(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Tokenise with special tokens; return ids and each token's end in characters.

    A token before the text ends at 0; pieces of one character all end where it ends.

    >>> token_ends(ByteTokenizer(), "aé")
    ([257, 97, 195, 169], [0, 1, 2, 2])
    """
    if isinstance(tokenizer, ByteTokenizer):
        ends = [i for i, char in enumerate(text, 1) for _ in char.encode()]
        return tokenizer.encode(text), [0, *ends]
    if not getattr(tokenizer, "is_fast", False):
        raise Refusal(
            f"a {type(tokenizer).__name__} does not say where its tokens stand in the text:"
            " expected a tokenizer with a tokenizer.json; use prefix fusion, which needs none"
        )
    made = cast(Any, tokenizer)(text, return_offsets_mapping=True)
    ends, reached = [], 0
    for start, end in made["offset_mapping"]:
        reached = max(reached, end) if end > start else reached
        ends.append(reached)
    return list(made["input_ids"]), ends
