# SPDX-License-Identifier: Apache-2.0
"""``holdings``: a recipe's rows and who holds them, for every task.

Needles are made to a budget of tokens, so that task needs the model's tokenizer; none needs the
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedloom.config import RunConfig
from fedloom.data import by_file, dealing, partition
from fedloom.data.dealing import Item
from fedloom.data.niah.encode import encode_needle
from fedloom.data.niah.examples import NeedleExample, needle_holdings
from fedloom.data.partition import Partition
from fedloom.data.prompts import Encoded, Encodes, encode_question
from fedloom.data.questions import Question
from fedloom.models.sources import load_tokenizer

Example = Question | NeedleExample | Item


def holdings(config: RunConfig) -> tuple[Sequence[Example], Partition]:
    """Load or make a recipe's rows and divide them; hold the result against ``data.manifest``.

    Raises
    ------
    Refusal
        If the data cannot be had, a client has too few rows or a budget too small for its events,
        or the manifest says otherwise.
    """
    if config.data.split == "files":
        steady = config.method == "faast" and config.faast.private
        return by_file.holdings(config.data, config.seed, steady)
    if config.data.task == "mmlu":
        return partition.holdings(config.data, config.seed)
    if config.data.task == "classes":
        return dealing.holdings(config.data, config.seed, config.clients.count)
    tokenizer = load_tokenizer(config.model.source)
    rows, made = needle_holdings(config.niah, config.seed, tokenizer)
    if config.data.manifest:
        partition.read_partition(Path(config.data.manifest)).check_same(made)
    return rows, made


def encode(example: Question | NeedleExample, tokenizer: Encodes, max_tokens: int = 0) -> Encoded:
    """Encode a row for a language model; only a question may lose its beginning."""
    if isinstance(example, NeedleExample):
        return encode_needle(example, tokenizer)
    return encode_question(example, tokenizer, max_tokens)
