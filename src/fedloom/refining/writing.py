# SPDX-License-Identifier: Apache-2.0
"""What a model itself says: a text that it writes, and the option that it finds likeliest.

Rephrasing, messages in words (T2T) and votes are made of these two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fedloom import seeds
from fedloom.adapters.fused import FusedContext
from fedloom.data.prompts import encode_question
from fedloom.data.questions import Question
from fedloom.errors import Refusal
from fedloom.models.answers import Prompts, answer_logits
from fedloom.models.base import Base
from fedloom.models.tokenizer import ByteTokenizer


@torch.no_grad()
def write(
    base: Base,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Collection[int] = (),
    seconds: float = math.inf,
) -> list[int]:
    """Go on from a prompt and return the new tokens, without the one that stops it.

    Parameters
    ----------
    temperature
        0 takes the likeliest token.
    seed
        Each place has a number of its own, by seed and place.
    seconds
        Stop after so long, with what there is.
    """
    until = time.monotonic() + seconds
    if not prompt:
        raise Refusal("an empty prompt has no next token: give the model at least one")
    context, found = FusedContext(base.model), list[int]()
    row = torch.tensor([list(prompt)], device=base.model.device)
    while len(found) < max_new_tokens and time.monotonic() < until:
        token = _next(context.read(row, keep=1)[0, -1], temperature, seed, len(found))
        if token in stop:
            break
        found.append(token)
        row = torch.tensor([[token]], device=base.model.device)
    return found


@torch.no_grad()
def write_many(
    base: Base, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, stop: Collection[int] = ()
) -> list[list[int]]:
    """Go on from several prompts at once, greedily: what ``write`` makes of each, in less time.

    A step reads all weights once, for one row or for many.  Prompts are padded on the left, which
    moves all of a row's positions alike; a layer that slides a window counts padding as tokens.
    """
    longest = max(map(len, prompts))
    context, found = FusedContext(base.model), [list[int]() for _ in prompts]
    going = set(range(len(prompts))) if max_new_tokens else set[int]()
    device = base.model.device
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    pads = torch.tensor([longest - len(p) for p in prompts], device=device)
    used: Tensor | None = torch.arange(longest, device=device) >= pads[:, None]
    while going:
        tokens = context.read(ids, used, keep=1)[:, -1].argmax(-1)
        for i, token in enumerate(tokens.tolist()):
            if i in going and token not in stop:
                found[i].append(token)
            if token in stop or len(found[i]) == max_new_tokens:
                going.discard(i)
        ids, used = tokens[:, None], None
    return found


def _next(logits: Tensor, temperature: float, seed: int, place: int) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    share = torch.softmax(logits.double() / temperature, dim=0).cumsum(0)
    drawn = seeds.generator(seed, "write", place).random() * float(share[-1])
    return min(int(torch.searchsorted(share, drawn, right=True)), len(share) - 1)


def instructed(base: Base, instruction: str) -> tuple[list[int], tuple[int, ...]]:
    """Return an instruction as this model is used to being given one, and what ends its answer.

    With a chat template it is one turn of the user's; without one, text to be continued.
    """
    tokenizer = cast(Any, base.tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        return base.tokenizer.encode(instruction), _line_ends(base)
    turn = [{"role": "user", "content": instruction}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return base.tokenizer.encode(text, add_special_tokens=False), (base.tokenizer.eos_token_id,)


def _line_ends(base: Base) -> tuple[int, ...]:
    newline = base.tokenizer.encode("\n", add_special_tokens=False)
    return (base.tokenizer.eos_token_id, *newline[-1:])


def decoded(base: Base, ids: Sequence[int]) -> str:
    """Turn a model's answer into text, template tokens left out."""
    if isinstance(base.tokenizer, ByteTokenizer):
        return base.tokenizer.decode(ids).strip()
    text: str = cast(Any, base.tokenizer).decode(list(ids), skip_special_tokens=True)
    return text.strip()


@torch.no_grad()
def letter_scores(base: Base, question: Question) -> list[float]:
    """Return the log-likelihood of each option's letter after ``Answer:``, among the letters.

    The same prompt, tokens and logits as ``fedloom.evaluation`` scores.
    """
    encoded = encode_question(question, base.tokenizer)
    prompts = Prompts.of([encoded.prompt_ids], base.model.device)
    logits = answer_logits(base.model, prompts)[0].double()
    scores: list[float] = logits[list(encoded.letter_ids)].log_softmax(0).tolist()
    return scores


@torch.no_grad()
def continuation_scores(
    base: Base, head: Sequence[int], tails: Sequence[Sequence[int]]
) -> list[float]:
    """Return the log-likelihood of each of some continuations of one prompt, in tokens.

    For options that are no letters; divide by their lengths where these should not count.
    """
    rows = Prompts.of([[*head, *tail] for tail in tails], base.model.device)
    hidden = base.model.get_decoder()(input_ids=rows.ids_BT, use_cache=False).last_hidden_state
    logits = base.model.get_output_embeddings()(hidden[:, len(head) - 1 : -1])
    told = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    found = []
    for row, tail in zip(told, tails, strict=True):
        at = torch.tensor(list(tail), device=row.device)
        found.append(float(row[: len(tail)].gather(1, at[:, None]).sum()))
    return found


def chosen(scores: Sequence[float]) -> int:
    """Return the index of the likeliest option, the first of equals."""
    return max(range(len(scores)), key=lambda i: (scores[i], -i))


def own_choice(base: Base, question: Question) -> int:
    """Return the option that a model takes by itself."""
    return chosen(letter_scores(base, question))
