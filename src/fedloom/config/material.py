# SPDX-License-Identifier: Apache-2.0
"""What a run works on: the frozen model and the rows that the clients hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedloom.config.checks import at_least, one_of
from fedloom.errors import Refusal

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which frozen language model the adapter hangs on."""

    source: str = "embedded:smollm2-135m"
    """``embedded:NAME`` (smollm2-135m, qwen2.5-coder-0.5b, gemma3-270m), ``hub:ORG/NAME``,
    ``path:DIR``, ``gguf:FILE`` or ``tiny:FAMILY`` (llama, qwen2, qwen3, gemma3, mamba)."""
    dtype: str = "float32"
    """Dtype of the frozen weights: float32, bfloat16, float16 or (to check sums) float64.
    Adapters of half-precision weights stay float32."""
    device: str = "auto"
    """``auto`` takes a GPU if the client was given one, else the CPU."""

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("float32", "bfloat16", "float16", "float64"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the clients hold."""

    task: str = "mmlu"
    """``mmlu`` (questions by subject, five clients), ``niah`` (needles in haystacks, a client
    for each kind of ``[niah]``, whose rows are made: the keys for rows below are MMLU's) or
    ``classes`` (texts or images with labels, for ``method = "faast"``)."""
    source: str = "packaged:mmlu-dev"
    """``packaged:mmlu-dev``, ``packaged:bigbench`` (five clients of another benchmark's tasks),
    ``hub:cais/mmlu`` or ``path:FILE-OR-DIR`` (parquet, CSV, JSONL). For ``classes``, a set of
    ``data/labelled.py``: ``packaged:digits``, ``packaged:uci-sentences``."""
    split: str = "natural"
    """``classes``: who holds a row. ``natural`` is its owner (a shop, a paper), ``iid`` deals equal
    shares to ``clients.count``, ``dirichlet`` equal shares of skewed classes (arXiv 1909.06335).
    ``files``, for ``mmlu`` too: client k holds the k-th table of the folder that ``source`` names,
    or, on a node started with ``data`` of its own, just that (docs/deploy.md)."""
    dirichlet: float = 0.1
    """``dirichlet``: concentration; each client's class shares are drawn around those of the whole
    set. Large is nearly iid, 0.01 leaves a client with one class or two."""
    max_train: int = 2000
    """At most so many training rows a client (FedNL, Table 3)."""
    max_test: int = 200
    test_share: float = 1 / 6
    """Of a client's rows, the share kept for testing before ``max_test`` caps it."""
    min_train: int = 8
    """A client with fewer training rows is refused before any model loads."""
    min_test: int = 4
    max_tokens: int = 0
    """Longer prompts lose their beginning; 0 keeps every token."""
    manifest: str = ""
    """A partition manifest (JSON) that every node must agree with; empty: no outside check."""

    def __post_init__(self) -> None:
        one_of("data.task", self.task, ("mmlu", "niah", "classes"))
        one_of("data.split", self.split, ("natural", "iid", "dirichlet", "files"))
        if not 0 < self.dirichlet < math.inf:
            raise Refusal(f"data.dirichlet = {self.dirichlet}: expected a positive number")
        at_least("data.max-train", self.max_train, 1)
        at_least("data.max-test", self.max_test, 1)
        at_least("data.min-train", self.min_train, 1)
        at_least("data.min-test", self.min_test, 1)
        at_least("data.max-tokens", self.max_tokens, 0)
        if not 0 < self.test_share < 1:
            raise Refusal(f"data.test-share = {self.test_share}: expected a share between 0 and 1")


NEEDLES: dict[str, str] = {
    "passkey": "Passkey",
    "uuid": "UUID code",
    "name-date": "Name-date",
    "phrase": "Phrase code",
    "counter": "Counter state",
    "multi-key": "MK-NIAH",
    "multi-value": "MV-NIAH",
}
"""The paper's seven clients: name in a recipe -> name in the paper, in its order."""


@dataclass(frozen=True, kw_only=True)
class NiahConfig:
    """Needles in haystacks (``data.task = "niah"``); tokens are the backbone's, prompt and all."""

    kinds: str = ",".join(NEEDLES)
    """Clients, in the order of their partition ids."""
    filler: str = "packaged:wikipedia"
    """``packaged:wikipedia``, ``packaged:austen`` (where there is apt-get),
    ``hub:Salesforce/wikitext`` or ``path:FILE-OR-DIR`` (.txt, .md)."""
    train_rows: int = 96
    """Training rows a client; FedNL has 750."""
    train_tokens_min: int = 256
    train_tokens_max: int = 512
    """Training prompts are of lengths drawn between these two."""
    primer_rows: int = 0
    """Rows a client learns from besides: one event, then more, then filler, which in every other
    row stands between the events too. With ``train.curriculum`` they come first, and the memory
    learns to find one fact before four."""
    primer_events: int = 3
    """Events in the last of them; the first have one."""
    primer_tokens: int = 96
    """Tokens of filler in such a row; more than the window, or attention answers."""
    primer_tokens_max: int = 0
    """Tokens of filler in the last such row, growing evenly; 0 keeps ``niah.primer-tokens``."""
    primer_questions: bool = True
    """Whether primers of ``niah.lessons = "sentences"`` ask. Without, they only tell their events
    again: fewer tokens, and a value that is not as far away from where it is wanted."""
    test_rows: int = 8
    """Test rows a client for each of ``test-tokens``; FedNL has 5."""
    test_tokens: str = "512,1024,2048"
    """Lengths of the test prompts; FedNL has 1024 to 16384."""
    listed: bool = True
    """Whether the four values are listed below the question. Without, they are only scored: what
    the model is asked of is the haystack alone."""
    lessons: str = "questions"
    """What a training row asks after its context: ``questions`` are asked as in a test;
    ``sentences`` asks for one as in a test and says all others again, in another order and as
    they were told, in fewer tokens. No lesson of sentences lists options."""
    telling_weight: float = 1.0
    """How many times the token that first tells a value from the others counts in a lesson's loss.
    The tokens after it follow from it, and can be learnt without knowing whose value is asked for;
    which value it is hangs on this one."""
    depths: str = "0.1,0.3,0.5,0.7"
    """Where events stand, as fractions of the filler; each is asked for equally often. Fewer than
    four get distractors at random depths; a counter's events are spread evenly."""

    def __post_init__(self) -> None:
        for kind in self.kind_names:
            one_of("niah.kinds", kind, tuple(NEEDLES))
        for key, count in (
            ("niah.train-rows", self.train_rows),
            ("niah.test-rows", self.test_rows),
            ("niah.primer-events", self.primer_events),
            ("niah.primer-tokens", self.primer_tokens),
            ("niah.train-tokens-min", self.train_tokens_min),
        ):
            at_least(key, count, 1)
        at_least("niah.primer-rows", self.primer_rows, 0)
        at_least("niah.telling-weight", self.telling_weight, 1)
        one_of("niah.lessons", self.lessons, ("questions", "sentences"))
        at_least("niah.train-tokens-max", self.train_tokens_max, self.train_tokens_min)
        if self.primer_tokens_max:
            at_least("niah.primer-tokens-max", self.primer_tokens_max, self.primer_tokens)
        _check_rising("niah.kinds", self.kinds, sorted(self.kind_names), "names that differ")
        _check_rising("niah.test-tokens", self.test_tokens, self.test_lengths, "rising lengths")
        at_least("niah.test-tokens", self.test_lengths[0], 1)
        depths = self.depth_fractions
        _check_rising("niah.depths", self.depths, depths, "rising fractions")
        if not (depths[0] >= 0 and depths[-1] <= 1):
            raise Refusal(f'niah.depths = "{self.depths}": expected fractions from 0 to 1')

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The kinds, one by one."""
        return tuple(kind.strip() for kind in self.kinds.split(","))

    @property
    def test_lengths(self) -> tuple[int, ...]:
        """The test prompts' lengths in tokens."""
        return tuple(_numbers("niah.test-tokens", self.test_tokens, int))

    @property
    def depth_fractions(self) -> tuple[float, ...]:
        """The asked events' depths."""
        return tuple(_numbers("niah.depths", self.depths, float))


def _numbers(key: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise Refusal(f'{key} = "{text}": expected numbers with commas between them') from error


def _check_rising(key: str, text: str, items: Sequence[Any], expected: str) -> None:
    if not all(a < b for a, b in itertools.pairwise(items)):  # also refuses nan
        raise Refusal(f'{key} = "{text}": expected {expected}, each once')
