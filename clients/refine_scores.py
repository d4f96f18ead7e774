# SPDX-License-Identifier: Apache-2.0
"""Sums of a node's scores among others and alone: what FedRefine's evaluation sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedloom import border
from fedloom.data.prompts import encode_question
from fedloom.data.questions import Question
from fedloom.evaluation import ChoiceScores, score_logits
from fedloom.flat import kebab
from fedloom.models.base import Base
from fedloom.refining import Answer, Receipt

_WORDS = ("rephrased", "retries", "standalone")


def metrics_of(base: Base, told: Mapping[str, Sequence[tuple[Question, Answer]]]) -> dict[str, Any]:
    """Add up scores; ``gained`` and ``spoilt`` count rows that changed against ``alone``."""
    tokenizer, scored = base.tokenizer, {}
    for name, pairs in told.items():
        encoded = [encode_question(question, tokenizer) for question, _ in pairs]
        scored[name] = score_logits(torch.stack([a.logits for _, a in pairs]), encoded)
    metrics: dict[str, Any] = {}
    for name, rows in scored.items():
        sums = {kebab(k): v for k, v in vars(ChoiceScores.of(rows)).items() if k != "seconds"}
        sums[border.WEIGHT] = sums.pop("examples")
        if name != "alone":
            changed = list(zip(rows, scored["alone"], strict=True))
            sums["gained"] = sum(mine.correct > other.correct for mine, other in changed)
            sums["spoilt"] = sum(mine.correct < other.correct for mine, other in changed)
            sums |= _receipt_sums([answer.receipt for _, answer in told[name]])
        metrics |= {f"{name}-{k}" if name else k: v for k, v in sums.items()}
    return metrics


def _receipt_sums(receipts: Sequence[Receipt]) -> dict[str, int | float]:
    sources = [source for receipt in receipts for source in receipt.sources]
    words = [receipt.rephrasing for receipt in receipts if receipt.rephrasing is not None]
    told: dict[str, int | float] = {}
    if words:
        told = {f"rephrase-{key}": sum(each[key] for each in words) for key in _WORDS}
    lost = [source.cause for source in sources if source.status == "fallback"]
    return {
        "used": sum(source.status == "used" for source in sources),
        "lost": len(lost),
        "lost-deadline": lost.count("deadline"),
        "lost-integrity": lost.count("integrity"),
        "fallbacks": sum(bool(receipt.fallback) for receipt in receipts),
        "cache-bytes": sum(receipt.bytes for receipt in receipts),
        "cache-tokens": sum(source.tokens for source in sources),
        "seconds-prefill": sum(receipt.seconds["prefill"] for receipt in receipts),
        **told,
    }
