# SPDX-License-Identifier: Apache-2.0
"""FAAST's part of a recipe: which keys are summed, and how the sums are solved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedloom.config.checks import at_least, one_of
from fedloom.errors import Refusal


@dataclass(frozen=True, kw_only=True)
class FaastConfig:
    """How fast weights are made of frozen keys (``method = "faast"``; docs/faast.md)."""

    encoder: str = "packaged:minilm"
    """Frozen encoder that makes an item's key in one forward pass: ``packaged:minilm`` (sentences),
    ``pixels`` or ``pixels:WIDTH`` (an image is its own key)."""
    alphas: str = "0.4,0.6,0.8,1.0"
    """Spectral filter: singular values above ``N ** -alpha`` of the largest are kept. Of more than
    one the best on validation rows is taken, all from one factorisation."""
    ridge: float = 0.0
    """Solve ``(K'K + ridge I) W = K'V`` in the kept directions."""
    values: str = "one-hot"
    """``one-hot``, or ``labels``: what is read is compared with the encoder's embeddings of the
    classes' names. Clients send class sums in either case."""
    priors: str = "0"
    """N0 of the mix with the zero-shot head, ``N / (N + N0)`` of the memory; 0 is memory alone. Of
    more than one the best on validation rows is taken. Needs ``values = "labels"``."""
    validation_share: float = 0.2
    """Of a client's training rows, the share kept out of the sums to choose ``alphas`` and
    ``priors`` by; none are, where there is nothing to choose."""
    scale: float = 10.0
    """Scores are multiplied by it before the softmax whose cross-entropy is told; no prediction
    depends on it."""
    min_count: int = 8
    """A client refuses to send sums over fewer rows: those of one row are its key."""
    shares: str = "sums"
    """How sums travel: ``sums``, as they are. The server sees each client's."""
    keep_sums: bool = False
    """The server keeps each client's sums, so that a client can be replaced or forgotten without
    sending them again."""

    def __post_init__(self) -> None:
        one_of("faast.values", self.values, ("one-hot", "labels"))
        one_of("faast.shares", self.shares, ("sums",))
        at_least("faast.ridge", self.ridge, 0)
        at_least("faast.min-count", self.min_count, 1)
        for key, text in (("faast.alphas", self.alphas), ("faast.priors", self.priors)):
            found = _numbers(key, text)
            if len(set(found)) < len(found) or not all(0 <= x < math.inf for x in found):
                raise Refusal(f'{key} = "{text}": expected numbers from 0 up, each once')
        if not 0 < self.validation_share < 1:
            raise Refusal(
                f"faast.validation-share = {self.validation_share}: expected a share between 0 and"
                " 1; one alpha and one prior keep no rows out"
            )
        if not 0 < self.scale < math.inf:
            raise Refusal(f"faast.scale = {self.scale}: expected a positive number")
        if self.values == "one-hot" and self.prior_list != (0.0,):
            raise Refusal(
                f'faast.priors = "{self.priors}" with faast.values = "one-hot": the zero-shot head'
                ' reads label embeddings; set faast.values = "labels" or leave priors out'
            )

    @property
    def alpha_list(self) -> tuple[float, ...]:
        """The filters, one by one."""
        return _numbers("faast.alphas", self.alphas)

    @property
    def prior_list(self) -> tuple[float, ...]:
        """The prior counts, one by one."""
        return _numbers("faast.priors", self.priors)

    @property
    def chooses(self) -> bool:
        """Whether there is something to choose on validation rows."""
        return len(self.alpha_list) * len(self.prior_list) > 1

    def held_out(self, rows: int) -> int:
        """Count the validation rows among so many training rows; one row at least is summed.

        >>> [FaastConfig().held_out(10), FaastConfig().held_out(1)]
        [2, 0]
        >>> FaastConfig(alphas="1").held_out(9)
        0
        """
        if not self.chooses or rows < 2:
            return 0
        return min(rows - 1, max(1, int(rows * self.validation_share + 1e-9)))


def _numbers(key: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise Refusal(f'{key} = "{text}": expected numbers with commas between them') from error
