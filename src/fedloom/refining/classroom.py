# SPDX-License-Identifier: Apache-2.0
"""One pair of models with its lessons: all that a command or a study does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedloom import seeds
from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.refining.closed_form import (
    FuserSums,
    directions,
    fuser_sums,
    solvable,
    solve_fuser,
)
from fedloom.refining.hearing import Shelf
from fedloom.refining.lessons import Encoded, Lesson, digest, encode_lessons
from fedloom.refining.scoring import (
    accuracy,
    gate_report,
    nats,
    score,
    shuffled,
    zeroed,
)
from fedloom.refining.teaching import handed

_LOOKED_AT = 16  # texts whose queries say which errors are seen


@dataclass(frozen=True)
class Classroom:
    """A sender, a receiver, lessons to learn from and lessons held out."""

    sender: Shelf
    receiver: Shelf
    learnt: Sequence[Encoded]
    held: Sequence[Encoded]

    @classmethod
    def of(
        cls,
        sender: Shelf,
        receiver: Shelf,
        learnt: Sequence[Lesson],
        held: Sequence[Lesson],
        *,
        longest: int = 0,
        ends: bool = True,
    ) -> Classroom:
        """Encode lessons for this pair; without ``ends`` there is neither residual nor solution."""
        pair = (sender.party.base.tokenizer, receiver.party.base.tokenizer)
        parts = [encode_lessons(x, *pair, longest=longest, ends=ends) for x in (learnt, held)]
        return cls(sender, receiver, *parts)

    def fresh(self, config: FuserConfig, *, seed: int) -> CacheFuser:
        """Return an untrained fuser."""
        return self._placed(
            CacheFuser(self.sender.party.geometry, self.receiver.party.geometry, config, seed=seed)
        )

    def _placed(self, fuser: CacheFuser) -> CacheFuser:
        """Put a fuser where the receiver is; in 32 bits at least, or small steps would vanish."""
        model = self.receiver.party.base.model
        return fuser.to(model.device, torch.promote_types(model.dtype, torch.float32))

    def sums(self, config: FuserConfig, clients: int = 1, *, seed: int = 0) -> FuserSums:
        """Sum over the lessons to learn from, dealt to clients who add their sums."""
        order = seeds.generator(seed, "dealing").permutation(len(self.learnt)).tolist()
        hands = [[self.learnt[i] for i in order[c::clients]] for c in range(clients)]
        made = [fuser_sums(self.sender, self.receiver, hand, config) for hand in hands if hand]
        total = made[0]
        for each in made[1:]:
            total = total + each
        return total

    def solved(
        self,
        config: FuserConfig,
        *,
        ridge: float,
        weighted: bool = False,
        clients: int = 1,
        seed: int = 0,
    ) -> tuple[CacheFuser, dict[str, float]]:
        """Return a fuser in closed form, and how much of the receiver's caches it explains."""
        config = solvable(config, self.receiver.party.geometry)  # before all the summing
        sums = self.sums(config, clients, seed=seed)
        rows = [lesson.prompt_ids for lesson in self.learnt[:_LOOKED_AT]]
        weights = directions(self.receiver.party, rows) if weighted else None
        pair = (self.sender.party.geometry, self.receiver.party.geometry)
        fuser, told = solve_fuser(sums, *pair, config, ridge=ridge, weights=weights, seed=seed)
        return self._placed(fuser), told | {"tokens": float(sums.tokens)}

    def scores(
        self, fuser: CacheFuser, most: int = 0, *, keep: int = 0, seed: int
    ) -> dict[str, float]:
        """Score a fuser on held-out lessons beside its controls."""
        held = self.held[: most or None]
        given = [handed(self.sender, lesson, keep) for lesson in held]
        alone = score(self.receiver, held, None, config=fuser.config)
        refined = score(self.receiver, held, fuser, given)
        others = score(self.receiver, held, fuser, shuffled(given, seed=seed))
        empty = score(self.receiver, held, fuser, [zeroed(piece) for piece in given])
        told = {"standalone": alone, "refined": refined, "shuffled": others, "zeroed": empty}
        found = {f"{name}_accuracy": accuracy(rows) for name, rows in told.items()}
        found |= {f"{name}_nats": nats(rows) for name, rows in told.items()}
        found |= {"gain": found["refined_accuracy"] - found["standalone_accuracy"]}
        found |= {"tested": float(len(held)), "parameter_share": fuser.parameter_share}
        return found | gate_report(self.receiver, held, fuser, given, refined, seed=seed)

    def facts(self) -> dict[str, str | int]:
        """Describe the lessons for a card."""
        return {
            "rows": len(self.learnt),
            "held_out": len(self.held),
            "digest": digest(self.learnt),
            "held_out_digest": digest(self.held),
        }
