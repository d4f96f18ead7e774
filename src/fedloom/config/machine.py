# SPDX-License-Identifier: Apache-2.0
"""Where a run takes place: which nodes work, and how a simulation lays them on the machine."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.config.checks import at_least
from fedloom.errors import Refusal


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Which nodes work in a round: drawn from (seed, round) over sorted partition ids."""

    fraction: float = 1.0
    min_nodes: int = 1
    """Fewer usable replies than this end the run."""
    min_share: float = 0.0
    """So does a smaller share of usable replies among those asked in a round."""
    rest_after: int = 0
    """A client that fails so many times in a row when asked to train is rested; 0 rests nobody."""
    rest_rounds: int = 1
    """For how many rounds it is not asked; others stand in for it."""
    wait_seconds: float = 120.0
    """How long to wait for nodes before giving up, in seconds."""
    reply_seconds: float = 3600.0
    """How long a round may take, in seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise Refusal(f"sampling.fraction = {self.fraction}: expected above 0 and at most 1")
        at_least("sampling.min-nodes", self.min_nodes, 1)
        if not 0 <= self.min_share <= 1:
            raise Refusal(f"sampling.min-share = {self.min_share}: expected 0 to 1")
        at_least("sampling.rest-after", self.rest_after, 0)
        at_least("sampling.rest-rounds", self.rest_rounds, 1)
        at_least("sampling.wait-seconds", self.wait_seconds, 0)
        at_least("sampling.reply-seconds", self.reply_seconds, 0)


@dataclass(frozen=True, kw_only=True)
class ClientsConfig:
    """How a simulation lays its clients on the machine. A deployment heeds count and threads."""

    count: int = 5
    cpus: int = 1
    """CPUs that Ray reserves for one client; Flower takes whole numbers."""
    gpus: float = 0.0
    """Share of a GPU that Ray reserves for one client: 0.25 puts four clients on each GPU."""
    total_cpus: int = 0
    """What Ray is told the machine has; 0 lets it look."""
    total_gpus: int = 0
    """0 asks for none when ``gpus`` is 0, else lets Ray look."""
    threads: int = 1
    """Threads a client computes with, set explicitly: the same bits in process and on Ray."""
    warm: bool = False
    """Let a process beside the SuperNode keep the frozen model between messages (docs/warm.md). A
    node's ``FEDLOOM_WARM`` comes first: a folder for its socket, or ``off``. Not in simulations."""

    def __post_init__(self) -> None:
        at_least("clients.count", self.count, 1)
        at_least("clients.cpus", self.cpus, 1)
        at_least("clients.gpus", self.gpus, 0)
        at_least("clients.total-cpus", self.total_cpus, 0)
        at_least("clients.total-gpus", self.total_gpus, 0)
        at_least("clients.threads", self.threads, 1)
