# SPDX-License-Identifier: Apache-2.0
"""FAAST's part of a recipe: which keys are summed, and how the sums are solved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedloom.config.checks import at_least, check_masks, one_of
from fedloom.errors import Refusal

_MOST_BITS = 52
"""As many as a float64 has after the point of a number near one."""


@dataclass(frozen=True, kw_only=True)
class FaastConfig:
    """How fast weights are made of frozen keys (``method = "faast"``; docs/faast.md)."""

    encoder: str = "packaged:minilm"
    """Frozen encoder that makes an item's key in one forward pass: ``packaged:minilm`` (sentences),
    ``pixels`` or ``pixels:WIDTH`` (an image is its own key)."""
    encoders: str = ""
    """Encoders by partition, comma-separated, from the start again if there are more nodes than
    encoders; a node's own (``encoder`` in its ``node.toml``) goes before it. Nodes with the same
    form a group that is solved by itself (docs/faast.md). Empty: all have ``encoder``."""
    alphas: str = "0.4,0.6,0.8,1.0"
    """Spectral filter: singular values above ``N ** -alpha`` of the largest are kept. Of more than
    one the best on validation rows is taken, all from one factorisation."""
    ridge: float = 0.0
    """Solve ``(K'K + ridge I) W = K'V`` in the kept directions. After noise, 0 takes the largest
    eigenvalue that the noise may make, and no ``alphas`` are looked at."""
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
    """A client refuses to send sums over fewer rows: those of one row are its key. The server drops
    them by name."""
    max_count: int = 0
    """The server drops sums over more rows, by name: a sum weighs by its rows, whose number is the
    client's word. 0 leaves it at ``data.max-train``, beyond which no client of the recipe takes
    rows."""
    shares: str = "sums"
    """How sums travel: ``sums``, as they are, and the server sees each client's; ``masked``, and it
    learns nothing but their sum; ``private``, with noise that each client adds; ``masked-private``,
    with masks and noise that together the clients add (docs/security.md)."""
    threshold: float = 0.667
    """Masks: more than so large a share of the clients that were asked must stay to the end, or the
    run fails. Above 0.5."""
    bits: int = 40
    """Masks: bits after the point of the whole numbers that are added; sums must stay below
    ``2 ** (63 - bits)``."""
    epsilon: float = 0.0
    """Noise: the guarantee of one release of a client's sums, with ``delta``; 0 is none and goes
    with shares that have no noise."""
    delta: float = 1e-5
    """Noise: how likely the guarantee may fail; below one in the number of rows."""
    protects: str = "row"
    """Noise hides one ``row`` more or less, or a whole ``client`` and all its rows."""
    client_bound: float = 0.0
    """``protects = "client"``: a client's sums are shrunk to this joint norm of K'K and K'V; of n
    rows it is at most ``1.42 n``."""
    keep_sums: bool = False
    """The server keeps each client's sums, so that a client can be replaced or forgotten without
    sending them again."""
    exact_bits: int = 0
    """Clients round their sums to so many bits after the point, and the server's total is whole
    numbers of such steps: what is left when a client is forgotten is, to the last bit, what a run
    without it has, weights too. 40 is a good number; 0 leaves sums as float64 has them."""
    pause_seconds: float = 0.0
    """Wait so long before a later round's roll call; 0 holds rounds one upon another. Who came in
    the meantime, or has a later revision, is asked for sums (docs/faast.md)."""

    def __post_init__(self) -> None:
        one_of("faast.values", self.values, ("one-hot", "labels"))
        one_of("faast.shares", self.shares, ("sums", "masked", "private", "masked-private"))
        self._check_shares()
        if not all(self.listed):
            raise Refusal(
                f'faast.encoders = "{self.encoders}": expected encoders with commas between, such'
                ' as "packaged:minilm, lm:embedded:smollm2-135m"'
            )
        at_least("faast.ridge", self.ridge, 0)
        at_least("faast.min-count", self.min_count, 1)
        at_least("faast.pause-seconds", self.pause_seconds, 0)
        if self.max_count:
            at_least("faast.max-count", self.max_count, self.min_count)
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

    def _check_shares(self) -> None:
        """Refuse a promise that the mode cannot keep, and a key that it would not look at."""
        mode = f'faast.shares = "{self.shares}"'
        one_of("faast.protects", self.protects, ("row", "client"))
        check_masks("faast", self.threshold, self.bits)
        if self.keep_sums and self.masked:
            raise Refusal(
                f"faast.keep-sums = true with {mode}: no one but a client has its sums, so none can"
                " be kept, replaced or forgotten; the leaver would have to send its own again, bare"
            )
        if self.keep_sums and self.private:
            raise Refusal(
                f"faast.keep-sums = true with {mode}: a replaced client would release the same rows"
                " again, with more noise to pay for; set it to false"
            )
        if not 0 <= self.exact_bits <= _MOST_BITS:
            raise Refusal(
                f"faast.exact-bits = {self.exact_bits}: expected 1 to {_MOST_BITS} bits after the"
                " point, or 0 for float64 as it is"
            )
        if self.exact_bits and self.shares != "sums":
            raise Refusal(
                f"faast.exact-bits = {self.exact_bits} with {mode}: nobody can be taken out of its"
                ' total, exactly or not; set it to 0, or faast.shares = "sums"'
            )
        self._check_noise(mode)

    def _check_noise(self, mode: str) -> None:
        if not self.private and (self.epsilon != 0 or self.protects != "row"):
            raise Refusal(
                f'faast.epsilon = {self.epsilon}, faast.protects = "{self.protects}" with {mode}:'
                ' that adds no noise; set faast.shares = "private" or "masked-private"'
            )
        if self.private and not (0 < self.epsilon < math.inf and 0 < self.delta < 1):
            raise Refusal(
                f"faast.epsilon = {self.epsilon}, faast.delta = {self.delta} with {mode}: expected"
                " an epsilon above 0 and a delta between 0 and 1, such as 1 and 1e-5"
            )
        whole = self.protects == "client"
        if whole != (self.client_bound != 0) or not 0 <= self.client_bound < math.inf:
            raise Refusal(
                f'faast.client-bound = {self.client_bound} with faast.protects = "{self.protects}":'
                " expected a bound above 0 for clients and none for rows"
            )
        if self.private and len(self.prior_list) > 1:
            raise Refusal(
                f'faast.priors = "{self.priors}" with {mode}: the best is chosen by exact scores of'
                " training rows, which no noise covers; set one prior"
            )

    def check_room(self, rows: float, who: str) -> None:
        """Refuse so many rows that exact sums over them could leave 64 bits.

        Keys and values have length one at most, so no number of a sum is above its rows.

        Raises
        ------
        Refusal
            Naming how many bits there is room for.

        >>> FaastConfig(exact_bits=40).check_room(2**23 - 1, "a run")
        """
        most = 2.0 ** (63 - self.exact_bits)
        if self.exact_bits and rows >= most:
            fits = 63 - int(rows).bit_length()
            raise Refusal(
                f"faast.exact-bits = {self.exact_bits}: {who} may sum {rows:.0f} rows, a number of"
                f" a sum may be as large, and whole numbers of 64 bits hold less than {most:.0f};"
                f" set it to {fits} or lower, or lower data.max-train or faast.max-count"
            )

    @property
    def mixed(self) -> bool:
        """Whether nodes may have different encoders, and form groups."""
        return bool(self.encoders)

    @property
    def listed(self) -> tuple[str, ...]:
        """Encoders in order."""
        return tuple(part.strip() for part in (self.encoders or self.encoder).split(","))

    def encoder_of(self, partition: int) -> str:
        """Return the encoder of a partition that names none of its own.

        >>> [FaastConfig(encoders="pixels, relu:9:pixels").encoder_of(p) for p in range(3)]
        ['pixels', 'relu:9:pixels', 'pixels']
        """
        return self.listed[partition % len(self.listed)]

    @property
    def masked(self) -> bool:
        """Whether the server learns a sum of all clients and no client's own."""
        return self.shares.startswith("masked")

    @property
    def private(self) -> bool:
        """Whether clients add noise."""
        return self.shares.endswith("private")

    @property
    def filters(self) -> tuple[float | None, ...]:
        """What to solve with: each alpha or, after noise, a ridge that no alpha belongs to."""
        return (None,) if self.private else self.alpha_list

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
        return len(self.filters) * len(self.prior_list) > 1

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
