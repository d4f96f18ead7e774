# SPDX-License-Identifier: Apache-2.0
"""What hides clients' updates in FedNL and its baselines: masks, clipping, noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedloom.config.checks import check_masks, one_of
from fedloom.errors import Refusal

LINEAR = ("mean", "ffa", "rolora", "fedsa")
"""Rules that need no more than a weighted sum of what clients send."""
_MASKABLE = ("plain", "fine-tune", "ditto", "fedala", "fedssi")
"""Local methods that send nothing but the adapter's arrays."""


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """What the server may learn of one client's update, for FedNL and its linear baselines."""

    masks: bool = False
    """Secure aggregation: the server learns the sum of the clients' updates and of each client
    words that are uniform."""
    threshold: float = 0.667
    """Masks: more than so large a share of the clients that were asked must stay to the end of a
    round, or the run fails. Above 0.5."""
    bits: int = 40
    """Masks: bits after the point of the whole numbers that are added; sums must stay below
    ``2 ** (63 - bits)``."""
    clip: float = 0.0
    """L2 bound of one client's update in one round, over all its arrays together; 0 does not clip.
    Clipped updates weigh the same, whoever has more rows."""
    noise: float = 0.0
    """Gaussian noise on the sum of clipped updates, in multiples of ``clip``; 0 is none. Added by
    the server or, under masks, by the clients together."""
    epsilon: float = 0.0
    """In place of ``noise``: take the least noise that keeps this guarantee over the whole run,
    with ``delta``; 0 is none."""
    delta: float = 1e-5
    """How likely the guarantee may fail; below one in the number of clients."""
    sampling: str = "public"
    """``public``: clients are drawn by the recipe's seed, which anybody can repeat, and each pays
    for every round that it was asked in. ``secret``: the server draws each with probability
    ``sampling.fraction`` from the system's generator, and the sampled Gaussian is accounted for."""

    def __post_init__(self) -> None:
        check_masks("privacy", self.threshold, self.bits)
        one_of("privacy.sampling", self.sampling, ("public", "secret"))
        for key in ("clip", "noise", "epsilon"):
            if not 0 <= (value := getattr(self, key)) < math.inf:
                raise Refusal(f"privacy.{key} = {value}: expected a finite number from 0 up")
        if not 0 < self.delta < 1:
            raise Refusal(f"privacy.delta = {self.delta}: expected between 0 and 1, such as 1e-5")
        if self.noise and self.epsilon:
            raise Refusal(
                f"privacy.noise = {self.noise} with privacy.epsilon = {self.epsilon}: one follows"
                " from the other; leave one of them out"
            )
        if self.noisy and not self.clip:
            raise Refusal(
                f"privacy.noise = {self.noise}, privacy.epsilon = {self.epsilon} without"
                " privacy.clip: noise hides nothing of an update without a bound; set privacy.clip,"
                " the L2 norm that a round's update usually has"
            )
        if self.sampling == "secret" and (self.masks or not self.noisy):
            raise Refusal(
                'privacy.sampling = "secret" without noise that the server adds: it is no secret to'
                ' a server that masks protect from; set privacy.sampling = "public"'
            )

    @property
    def on(self) -> bool:
        """Whether clients send changes under this section's rules, and not their arrays."""
        return self.masks or self.clip > 0

    @property
    def noisy(self) -> bool:
        """Whether a guarantee is asked for."""
        return self.noise > 0 or self.epsilon > 0

    def check_with(self, share: str, rule: str, method: str, asked: int) -> None:
        """Refuse what is no sum of one update a client, before any model is loaded.

        Parameters
        ----------
        asked
            Clients that a round asks.
        """
        if not self.on:
            return
        told = f"privacy.masks = {str(self.masks).lower()}, privacy.clip = {self.clip}"
        if share == "none":
            raise Refusal(f'{told} with share = "none": nothing is sent that could be hidden')
        if share == "all" and rule not in LINEAR:
            raise Refusal(
                f'{told} with server.rule = "{rule}": that rule needs each client\'s factors and'
                f' not just their sum; set server.rule = "ffa" (or {", ".join(LINEAR)})'
            )
        allowed = ("plain",) if self.clip else _MASKABLE
        if method not in allowed:
            raise Refusal(
                f'{told} with local.method = "{method}": it sends or shows more than one update a'
                f" round; expected one of {', '.join(allowed)}"
            )
        if self.masks and asked < 2:
            raise Refusal(
                f"{told}: a round asks {asked} client, and a sum of one is that client's update;"
                " raise clients.count or sampling.fraction"
            )
