# SPDX-License-Identifier: Apache-2.0
"""How good an adapter is on what it never trained on: sums that add up over clients.

Scores leave a node as sums (count, correct, cross-entropy and its square), never row by row, so
that intervals can be drawn at the other end and nobody learns which row was hard.  ``score_rows``
is for scripts that hold the rows themselves and compare two adapters on each (``paired``).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from fedloom.models.answers import Prompts, answer_logits
from fedloom.models.trunk import Trunk


class ChoiceExample(Protocol):
    """A prompt whose answer is one of a few tokens."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens before the answer."""

    @property
    def letter_ids(self) -> Sequence[int]:
        """The token of each choice, in the order of the choices."""

    @property
    def gold(self) -> int:
        """Index of the right choice."""


@dataclass(frozen=True)
class ChoiceScores:
    """Sums over test rows; cross-entropies in nats."""

    examples: int = 0
    correct: int = 0
    """Rows whose largest logit among the letters is the gold letter's."""
    first_token_correct: int = 0
    """Rows whose largest logit over the whole vocabulary is the gold letter's."""
    gold_ce_sum: float = 0.0
    """Of the gold letter over the whole vocabulary: what training minimises."""
    gold_ce_sq_sum: float = 0.0
    letter_ce_sum: float = 0.0
    """Of the gold letter among the letters alone; ln(choices) is chance."""
    letter_ce_sq_sum: float = 0.0
    chance_sum: float = 0.0
    """Rows that guessing would get right: the sum of 1 / choices."""
    chance_ce_sum: float = 0.0
    """Letter CE of guessing: the sum of ln(choices)."""
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: ChoiceScores) -> ChoiceScores:
        mine, theirs = asdict(self), asdict(other)
        return ChoiceScores(**{key: mine[key] + theirs[key] for key in mine})

    @classmethod
    def of(cls, rows: Sequence[RowScore], *, seconds: float = 0.0) -> ChoiceScores:
        """Add rows up."""
        return cls(
            examples=len(rows),
            correct=sum(row.correct for row in rows),
            first_token_correct=sum(row.first_token_correct for row in rows),
            gold_ce_sum=math.fsum(row.gold_ce for row in rows),
            gold_ce_sq_sum=math.fsum(row.gold_ce**2 for row in rows),
            letter_ce_sum=math.fsum(row.letter_ce for row in rows),
            letter_ce_sq_sum=math.fsum(row.letter_ce**2 for row in rows),
            chance_sum=math.fsum(1 / row.choices for row in rows),
            chance_ce_sum=math.fsum(math.log(row.choices) for row in rows),
            tokens=sum(row.tokens for row in rows),
            seconds=seconds,
        )


@dataclass(frozen=True)
class Place:
    """Where in a long prompt the answer stands."""

    depth: int
    """Tokens that the prompt was made to have: 1024, 2048, ..."""
    distance: int
    """Tokens from what is asked for to where the question begins."""
    nearest: int
    """Tokens from the last thing that could be asked for to there: no value is closer."""


@dataclass(frozen=True)
class RowScore:
    """One row's outcome; it stays on the node that holds the row."""

    row: str
    """16 hex digits of a SHA-256 over the row's tokens: equal on both sides of a comparison."""
    choices: int
    correct: bool
    first_token_correct: bool
    gold_ce: float
    letter_ce: float
    tokens: int
    place: Place | None = None


def score_choices(
    model: PreTrainedModel, examples: Sequence[ChoiceExample], *, batch_size: int
) -> ChoiceScores:
    """Score every example zero-shot; no gradient, no parameter moves."""
    started = time.perf_counter()
    rows = score_rows(model, examples, batch_size=batch_size)
    return ChoiceScores.of(rows, seconds=time.perf_counter() - started)


def score_rows(
    model: PreTrainedModel,
    examples: Sequence[ChoiceExample],
    *,
    batch_size: int,
    places: Sequence[Place] = (),
    trunk: Trunk | None = None,
) -> list[RowScore]:
    """Score every example zero-shot, each for itself, in the order given.

    Not for messages: a row's outcome tells about the row.

    Parameters
    ----------
    places
        Where each example's answer stands, if that is known.
    trunk
        Remembers what the frozen lower layers make of a row.
    """
    if places and len(places) != len(examples):
        raise ValueError(f"{len(places)} places for {len(examples)} examples: expected one each")
    was_training = model.training
    model.eval()
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt_ids))
    found: dict[int, RowScore] = {}
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            picked = order[start : start + batch_size]
            batch = [examples[i] for i in picked]
            where = [places[i] if places else None for i in picked]
            found |= zip(picked, _score(model, batch, where, trunk), strict=True)
    model.train(was_training)
    return [found[i] for i in range(len(examples))]


def depth_sums(rows: Iterable[RowScore]) -> dict[str, int | float]:
    """Add rows up for each depth, as metrics that may leave a node (FedNL, Fig. 4).

    The keys are ``depth-1024-examples``, ``-correct``, ``-letter-ce-sum``, ``-letter-ce-sq-sum``,
    ``-chance-sum`` and ``-distance-sum``; rows without a place are left out.
    """
    told: dict[str, int | float] = {}
    for row in rows:
        if row.place is None:
            continue
        sums = {
            "examples": 1,
            "correct": int(row.correct),
            "letter-ce-sum": row.letter_ce,
            "letter-ce-sq-sum": row.letter_ce**2,
            "chance-sum": 1 / row.choices,
            "distance-sum": row.place.distance,
        }
        for name, value in sums.items():
            key = f"depth-{row.place.depth}-{name}"
            told[key] = told.get(key, 0) + value
    return told


def _score(
    model: PreTrainedModel,
    batch: Sequence[ChoiceExample],
    places: Sequence[Place | None],
    trunk: Trunk | None,
) -> list[RowScore]:
    device = model.get_output_embeddings().weight.device
    prompts = Prompts.of([example.prompt_ids for example in batch], device)
    return score_logits(answer_logits(model, prompts, trunk), batch, places)


def score_logits(
    logits: torch.Tensor, batch: Sequence[ChoiceExample], places: Sequence[Place | None] = ()
) -> list[RowScore]:
    """Score examples by the next-token logits after their prompts, [B, vocabulary]."""
    logits, device = logits.double(), logits.device
    counts = [len(example.letter_ids) for example in batch]
    # Rows have two to five choices: the missing letters stand as token 0 and weigh nothing.
    padded = [[*e.letter_ids, *[0] * (max(counts) - len(e.letter_ids))] for e in batch]
    letters = torch.tensor(padded, device=device)
    missing = (
        torch.arange(max(counts), device=device) >= torch.tensor(counts, device=device)[:, None]
    )
    gold = torch.tensor([example.gold for example in batch], device=device)
    gold_token = letters.gather(1, gold[:, None])
    among = logits.gather(1, letters).masked_fill(missing, -math.inf)
    correct = (among.argmax(1) == gold).tolist()
    first = (logits.argmax(1) == gold_token.squeeze(1)).tolist()
    gold_ce = (-logits.log_softmax(1).gather(1, gold_token).squeeze(1)).tolist()
    letter_ce = (-among.log_softmax(1).gather(1, gold[:, None]).squeeze(1)).tolist()
    return [
        RowScore(
            row=_name(example),
            choices=counts[i],
            correct=correct[i],
            first_token_correct=first[i],
            gold_ce=gold_ce[i],
            letter_ce=letter_ce[i],
            tokens=len(example.prompt_ids),
            place=places[i] if places else None,
        )
        for i, example in enumerate(batch)
    ]


def _name(example: ChoiceExample) -> str:
    parts = [list(example.prompt_ids), list(example.letter_ids), example.gold]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StreamCurve:
    """Next-token cross-entropy along long texts, by position; curves of several texts add up."""

    bin_tokens: int
    sums: tuple[float, ...]
    """Nats, added up over each bin's tokens."""
    counts: tuple[int, ...]

    def __add__(self, other: StreamCurve) -> StreamCurve:
        if self.bin_tokens != other.bin_tokens:
            raise ValueError(f"bins of {self.bin_tokens} and {other.bin_tokens} tokens do not add")
        size = max(len(self.sums), len(other.sums))
        pairs = [(*c.sums, *[0.0] * (size - len(c.sums))) for c in (self, other)]
        counts = [(*c.counts, *[0] * (size - len(c.counts))) for c in (self, other)]
        return StreamCurve(
            self.bin_tokens,
            tuple(a + b for a, b in zip(*pairs, strict=True)),
            tuple(a + b for a, b in zip(*counts, strict=True)),
        )

    @property
    def nats(self) -> list[float]:
        """Mean CE of each bin, absolute."""
        return [total / count for total, count in zip(self.sums, self.counts, strict=True)]

    @property
    def relative(self) -> list[float]:
        """Each bin's CE over the first bin's, as in FedNL's Fig. 5.

        Every method is divided by its own start, so two such curves do not say which method
        predicts better: read them beside ``nats``.
        """
        nats = self.nats
        return [value / nats[0] for value in nats]


def stream_cross_entropy(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    chunk: int,
    cache: DynamicCache | None = None,
    bin_tokens: int = 1024,
) -> StreamCurve:
    """Read a text once from left to right, ``chunk`` tokens at a time, and score every next token.

    Parameters
    ----------
    ids
        The text, two tokens at least; the first is not predicted.
    chunk
        Tokens a forward pass; it decides memory and speed, not the result.
    cache
        What the model carries over: a fresh ``MemoryCache`` for one with a delta memory, by
        default transformers' own for one without.
    bin_tokens
        Width of a bin (FedNL, Fig. 5: 1K); the last bin may be narrower.
    """
    if len(ids) < 2 or chunk < 1 or bin_tokens < 1:
        raise ValueError(
            f"{len(ids)} tokens, chunk {chunk}, bins of {bin_tokens}: expected at least two"
            " tokens, and one token a chunk and a bin"
        )
    if model.config.model_type == "mamba" and chunk < len(ids) - 1:
        # transformers' Mamba reads several tokens at once from an empty state only
        raise ValueError(f"chunk {chunk}: expected a Mamba to read all {len(ids) - 1} at once")
    device = model.get_output_embeddings().weight.device
    text = torch.tensor([list(ids)], device=device)
    kept = DynamicCache(config=model.config) if cache is None else cache
    was_training = model.training
    model.eval()
    parts = []
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, chunk):
            stretch = text[:, start : min(start + chunk, len(ids) - 1)]
            hidden = model.get_decoder()(
                input_ids=stretch, cache=kept, use_cache=True
            ).last_hidden_state
            logits = model.get_output_embeddings()(hidden)[0]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            target = text[0, start + 1 : start + 1 + len(logits)]
            parts.append(F.cross_entropy(logits, target, reduction="none").double())
    model.train(was_training)
    bins = torch.cat(parts).cpu().split(bin_tokens)
    return StreamCurve(bin_tokens, tuple(float(b.sum()) for b in bins), tuple(map(len, bins)))
