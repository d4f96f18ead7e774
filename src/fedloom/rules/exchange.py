# SPDX-License-Identifier: Apache-2.0
"""What a round's messages hold under each LoRA rule; both ends derive it, neither is told.

The server keeps a global state: LoRA at ``lora.rank``, the other trained arrays, and under some
rules a side adapter.  A client gets and returns a part of it:

============  =====================================  ==========================================
rule          down                                   up
============  =====================================  ==========================================
mean          A, B                                   A, B
svd, flex     A, B, cut to the client's rank         A, B of the client's rank
flora         the side                               A, B of the client's rank
fedex         A, B, the side                         A, B
ffa           B; A is drawn from the seed            B
rolora        A, B                                   B in odd rounds, A in even ones
fedsa         A; B is the client's own               A
============  =====================================  ==========================================

Gates and taps travel both ways under every rule.  The side travels down only, and whole: who was
not asked in a round misses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.config import WITH_SIDE, RunConfig
from fedloom.errors import Refusal
from fedloom.rules.contributions import A, B, module_of
from fedloom.rules.controls import without_controls
from fedloom.rules.low_rank import rolora_side
from fedloom.wire import Arrays, Listing, Manifest

SIDE_A, SIDE_B = ".side_A.weight", ".side_B.weight"
"""A side adapter adds ``side_B @ side_A`` to a projection's frozen weight, with no scale."""


def is_side_array(name: str) -> bool:
    """Whether an array belongs to the side adapter."""
    return name.endswith((SIDE_A, SIDE_B))


def is_memory_array(name: str) -> bool:
    """Whether an array belongs to the memory (gates, taps) rather than to LoRA."""
    return ".memory." in name


def travels(config: RunConfig, name: str) -> bool:
    """Whether a trainable array is ever in a training message; what is not is the node's own."""
    if module_of(name) is None:
        return True
    at_home = {"ffa": A, "fedsa": B}.get(config.server.rule, "")
    return config.share == "all" and not (at_home and name.endswith(at_home))


@dataclass(frozen=True)
class Exchange:
    """The messages of one run.

    Parameters
    ----------
    config
        The recipe.
    manifest
        Of all that travels, at the global rank.
    """

    config: RunConfig
    manifest: Manifest

    def without_controls(self) -> Exchange:
        """Return the messages that score: SCAFFOLD's controls are in none of them."""
        listed = without_controls(self.manifest.arrays)
        return Exchange(self.config, replace(self.manifest, arrays=listed))

    def names_down(self, state: Iterable[str]) -> list[str]:
        """Name the arrays of the global state that go to a client."""
        hidden = self.config.server.rule == "flora"  # LoRA starts anew on every client
        return [
            name
            for name in state
            if is_side_array(name)
            or (name in self.manifest.arrays and not (hidden and module_of(name)))
        ]

    def whole_rank(self, partition: int) -> bool:
        """Whether a client trains the global rank."""
        return self.config.lora.rank_of(partition) == self.config.lora.rank

    def down(self, partition: int, state: Arrays) -> dict[str, NDArray[Any]]:
        """Return what a client gets of the global state: LoRA cut to its rank.

        The global adapter's directions fall in weight, so the first ones are the nearest adapter
        of a smaller rank.  The change of scale is B's alone: rows of A that B does not use yet
        keep the size they started with.
        """
        lora, arrays = self.config.lora, {name: state[name] for name in self.names_down(state)}
        rank = lora.rank_of(partition)
        ratio = lora.alpha / lora.rank / lora.scale_of(partition)
        for name, array in arrays.items():
            if name.endswith(A):
                arrays[name] = array[:rank]
            elif name.endswith(B):
                arrays[name] = (array[:, :rank] * ratio).astype(array.dtype)
        return arrays

    def received(self, partition: int, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Check what came to a client, and widen its LoRA with zeros to the global rank.

        Raises
        ------
        Refusal
            For arrays that the rule does not send, or of another shape or dtype, or not finite.
        """
        listed = self._at_rank(partition)
        expected = {name: listed[name] for name in self.names_down(listed)}
        replace(self.manifest, arrays={**expected, **self._side(arrays)}).check_arrays(arrays)
        return {name: self._widened(name, array) for name, array in arrays.items()}

    def up(self, server_round: int, partition: int, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return what a client sends of its trained arrays, which have the global rank."""
        expected = self.expected(server_round, partition).arrays
        return {name: arrays[name][_leading(shape)] for name, (shape, _) in expected.items()}

    def expected(self, server_round: int, partition: int) -> Manifest:
        """Return what a client's reply is held against."""
        still = self.still(server_round)
        listed = self._at_rank(partition)
        kept = {n: x for n, x in listed.items() if not (still and n.endswith(still))}
        return replace(self.manifest, arrays=kept)

    def still(self, server_round: int) -> str:
        """Return the ending of the factors that a round does not train; empty if it trains all."""
        if self.config.server.rule == "ffa":
            return A
        if self.config.server.rule == "rolora":
            return B if rolora_side(server_round) == "A" else A
        return ""

    def _at_rank(self, partition: int) -> Listing:
        rank = self.config.lora.rank_of(partition)
        listed = {}
        for name, (shape, dtype) in self.manifest.arrays.items():
            if name.endswith(A):
                shape = (rank, shape[1])
            elif name.endswith(B):
                shape = (shape[0], rank)
            listed[name] = (shape, dtype)
        return listed

    def _widened(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        shape = self.manifest.arrays[name][0] if name in self.manifest.arrays else array.shape
        if shape == array.shape:
            return array
        wide = np.zeros(shape, array.dtype)
        wide[_leading(array.shape)] = array
        return wide

    def _side(self, arrays: Arrays) -> Listing:
        """List the side that must be there, given the widths that came; none, or all of it."""
        if self.config.server.rule not in WITH_SIDE or not any(map(is_side_array, arrays)):
            return {}
        listed: Listing = {}
        for module, (out, inner, dtype) in _modules(self.manifest.arrays).items():
            came = arrays.get(module + SIDE_A)
            width = came.shape[0] if came is not None and came.ndim == 2 else 1
            if not 1 <= width <= min(out, inner):
                raise Refusal(
                    f"array {module + SIDE_A}: width {width} came, expected 1 to {min(out, inner)}"
                )
            listed[module + SIDE_A] = ((width, inner), dtype)
            listed[module + SIDE_B] = ((out, width), dtype)
        return listed


def _leading(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


def _modules(listing: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple[int, int, str]]:
    """Return out, in and dtype of each adapted projection."""
    return {
        name[: -len(A)]: (listing[name[: -len(A)] + B][0][0], shape[1], dtype)
        for name, (shape, dtype) in listing.items()
        if name.endswith(A)
    }
