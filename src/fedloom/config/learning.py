# SPDX-License-Identifier: Apache-2.0
"""How clients learn, how they are scored, and how the server makes one adapter of theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedloom.config.checks import at_least, one_of
from fedloom.errors import Refusal

RULES = ("svd", "flex", "flora", "fedex", "ffa", "rolora", "fedsa", "mean")
OF_ANY_RANKS = ("svd", "flex", "flora")
"""Rules under which clients may train adapters of different ranks."""
WITH_SIDE = ("flora", "fedex")
"""Rules that send what the adapter itself cannot hold as a side adapter."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One client's work in one round. Optimiser state is fresh each round and never leaves."""

    optimizer: str = "adamw"
    """``adamw``, or plain ``sgd``: one step of it at ``max-steps = 1`` sends the clipped gradient
    times the rate, and with ``server.optimizer = "adam"`` a run is then Adam over all clients."""
    epochs: int = 1
    max_steps: int = 0
    """Stop a client's round after so many optimiser steps; 0 is whole epochs."""
    batch_size: int = 4
    learning_rate: float = 5e-4
    memory_learning_rate: float = 0.0
    """For gates and taps; 0 uses ``learning-rate``."""
    last_rate: float = 1.0
    """Both rates fall evenly over the rounds, to this share in the last one; 1 keeps them."""
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Clip the gradient's norm over all trainable arrays; 0 does not clip."""
    proximal_mu: float = 0.0
    """FedProx: pull towards the round's start with ``mu / 2 |theta - start|^2``; 0 is FedAvg."""
    truncate_chunks: int = 0
    """Cut back-propagation through the memory every so many chunks; 0 is full BPTT."""
    curriculum: bool = False
    """A client's rows are sorted by length and shared out over the rounds, the short ones first."""
    curriculum_stages: int = 0
    """Share them out over so many stretches of rounds instead: within one, rows come again."""
    keep_trunk: int = 0
    """With ``last-layers``: megabytes for the hidden states below the adapted layers, which are
    frozen; a row's are then computed once. 0 computes them anew each time."""
    checkpoint_layers: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    def __post_init__(self) -> None:
        one_of("train.optimizer", self.optimizer, ("adamw", "sgd"))
        at_least("train.curriculum-stages", self.curriculum_stages, 0)
        at_least("train.epochs", self.epochs, 1)
        at_least("train.max-steps", self.max_steps, 0)
        at_least("train.batch-size", self.batch_size, 1)
        at_least("train.weight-decay", self.weight_decay, 0)
        at_least("train.clip-norm", self.clip_norm, 0)
        at_least("train.proximal-mu", self.proximal_mu, 0)
        at_least("train.keep-trunk", self.keep_trunk, 0)
        at_least("train.truncate-chunks", self.truncate_chunks, 0)
        at_least("train.memory-learning-rate", self.memory_learning_rate, 0)
        if not self.learning_rate > 0:
            raise Refusal(f"train.learning-rate = {self.learning_rate}: expected a positive number")
        if not 0 < self.last_rate <= 1:
            raise Refusal(f"train.last-rate = {self.last_rate}: expected above 0 and at most 1")

    def in_round(self, server_round: int, rounds: int) -> TrainConfig:
        """Return the settings with the rates of one round; a later one has the last round's.

        >>> TrainConfig(learning_rate=1.0, last_rate=0.5).in_round(2, 3).learning_rate
        0.75
        """
        gone = min(server_round - 1, rounds - 1) / max(rounds - 1, 1)
        share = 1 - gone * (1 - self.last_rate)
        return replace(
            self,
            learning_rate=share * self.learning_rate,
            memory_learning_rate=share * self.memory_learning_rate,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and how the test rows are scored. No gradient, no test-time training of parameters."""

    every: int = 1
    """Score the global adapter after every so many rounds; the last round is always scored."""
    batch_size: int = 8
    with_training: bool = False
    """Let the next round's clients score what they are sent before they train from it, in place of
    messages of their own: about half as many messages (docs/messages.md)."""

    def __post_init__(self) -> None:
        at_least("evaluation.every", self.every, 1)
        at_least("evaluation.batch-size", self.batch_size, 1)

    def check_with(self, method: str, local: str, hidden: bool) -> None:
        """Refuse to score along with training where training messages are not those to ride on.

        Parameters
        ----------
        hidden
            Whether ``privacy`` hides what a client sends.
        """
        reasons = {
            f'method = "{method}"': method != "fednl"
            and "no message that asks for work holds what is scored",
            f'local.method = "{local}"': local in ("none", "pooled")
            and "clients that are not asked to train would never be scored",
            "privacy": hidden and "a reply may hold nothing but the change that it hides",
        }
        for key, reason in reasons.items():
            if self.with_training and reason:
                raise Refusal(
                    f"evaluation.with-training = true with {key}: {reason}; leave with-training out"
                )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server makes one adapter of the replies."""

    rule: str = "svd"
    """What becomes of LoRA: ``svd`` takes the adapter of this rank that is nearest to the mean of
    products, ``flex`` (FlexLoRA) is the same for clients of their own ranks, ``flora`` and
    ``fedex`` are exact and send a side adapter along, ``ffa`` freezes A, ``rolora`` trains B and A
    by turns, ``fedsa`` leaves B with its client, ``mean`` averages the factors apart (FedNL eq. 6).
    Gates and taps are averaged under every rule."""
    side_rank: int = 0
    """Cut the side adapter of ``flora`` and ``fedex`` to this rank after each round; 0 is exact."""
    optimizer: str = "none"
    """What takes the server's step: ``none`` goes to the mean, ``adam`` is FedAdam
    (arXiv 2003.00295)."""
    momentum: float = 0.0
    """FedAvgM on the mean of factors: 0 is the plain weighted mean of Algorithm 1. With ``adam``
    it is beta 1."""
    second_momentum: float = 0.99
    """FedAdam's beta 2."""
    adaptivity: float = 1e-3
    """FedAdam's tau, in the denominator: how small a step still counts as one."""
    learning_rate: float = 1.0
    """How far the server goes along its step; 1 without an optimiser is the mean itself."""
    memory_learning_rate: float = 0.0
    """The same for gates and taps; 0 uses ``learning-rate``."""
    warmup: int = 0
    """Both rates grow evenly over so many rounds first."""
    hold: float = 0.0
    """Share of the rounds through which the rates stay before they fall to ``last-rate``."""
    last_rate: float = 1.0
    """The share of them that is left in the last round."""

    def rates(self, server_round: int, rounds: int) -> tuple[float, float]:
        """Return one round's rates, for LoRA and for the memory.

        >>> ServerConfig(rule="mean", learning_rate=0.4, warmup=2, last_rate=0.5).rates(1, 3)
        (0.2, 0.2)
        """
        gone = min(server_round - 1, rounds - 1) / max(rounds - 1, 1)
        fallen = max(0.0, gone - self.hold) / max(1 - self.hold, 1e-9)
        share = min(1.0, server_round / max(self.warmup, 1)) * (1 - fallen * (1 - self.last_rate))
        memory = self.memory_learning_rate or self.learning_rate
        return share * self.learning_rate, share * memory

    def __post_init__(self) -> None:
        one_of("server.rule", self.rule, RULES)
        one_of("server.optimizer", self.optimizer, ("none", "adam"))
        for key, value in (("momentum", self.momentum), ("second-momentum", self.second_momentum)):
            if not 0 <= value < 1:
                raise Refusal(f"server.{key} = {value}: expected at least 0 and below 1")
        for key, value in (("adaptivity", self.adaptivity), ("learning-rate", self.learning_rate)):
            if not value > 0:
                raise Refusal(f"server.{key} = {value}: expected a positive number")
        at_least("server.memory-learning-rate", self.memory_learning_rate, 0)
        at_least("server.warmup", self.warmup, 0)
        if not 0 <= self.hold < 1:
            raise Refusal(f"server.hold = {self.hold}: expected at least 0 and below 1")
        if not 0 < self.last_rate <= 1:
            raise Refusal(f"server.last-rate = {self.last_rate}: expected above 0 and at most 1")
        if self.rule != "mean" and (name := self._stepping()):
            raise Refusal(
                f'{name} with server.rule = "{self.rule}": steps between factors of different'
                ' gauges mean nothing; set server.rule = "mean" or leave the other out'
            )
        at_least("server.side-rank", self.side_rank, 0)
        if self.side_rank and self.rule not in WITH_SIDE:
            raise Refusal(
                f'server.side-rank = {self.side_rank} with server.rule = "{self.rule}": only'
                f" {' and '.join(WITH_SIDE)} have a side adapter"
            )

    def _stepping(self) -> str:
        """Name what makes the server step along the mean instead of going there, if anything."""
        if self.optimizer != "none":
            return f'server.optimizer = "{self.optimizer}"'
        if self.momentum:
            return f"server.momentum = {self.momentum}"
        if self.memory_learning_rate:
            return f"server.memory-learning-rate = {self.memory_learning_rate}"
        if self.warmup or self.last_rate != 1:
            return f"server.warmup = {self.warmup} and server.last-rate = {self.last_rate}"
        return "" if self.learning_rate == 1 else f"server.learning-rate = {self.learning_rate}"
