# SPDX-License-Identifier: Apache-2.0
"""What a client does with its rows: which it learns from in a round, their loss, and their scores.

Two tasks so far.  A question with choices is answered by one letter.  A needle is answered by a
value that stands far back in the context: a row teaches all that can be asked of its context, and
at the test the likeliest of the four values counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fedloom import seeds
from fedloom.adapters.memory import MemoryCache
from fedloom.config import RunConfig
from fedloom.data.niah import NeedleExample, encode_lesson, encode_retelling
from fedloom.data.niah.encode import EncodedLesson, EncodedNeedle
from fedloom.data.partition import client_rows
from fedloom.data.prompts import Encoded
from fedloom.data.questions import Question
from fedloom.evaluation import ChoiceScores, Place, RowScore, depth_sums, score_rows
from fedloom.flat import kebab
from fedloom.holdings import encode, holdings
from fedloom.models.answers import Prompts, answer_loss
from fedloom.models.base import Base
from fedloom.models.spans import Labelled, candidate_scores, span_loss
from fedloom.models.trunk import Trunk
from fedloom.rules.workload import lessons_of

Lesson = Encoded | Labelled


class Task:
    """One client's rows, encoded for one model.

    Parameters
    ----------
    partition : int
        Whose rows.
    encoded : dict, optional
        Rows as tokens, kept from one round to the next: a round learns from few of many.
    """

    def __init__(
        self,
        config: RunConfig,
        base: Base,
        partition: int,
        encoded: dict[NeedleExample | Question, Lesson] | None = None,
    ) -> None:
        self.config, self.base = config, base
        self._encoded = {} if encoded is None else encoded
        examples, made = holdings(config)
        rows = cast("Sequence[Question | NeedleExample]", examples)  # no recipe of ours has others
        self._train, self._test = client_rows(made, rows, partition)

    def lessons(self, server_round: int) -> list[Lesson]:
        """Return what is learnt from in a round: all training rows, or the curriculum's share."""
        rows = [self._lesson(example) for example in self._train]
        train, rounds = self.config.train, self.config.rounds
        if train.curriculum and server_round <= rounds:
            rows.sort(key=length)
        first, end = lessons_of(len(rows), train, rounds, server_round)
        return rows[first:end]

    def _lesson(self, example: NeedleExample | Question) -> Lesson:
        if example not in self._encoded:
            self._encoded[example] = self._encode(example)
        return self._encoded[example]

    def _encode(self, example: NeedleExample | Question) -> Lesson:
        if isinstance(example, NeedleExample):
            told = self._told(example)
            more = self.config.niah.telling_weight
            weights = [more if at in told.telling else 1.0 for at in told.labels]
            return Labelled(told.ids, told.labels, tuple(weights) if more != 1 else ())
        return encode(example, self.base.tokenizer, self.config.data.max_tokens)

    def _told(self, example: NeedleExample) -> EncodedLesson:
        niah, tokenizer = self.config.niah, self.base.tokenizer
        if niah.lessons == "sentences":
            random = seeds.generator(self.config.seed, example.row(), "retelling")
            order = random.permutation(len(example.asks)).tolist()
            asks = niah.primer_questions or example.index >= 0
            return encode_retelling(example, tokenizer, order, question=asks)
        listed = niah.listed and example.index >= 0 and example.index % 2 == 0
        return encode_lesson(example, tokenizer, options=listed)

    def loss(self, batch: Sequence[Lesson], trunk: Trunk | None = None) -> tuple[Tensor, int]:
        """Return a batch's mean loss and its tokens."""
        model, tokens = self.base.model, sum(map(length, batch))
        if isinstance(batch[0], Labelled):
            return span_loss(model, cast("Sequence[Labelled]", batch), trunk), tokens
        questions = cast("Sequence[Encoded]", batch)
        prompts = Prompts.of([row.prompt_ids for row in questions], model.device)
        answers = torch.tensor([row.letter_ids[row.gold] for row in questions], device=model.device)
        return answer_loss(model, prompts, answers, trunk), tokens

    def score_rows(self, trunk: Trunk | None = None) -> list[RowScore]:
        """Score every test row; for this process only, as an outcome tells about its row."""
        limit, tokenizer = self.config.data.max_tokens, self.base.tokenizer
        rows = [encode(example, tokenizer, limit) for example in self._test]
        if self._test and isinstance(self._test[0], NeedleExample):
            needles = cast("list[NeedleExample]", self._test)
            pairs = zip(cast("list[EncodedNeedle]", rows), needles, strict=True)
            listed = self.config.niah.listed
            return [score_needle(self.base.model, row, place_of(x), listed) for row, x in pairs]
        size = self.config.evaluation.batch_size
        return score_rows(self.base.model, rows, batch_size=size, trunk=trunk)

    def score(self, trunk: Trunk | None = None) -> dict[str, int | float]:
        """Return the test rows' sums as metrics, by depth too where that is known."""
        started = time.perf_counter()
        rows = self.score_rows(trunk)
        sums = vars(ChoiceScores.of(rows, seconds=time.perf_counter() - started))
        return {kebab(key): value for key, value in sums.items()} | depth_sums(rows)


def length(row: Lesson) -> int:
    """Count a row's tokens."""
    return len(row.ids if isinstance(row, Labelled) else row.prompt_ids)


def place_of(example: NeedleExample) -> Place:
    """Say how long the prompt was made, and how far back its answer and the last value stand."""
    return Place(depth=example.budget, distance=example.distance, nearest=example.nearest)


def score_needle(
    model: PreTrainedModel, row: EncodedNeedle, place: Place, listed: bool = True
) -> RowScore:
    """Ask for the likeliest of the four options, each a value of the haystack.

    ``listed`` says whether the prompt lists them.

    ``first_token_correct`` says whether the likeliest token of all begins the right value.
    """
    with torch.inference_mode():
        cache: DynamicCache = MemoryCache(model.config)
        asked = row.prompt_ids if listed else row.open_ids
        scores, top = candidate_scores(model, (*asked, *row.stem_ids), row.answer_ids, cache)
    among = scores.log_softmax(0)
    return RowScore(
        row=row.name(),
        choices=len(scores),
        correct=int(scores.argmax()) == row.gold,
        first_token_correct=top == row.answer_ids[row.gold][0],
        gold_ce=-float(scores[row.gold]) / len(row.answer_ids[row.gold]),
        letter_ce=-float(among[row.gold]),
        tokens=len(asked),
        place=place,
    )
