# SPDX-License-Identifier: Apache-2.0
"""What a client does besides plain local steps: the baselines that change the node's work."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.config.checks import at_least, one_of
from fedloom.errors import Refusal

LOCAL_METHODS = (
    "plain", "none", "pooled", "fine-tune", "scaffold", "ditto", "fedala", "fedssi",
)  # fmt: skip
BY_COORDINATE = ("scaffold", "ditto", "fedala", "fedssi")
"""Methods that carry numbers about single coordinates of the factors from round to round."""


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """How a client's work differs from plain local steps, and what it keeps between rounds."""

    method: str = "plain"
    """``plain`` (FedAvg), ``none`` (no training), ``pooled`` (one client trains on all clients'
    rows), ``fine-tune`` (local steps before the last score), ``scaffold`` (arXiv 1910.06378),
    ``ditto`` (2012.04221), ``fedala`` (2212.01197) or ``fedssi`` (2412.13779)."""
    fine_tune_steps: int = 0
    """``fine-tune``: optimiser steps from the last global adapter; 0 is one round's work."""
    ditto_pull: float = 0.1
    """``ditto``: lambda of ``lambda / 2 |v - theta|^2`` for the personal adapter."""
    ala_share: float = 0.8
    """``fedala``: share of the client's rows that the mixing weights are learnt on."""
    ala_layers: int = 1
    """``fedala``: so many layers next to the output are mixed, the rest is taken from the server;
    0 mixes all."""
    ala_rate: float = 1.0
    """``fedala``: step size of the mixing weights."""
    ala_passes: int = 100
    """``fedala``: give up waiting for convergence after so many passes, the first time."""
    ssi_weight: float = 1.0
    """``fedssi``: alpha of the penalty ``alpha sum Omega (theta - start)^2``."""
    ssi_lambda: float = 0.5
    """``fedssi``: how personal the surrogate is: 1 is free of the global adapter, near 0 is glued
    to it."""

    def __post_init__(self) -> None:
        one_of("local.method", self.method, LOCAL_METHODS)
        at_least("local.fine-tune-steps", self.fine_tune_steps, 0)
        at_least("local.ditto-pull", self.ditto_pull, 0)
        at_least("local.ala-layers", self.ala_layers, 0)
        at_least("local.ala-passes", self.ala_passes, 1)
        at_least("local.ssi-weight", self.ssi_weight, 0)
        for key, share in (("ala-share", self.ala_share), ("ssi-lambda", self.ssi_lambda)):
            if not 0 < share <= 1:
                raise Refusal(f"local.{key} = {share}: expected above 0 and at most 1")
        if not self.ala_rate > 0:
            raise Refusal(f"local.ala-rate = {self.ala_rate}: expected a positive number")

    def check_with(self, share: str, rule: str) -> None:
        """Refuse to combine a method with a way of sharing or averaging that empties it."""
        if self.method not in ("plain", "none") and share != "all":
            raise Refusal(
                f'local.method = "{self.method}" with share = "{share}": it needs the whole'
                ' adapter on both ends; set share = "all"'
            )
        if self.method == "fine-tune" and rule in ("flora", "fedex"):
            raise Refusal(
                f'local.method = "fine-tune" with server.rule = "{rule}": what a client would keep'
                ' is nothing without the side adapter of its round; set server.rule = "mean"'
            )
        if self.method in BY_COORDINATE and rule != "mean":
            raise Refusal(
                f'local.method = "{self.method}" with server.rule = "{rule}": what a client keeps'
                " belongs to the factors' coordinates, which that rule changes each round; set"
                ' server.rule = "mean"'
            )
