# SPDX-License-Identifier: Apache-2.0
"""FedRefine: which models meet, by which fusers, and on what terms they hear each other."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fedloom.config.checks import at_least, one_of
from fedloom.errors import Refusal

MODELS = "embedded:smollm2-135m,embedded:gemma3-270m,embedded:qwen2.5-coder-0.5b"


@dataclass(frozen=True, kw_only=True)
class RefineConfig:
    """Nodes with models of their own that answer with the help of each other's caches."""

    models: str = MODELS
    """By partition, comma-separated, from the start again if there are more nodes than models; a
    node's own ``--node-config "model='path:DIR'"`` goes before it."""
    fusers: str = "fusers"
    """Folder on the server that holds fusers as ``fedloom fuser train`` writes them. Nodes fetch
    those of their own model once and keep them by hash."""
    dtype: str = "bf16"
    """How a cache travels: bf16, int8 or int4."""
    keep: float = 1.0
    """Share of a sender's tokens that travels, the last ones."""
    keep_bytes: float = 0.0
    """Part of the plain 16-bit bytes that a cache may take on the wire, hence fewer tokens: with
    int8, 0.25 leaves a little less than half; 0 does not look."""
    select: str = ""
    """File of measured gains on the server, or its JSON: each receiver chooses whom to ask, and
    whether for a cache or for words (docs/fedrefine.md). Empty asks all for caches."""
    task: str = "any"
    """With ``select``: task class of the questions, as the file names it."""
    privacy_level: int = 0
    """With ``select``: level of the questions; only senders trusted that far are asked."""
    max_tokens: int = 1024
    """A longer text is not read, and a longer slice not taken in."""
    deadline_seconds: float = 120.0
    """How long the senders of an exchange are waited for; who is late is a fallback."""
    max_norm: float = 0.0
    """A sender whose cache is larger than so many of its fuser's standard deviations is left out;
    0 lets all in."""
    max_kl: float = 0.0
    """Senders are left out until the next token's distribution is so near to the receiver's own, in
    nats; 0 does not look."""
    vote: bool = False
    """Leave out a sender who alone decides the next token against all others."""
    questions: int = 8
    """Held-out questions that each node asks, at most."""
    question: str = ""
    """One question in place of the held-out ones. Every node of the run can read it; ``fedloom
    refine --on`` sets it."""
    receiver: int = 0
    """With ``question``: the partition that answers."""
    mutual: int = 0
    """With ``question``: exchanges of Co-C2C, after which every node answers among all others'
    caches; 0 lets ``receiver`` alone answer. From the second on, refined caches are exchanged."""
    new_tokens: int = 64
    """With ``question``: length of the answer, at most."""
    reply_key: str = ""
    """With ``question``: X25519 key, in hexadecimal, that the answer is sealed for."""

    solve: bool = False
    """Make the fuser of ``models``, a sender and a receiver, in closed form: clients that hold both
    send sums over their texts, the server adds them and solves once (docs/fusers.md). Nobody asks
    anybody then."""
    solve_ridge: float = 0.01
    """With ``solve``: ridge a token, on features of variance one."""
    solve_share: float = 0.05
    """With ``solve``: share of the receiver's parameters that the fuser may have."""
    solve_least: int = 256
    """With ``solve``: a client whose texts have fewer tokens in common sends nothing, as sums of
    few tokens show them."""
    rephrase: bool = False
    """Each receiver's own model rewords its questions before anybody else sees them; of one that no
    checked rewording is found for, nobody is asked (docs/fedrefine-privacy.md)."""
    rephrase_tries: int = 3
    """With ``rephrase``: attempts a question."""
    attack_frames: int = 0
    """Of the caches that a sender hands to one receiver, as many it also reads back from its own
    frames without their key, as an eavesdropper would; the share of tokens that are named right
    stands beside the pair's accuracy. 0 attacks none; no text is told to anybody."""

    def __post_init__(self) -> None:
        one_of("refine.dtype", self.dtype, ("bf16", "int8", "int4"))
        for name in ("max_tokens", "questions", "new_tokens", "solve_least", "rephrase_tries"):
            at_least(f"refine.{name.replace('_', '-')}", getattr(self, name), 1)
        for name in (
            "max_norm",
            "max_kl",
            "receiver",
            "privacy_level",
            "solve_ridge",
            "mutual",
            "attack_frames",
        ):
            at_least(f"refine.{name.replace('_', '-')}", getattr(self, name), 0)
        if not 0 < self.keep <= 1:
            raise Refusal(f"refine.keep = {self.keep}: expected above 0 and at most 1")
        if not 0 <= self.keep_bytes <= 1:
            raise Refusal(
                f"refine.keep-bytes = {self.keep_bytes}: expected 0 to 1; 0 does not look"
            )
        if not self.task:
            raise Refusal('refine.task = "": expected a task class, or any')
        if not self.deadline_seconds > 0:
            raise Refusal(
                f"refine.deadline-seconds = {self.deadline_seconds}: expected above 0 seconds"
            )
        if not all(self.listed):
            raise Refusal(
                f'refine.models = "{self.models}": expected model sources with commas between, such'
                f' as "{MODELS}"'
            )
        self._check_modes()
        if self.reply_key and not re.fullmatch("[0-9a-f]{64}", self.reply_key):
            raise Refusal(
                "refine.reply-key: expected 64 hexadecimal digits; fedloom refine makes it"
            )

    def _check_modes(self) -> None:
        """Refuse what contradicts solving a fuser, or rephrasing."""
        if not 0 < self.solve_share <= 1:
            raise Refusal(
                f"refine.solve-share = {self.solve_share}: expected above 0 and at most 1"
            )
        if self.rephrase and self.question:
            raise Refusal(
                "refine.rephrase = true with refine.question: every node of the run reads the"
                " question in its recipe; ask with fedloom refine --rephrase on the receiver's own"
                " machine"
            )
        if self.mutual and (self.keep != 1 or self.keep_bytes or self.select):
            raise Refusal(
                f"refine.mutual = {self.mutual} exchanges whole caches among all: leave"
                " refine.keep, refine.keep-bytes and refine.select out"
            )
        if not self.solve:
            return
        if len(self.listed) != 2:
            raise Refusal(
                f"refine.solve = true with {len(self.listed)} refine.models: a fuser belongs to a"
                " sender and a receiver; name the two, in this order"
            )
        if self.question or self.rephrase or self.select:
            raise Refusal(
                "refine.solve = true makes a fuser and asks nobody: leave refine.question,"
                " refine.rephrase and refine.select out"
            )

    @property
    def listed(self) -> tuple[str, ...]:
        """Model sources in order."""
        return tuple(part.strip() for part in self.models.split(","))

    def model_of(self, partition: int) -> str:
        """Return the model source of a partition."""
        return self.listed[partition % len(self.listed)]
