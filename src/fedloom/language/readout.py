# SPDX-License-Identifier: Apache-2.0
"""Train the middle memories' read-outs, once, on text of no particular kind.

The one training loop does it (``fedloom.training``); what is trained is ``P`` and ``u`` of each
place, and gradients reach ``u`` through the solution, which is linear in the gated values.  The
trunk stays frozen, and what it makes of the support is computed once.
"""

# Shapes: B batch, T token, D width of the residual stream, N pair.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.adapters.fast_sums import batch_pairs
from fedloom.adapters.fast_weights import FastMemory, ReadOut, middle_places
from fedloom.config import TrainConfig
from fedloom.errors import Refusal
from fedloom.language.compiling import LENGTH, windows
from fedloom.models.base import Base
from fedloom.rules.solving import Factorisation
from fedloom.rules.statistics import Gram
from fedloom.training import TrainingReport, train_locally

PAIRS = 4096
"""Of each half's text, as memory while the read-outs are trained."""


@dataclass(frozen=True)
class Lesson:
    """A sequence to predict, and which half of the text it is from."""

    ids: tuple[int, ...]
    half: int


class _Memories:
    """Pairs of one half at one place, with the pseudoinverse of their keys, which never changes."""

    def __init__(self, keys_ND: Tensor, values_ND: Tensor, alpha: float) -> None:
        self._keys, self._values = keys_ND.float(), values_ND.float()
        keys = keys_ND.double().numpy(force=True)
        kept = Factorisation.of(Gram.of(keys, keys[:, :1]))
        # solve's filter, applied to I in place of K'V: the inverse of K'K in the kept directions
        size = kept.solve(alpha=alpha).rank
        basis, sigma = kept.basis[:, :size], kept.sigma[:size]
        inverse = (basis / sigma**2) @ (basis.T @ keys.T)
        self._inverse_DN = torch.from_numpy(inverse.astype(np.float32)).to(keys_ND.device)

    def weights(self, readout: ReadOut) -> Tensor:
        """Return ``K^+ (gated V)`` with the graph that leads to the gate."""
        return self._inverse_DN @ readout.gated(self._keys, self._values)


def train_readouts(
    base: Base,
    texts: Sequence[str],
    config: TrainConfig,
    *,
    memories: int,
    seed: int,
    alpha: float = 1.0,
    length: int = LENGTH,
) -> tuple[dict[int, ReadOut], TrainingReport]:
    """Train the read-outs of evenly spaced middle memories.

    Parameters
    ----------
    texts : sequence of str
        Two documents at least; every second one is the other half's memory.
    memories : int
        How many; their places are the paper's.

    Returns
    -------
    readouts : dict
        Place -> read-out, no longer trainable.
    report : TrainingReport
        What the loop did.
    """
    lessons = [
        Lesson(row, index % 2)
        for index, text in enumerate(texts)
        for row in windows(text, base.tokenizer, length)
    ]
    if {lesson.half for lesson in lessons} != {0, 1}:
        raise Refusal(f"{len(texts)} texts to train read-outs on: expected two documents at least")
    model = base.model
    width = int(model.config.get_text_config().hidden_size)
    places = middle_places(int(model.config.get_text_config().num_hidden_layers), memories)
    readouts = {place: ReadOut(width) for place in places}
    memory = FastMemory(model, {}, readouts=readouts)
    try:
        held = [_held(base, [x for x in lessons if x.half == h], places, alpha) for h in (0, 1)]

        def loss(batch: list[Lesson]) -> tuple[Tensor, int]:
            return _loss(memory, held, batch)

        report = train_locally(memory, lessons, loss, lambda x: len(x.ids), config, seed=seed)
    finally:
        memory.detach()
    for readout in readouts.values():
        readout.requires_grad_(False)
    return readouts, report


def _held(
    base: Base, lessons: Sequence[Lesson], places: Sequence[int], alpha: float
) -> dict[int, _Memories]:
    """Read one half's text up to ``PAIRS`` pairs."""
    parts, count = [], 0
    for lesson in lessons:
        ids = torch.tensor([lesson.ids], device=base.model.device)
        parts.append(batch_pairs(base.model, ids, torch.ones_like(ids), places))
        count += len(lesson.ids) - 1
        if count >= PAIRS:
            break
    joined = {
        p: [torch.cat(x) for x in zip(*(part[p] for part in parts), strict=True)] for p in places
    }
    # Clones: what was made in inference mode may not be part of a graph.
    return {p: _Memories(k.clone(), v.clone(), alpha) for p, (k, v) in joined.items()}


def _loss(
    memory: FastMemory, held: Sequence[dict[int, _Memories]], batch: Sequence[Lesson]
) -> tuple[Tensor, int]:
    """Score each half with the memory of the other.

    The released code first learns a batch and then scores the same batch, so that the memory holds
    its answers and the read-out learns to trust it more than a memory of other text ever deserves.
    """
    total, tokens = [], 0
    for half in sorted({lesson.half for lesson in batch}):
        rows = [lesson.ids for lesson in batch if lesson.half == half]
        for place, readout in memory.readouts.items():
            memory.weights[place] = held[1 - half][place].weights(readout)
        total.append(_summed_nats(memory, rows))
        tokens += sum(len(row) - 1 for row in rows)
    return torch.stack(total).sum() / tokens, tokens


def _summed_nats(memory: FastMemory, rows: Sequence[tuple[int, ...]]) -> Tensor:
    model, longest = memory.model, max(map(len, rows))
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    ids_BT = torch.tensor(padded, device=model.device)
    # Padding stands on the right, where causal attention does not see it; its loss is left out.
    hidden = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    real = torch.tensor([[i + 1 < len(row) for i in range(longest - 1)] for row in rows])
    logits = model.get_output_embeddings()(hidden[:, :-1][real])
    return F.cross_entropy(logits.float(), ids_BT[:, 1:][real], reduction="sum")
