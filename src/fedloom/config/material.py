# SPDX-License-Identifier: Apache-2.0
"""What a run works on: the frozen model and the rows that the clients hold."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.config.checks import at_least, one_of
from fedloom.errors import Refusal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which frozen language model the adapter hangs on."""

    source: str = "embedded:smollm2-135m"
    """``embedded:NAME``, ``hub:ORG/NAME``, ``path:DIR``, ``gguf:FILE`` or ``tiny:FAMILY``."""
    dtype: str = "float32"
    """Dtype of the frozen weights: float32, bfloat16, float16 or (to check sums) float64.
    Adapters of half-precision weights stay float32."""
    device: str = "auto"
    """``auto`` takes a GPU if the client was given one, else the CPU."""

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("float32", "bfloat16", "float16", "float64"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the clients hold."""

    task: str = "mmlu"
    source: str = "packaged:mmlu-dev"
    """``packaged:mmlu-dev``, ``packaged:bigbench`` (five clients of another benchmark's tasks),
    ``hub:cais/mmlu`` or ``path:FILE-OR-DIR`` (parquet, CSV, JSONL)."""
    max_train: int = 2000
    """At most so many training rows a client (FedNL, Table 3)."""
    max_test: int = 200
    test_share: float = 1 / 6
    """Of a client's rows, the share kept for testing before ``max_test`` caps it."""
    min_train: int = 8
    """A client with fewer training rows is refused before any model loads."""
    min_test: int = 4
    max_tokens: int = 0
    """Longer prompts lose their beginning; 0 keeps every token."""
    manifest: str = ""
    """A partition manifest (JSON) that every node must agree with; empty: no outside check."""

    def __post_init__(self) -> None:
        one_of("data.task", self.task, ("mmlu",))
        at_least("data.max-train", self.max_train, 1)
        at_least("data.max-test", self.max_test, 1)
        at_least("data.min-train", self.min_train, 1)
        at_least("data.min-test", self.min_test, 1)
        at_least("data.max-tokens", self.max_tokens, 0)
        if not 0 < self.test_share < 1:
            raise Refusal(f"data.test-share = {self.test_share}: expected a share between 0 and 1")
