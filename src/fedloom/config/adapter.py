# SPDX-License-Identifier: Apache-2.0
"""What is hung on the frozen model: LoRA and the memory."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.config.checks import at_least, one_of
from fedloom.errors import Refusal

ATTENTION_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
MAMBA_TARGETS = ("in", "x", "out")
"""Not ``dt``: Mamba multiplies by that weight without calling its module, past any LoRA."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, hung by peft."""

    rank: int = 8
    ranks: str = ""
    """Each client's own rank, by partition: ``"8,4,2,4,8"``; empty is ``rank`` for all. None above
    ``rank``, which the global adapter keeps; the scale of a client is alpha over its own."""
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str = "q,k,v"
    """Comma-separated projections, or ``all-linear`` (FedNL's 11.3 M baseline): ``q``, ``k``,
    ``v``, ``o``, ``gate``, ``up``, ``down`` of a Transformer; ``in``, ``x``, ``out`` of Mamba."""
    frozen: bool = False
    """Leave LoRA at its start, where it does nothing: the gates alone are trained (ablation)."""

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 1)
        self._check_targets()
        if not 0 <= self.dropout < 1:
            raise Refusal(f"lora.dropout = {self.dropout}: expected at least 0 and below 1")
        if not self.alpha > 0:
            raise Refusal(f"lora.alpha = {self.alpha}: expected a positive number")
        if not all(1 <= rank <= self.rank for rank in self.own_ranks()):
            raise Refusal(
                f'lora.ranks = "{self.ranks}": expected ranks from 1 to lora.rank, {self.rank} here'
            )

    def own_ranks(self) -> list[int]:
        """Return the ranks by partition; empty if all have one."""
        try:
            return [int(word) for word in self.ranks.split(",")] if self.ranks.strip() else []
        except ValueError:
            raise Refusal(
                f'lora.ranks = "{self.ranks}": expected whole numbers by partition, for example'
                ' "8,4,2,4,8"'
            ) from None

    def rank_of(self, partition: int) -> int:
        """Return the rank that a client trains."""
        own = self.own_ranks()
        if own and partition >= len(own):
            raise Refusal(f'lora.ranks = "{self.ranks}": no rank for partition {partition}')
        return own[partition] if own else self.rank

    def scale_of(self, partition: int) -> float:
        """Return ``s_k``: what a client multiplies ``B_k A_k`` by."""
        return self.alpha / self.rank_of(partition)

    def _check_targets(self) -> None:
        if self.targets == "all-linear":
            return
        names = [name.strip() for name in self.targets.split(",")]
        for name in names:
            one_of("lora.targets", name, ATTENTION_TARGETS + MAMBA_TARGETS)
        if len({name in MAMBA_TARGETS for name in names}) == 2:
            raise Refusal(
                f'lora.targets = "{self.targets}": expected names of one family,'
                f" {', '.join(ATTENTION_TARGETS)} or (Mamba) {', '.join(MAMBA_TARGETS)}"
            )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The delta-rule memory beside attention and the gate that mixes it in (FedNL section 2.2)."""

    enabled: bool = True
    rule: str = "explicit"
    """``explicit`` eq. (3)/(9), ``proximal`` exact minimiser of eq. (2), ``hebbian`` ablation,
    ``none`` never writes (S = 0, ablation)."""
    reset_every: int = 0
    """Forget S after so many tokens of a sequence (ablation); 0 never does within one."""
    read_before_write: bool = False
    """False reads ``S_t q_t`` (Algorithm 1, appendix B); True reads ``S_{t-1} q_t`` (eq. 5)."""
    feature_map: str = "silu-l2"
    """Map of raw queries and keys, before any rotary embedding; ``l2`` leaves SiLU out."""
    centre: str = "off"
    """Take off what raw queries and keys have in common, so that different tokens get different
    keys: ``off`` is the paper, ``learnt`` starts at the frozen model's means over a short text."""
    scale_values: bool = True
    """Multiply values by ``d**-0.5`` as TPTT does."""
    beta: str = "token"
    """Step size: ``token`` is sigmoid of the pooled raw key, ``fixed`` is 0.5 everywhere."""
    beta_trainable: bool = False
    """Train the pool's three taps and bias. Frozen taps give FedNL's 32,768 parameters."""
    negative_eigenvalues: bool = False
    """Double the step size to (0, 2), as in arXiv 2411.12537."""
    key_taps: str = "off"
    """Write under a mix of this token's raw key and the last one's, so that a value is bound to
    what stood before it: ``off`` is the paper, ``fixed`` is 0.3 and 0.7, ``learnt`` starts there
    and trains them, two numbers a KV head."""
    tap_width: int = 2
    """Tokens that a tapped key is a mix of: its own and those before it, which share the 0.7. From
    3 on a query is a mix too, of one token fewer, so that a name finds its value across the words
    between them (short convolutions of 4 are DeltaNet's habit)."""
    tap_start: str = "even"
    """Where wide taps start: ``even`` is the above in every head; ``spread`` gives each KV head a
    run of the tokens before, the first head the nearest, and none of its own: a name may stand one
    word or seven before its value."""
    read_with: str = "queries"
    """``queries`` is the paper; ``keys`` asks with the tapped raw keys in place of the raw queries,
    one token on: the words that stood before a value are then their own match. Needs taps."""
    gate: str = "vector"
    """``vector`` of width D a layer, one ``scalar`` a layer, ``dynamic`` (linear map of the token),
    ``fixed`` (not trained; with ``gate-init`` 0 TPTT's constant 0.5), ``shut`` (alpha = 0) or
    ``open`` (alpha = 1, memory only)."""
    gate_init: float = -3.0
    """Logit at the start: sigmoid(-3) is about 0.05, close to the pretrained function."""
    match_rms: bool = True
    """Rescale the memory's output to the softmax branch's RMS, token by token."""
    window: int = 0
    """Softmax branch sees so many tokens back, in every layer, adapted or not; 0 is full
    attention. A layer that slides a shorter window of its own keeps that."""
    sinks: int = 0
    """With a window, so many first tokens of each sequence stay in sight (arXiv 2309.17453)."""
    chunk: int = 64
    """Tokens a chunk of the exact chunkwise delta rule."""
    kernel: str = "auto"
    """``torch`` is exact on any device. ``auto`` takes flash-linear-attention's kernel for a
    half-precision model on an NVIDIA GPU that has it (about 1e-2 from exact; up to 64 tokens at
    once still go by torch), ``fla`` refuses to run without it."""

    def __post_init__(self) -> None:
        one_of("memory.rule", self.rule, ("explicit", "proximal", "hebbian", "none"))
        one_of("memory.feature-map", self.feature_map, ("silu-l2", "l2"))
        one_of("memory.centre", self.centre, ("off", "learnt"))
        one_of("memory.beta", self.beta, ("token", "fixed"))
        one_of("memory.gate", self.gate, ("vector", "scalar", "dynamic", "fixed", "shut", "open"))
        self._check_taps()
        at_least("memory.reset-every", self.reset_every, 0)
        at_least("memory.window", self.window, 0)
        at_least("memory.sinks", self.sinks, 0)
        if self.sinks and not self.window:
            raise Refusal(f"memory.sinks = {self.sinks} without a window: set memory.window too")
        at_least("memory.chunk", self.chunk, 1)
        one_of("memory.kernel", self.kernel, ("auto", "torch", "fla"))

    def _check_taps(self) -> None:
        one_of("memory.key-taps", self.key_taps, ("off", "fixed", "learnt"))
        at_least("memory.tap-width", self.tap_width, 2)
        one_of("memory.tap-start", self.tap_start, ("even", "spread"))
        one_of("memory.read-with", self.read_with, ("queries", "keys"))
        if self.tap_width > 2 and self.key_taps == "off":
            raise Refusal(
                f'memory.tap-width = {self.tap_width} with memory.key-taps = "off": nothing would'
                ' be mixed; set memory.key-taps = "learnt", or leave the width out'
            )
        if self.tap_start == "spread" and self.tap_width == 2:
            raise Refusal(
                'memory.tap-start = "spread" with memory.tap-width = 2: expected several tokens'
                " to spread; set a larger width, with memory.key-taps"
            )
        if self.read_with == "keys" and self.key_taps == "off":
            raise Refusal(
                'memory.read-with = "keys" with memory.key-taps = "off": each token would find'
                ' itself; set memory.key-taps = "learnt"'
            )
