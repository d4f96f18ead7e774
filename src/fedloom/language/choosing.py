# SPDX-License-Identifier: Apache-2.0
"""``validate_r``: which filter and which share of the output memory, by text that is no test.

The right ``r`` depends on how long the residual stream is beside an embedding, which differs
between models by orders of magnitude, and there is a cliff near 1.  The paper's code fixes 0.9 and
sets alpha by hand for each task; here both are chosen, and all alphas come from one factorisation.
``r = 0``, the base itself, is always among the choices.
"""

# Shapes: N token, D width of the residual stream.

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from fedloom.adapters.fast_sums import Passage, residuals
from fedloom.adapters.fast_weights import decoder_of, hung_on, mix
from fedloom.rules.solving import Factorisation
from fedloom.rules.statistics import Gram

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""From a strong filter to hardly any: with ten thousand pairs 0.6 may keep all directions."""
SHARES = (0.3, 0.6, 0.8, 0.9, 0.95, 0.97, 0.99)
MATCHED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares to try where what is read is brought to the length of ``h``."""
_ROWS = 256  # logits at a time: a whole text's would be its tokens times the vocabulary


@dataclass(frozen=True)
class Reading:
    """A text as it is before the final norm, kept so that any output memory can be tried on it."""

    model: PreTrainedModel
    hidden_ND: Tensor
    targets_N: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, passages: Iterable[Passage]) -> Reading:
        """Read each passage once; middle memories that hang on the model are heard.

        Raises
        ------
        ValueError
            If an output memory hangs there already, or there is no token to predict.
        """
        last, memory = len(decoder_of(model).layers), hung_on(model)
        if memory is not None and last in memory.weights:
            raise ValueError("an output memory hangs on the model: detach it to try others")
        hidden, targets = [], []
        for passage in passages:
            ids = torch.tensor([passage.ids], device=model.device)
            start = max(passage.first, 1)
            hidden.append(residuals(model, ids, [last])[last][0, start - 1 : -1])
            targets.append(ids[0, start:])
        if not any(map(len, targets)):
            raise ValueError("no token to predict: expected a passage of two tokens at least")
        return cls(model, torch.cat(hidden), torch.cat(targets))

    @torch.inference_mode()
    def nats(self, weights_DD: Tensor | None, r: float, *, match_scale: bool = False) -> Tensor:
        """Return each next token's cross-entropy ``[N]`` with an output memory; none at r = 0."""
        norm, head = decoder_of(self.model).norm, self.model.get_output_embeddings()
        parts = []
        for hidden, target in zip(
            self.hidden_ND.split(_ROWS), self.targets_N.split(_ROWS), strict=True
        ):
            if r and weights_DD is not None:
                hidden = mix(hidden, weights_DD, r, match_scale=match_scale)
            logits = head(norm(hidden))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            parts.append(F.cross_entropy(logits, target, reduction="none").double())
        return torch.cat(parts)

    @torch.inference_mode()
    def sweep(
        self, memories: Sequence[Tensor], shares: Sequence[float], *, match_scale: bool = False
    ) -> list[list[float]]:
        """Return the mean cross-entropy of each output memory ``[D, D]`` at each share.

        Behind an RMS norm and a head without bias, logits are linear in what is mixed but for a
        factor a token: a product with the head serves all shares, instead of one for each.
        """
        norm, head = decoder_of(self.model).norm, self.model.get_output_embeddings()
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        single = self.hidden_ND.dtype in (torch.float32, torch.float64)
        if eps is None or not single or getattr(head, "bias", None) is not None:
            return [
                [float(self.nats(w, r, match_scale=match_scale).mean()) for r in shares]
                for w in memories
            ]

        def length(x: Tensor) -> Tensor:
            return torch.sqrt(x.square().mean(-1, keepdim=True) + float(eps))

        totals = torch.zeros(len(memories), len(shares), dtype=torch.float64)
        rows = zip(self.hidden_ND.split(_ROWS), self.targets_N.split(_ROWS), strict=True)
        for hidden, target in rows:
            plain = head(norm(hidden)) * length(hidden)
            for i, weights_DD in enumerate(memories):
                guess = mix(hidden, weights_DD, 1.0, match_scale=match_scale)
                read = head(norm(guess)) * length(guess)
                for j, r in enumerate(shares):
                    mixed = torch.lerp(plain, read, r) / length((1 - r) * hidden + r * guess)
                    totals[i, j] += F.cross_entropy(mixed, target, reduction="sum").double().cpu()
        found: list[list[float]] = (totals / len(self.targets_N)).tolist()
        return found


@dataclass(frozen=True)
class Point:
    """How well one setting predicts the validation text."""

    alpha: float
    r: float
    nats: float
    """Mean cross-entropy of a token."""

    @property
    def perplexity(self) -> float:
        """``exp`` of it; infinite rather than an overflow behind the cliff."""
        return math.exp(self.nats) if self.nats < 700 else math.inf


@dataclass(frozen=True)
class Choice:
    """The best setting, and what the others gave."""

    best: Point
    base: Point
    """The model without the memory."""
    curve: tuple[Point, ...]
    """Each alpha with each share, in this order."""

    def at(self, r: float) -> Point:
        """Return the best of the curve with this share, also where the base is better than all.

        Raises
        ------
        ValueError
            If the share was not tried.
        """
        tried = [point for point in self.curve if point.r == r]
        if not tried:
            raise ValueError(f"r = {r} was not tried: expected one of the curve's shares")
        return min(tried, key=_finite)


def validate_r(
    gram: Gram,
    reading: Reading,
    *,
    alphas: Sequence[float] = ALPHAS,
    shares: Sequence[float] = (),
    match_scale: bool = False,
) -> Choice:
    """Try each alpha with each share on validation text, and name the best.

    Parameters
    ----------
    gram : Gram
        Sums of the output memory's place.
    reading : Reading
        Of validation text: neither support, nor what a figure is reported for.
    shares : sequence of float, optional
        ``SHARES`` if left out, or ``MATCHED`` with ``match_scale``.
    """
    tried = shares or (MATCHED if match_scale else SHARES)
    factorised, device = Factorisation.of(gram), reading.hidden_ND.device
    solved = [torch.from_numpy(factorised.solve(alpha=a).weights).float() for a in alphas]
    found = reading.sweep([w.to(device) for w in solved], tried, match_scale=match_scale)
    curve = [
        Point(alpha, r, nats)
        for alpha, row in zip(alphas, found, strict=True)
        for r, nats in zip(tried, row, strict=True)
    ]
    base = Point(alphas[0], 0.0, reading.nats(None, 0.0).mean().item())
    return Choice(min((base, *curve), key=_finite), base, tuple(curve))


def _finite(point: Point) -> float:
    return point.nats if math.isfinite(point.nats) else math.inf
