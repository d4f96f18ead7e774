# SPDX-License-Identifier: Apache-2.0
"""What the server lets in, and what a run may put on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.config.checks import at_least, one_of
from fedloom.errors import Refusal
from fedloom.rounding import CODES

AVERAGED = ("mean", "ffa", "rolora", "fedsa")
"""Rules that average arrays as they are, so that what rounding left over has its place later."""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """How far one client may move the adapter in a round; who moves it further is dropped."""

    norm: float = 0.0
    """Largest Euclidean norm of a client's change; 0 sets no bound."""
    norm_factor: float = 5.0
    """How many times the median norm of the others' changes a client's may be; 0 sets no bound.
    Who takes more steps than the median, by the roll call, may go so many times further."""

    def __post_init__(self) -> None:
        at_least("gate.norm", self.norm, 0)
        if self.norm_factor and not self.norm_factor > 1:
            raise Refusal(
                f"gate.norm-factor = {self.norm_factor}: expected above 1, or 0 for no bound"
            )


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """How updates are written, and how many bytes a run may send."""

    dtype: str = "float32"
    """What clients' updates are written in: ``float32``, or ``bfloat16``, ``int8``, ``int4`` of how
    far each number moved. What rounding leaves over is kept by the client and added to its next
    update. Needs a rule that averages; what goes down stays float32."""
    budget_bytes: int = 0
    """Stop before a round that could take the run's messages, both ways, over so many bytes; 0 sets
    no bound."""

    def __post_init__(self) -> None:
        one_of("wire.dtype", self.dtype, CODES)
        at_least("wire.budget-bytes", self.budget_bytes, 0)

    def check_with(self, method: str, share: str, rule: str) -> None:
        """Refuse rounding where what it leaves over could not be made up for."""
        if method == "faast" and self.dtype != "float32":
            raise Refusal(
                f'wire.dtype = "{self.dtype}" with method = "faast": sums must be exact, or the'
                " weights would depend on how rows are split; leave wire.dtype out"
            )
        if method == "faast" and self.budget_bytes:
            raise Refusal(
                f'wire.budget-bytes = {self.budget_bytes} with method = "faast": each client sends'
                " its sums once and there is no round to stop before; leave it out"
            )
        if self.dtype != "float32" and share == "all" and rule not in AVERAGED:
            raise Refusal(
                f'wire.dtype = "{self.dtype}" with server.rule = "{rule}": this rule turns factors'
                " between rounds, and what rounding left over would be added in another place;"
                f" take one of {', '.join(AVERAGED)} or leave wire.dtype out"
            )
