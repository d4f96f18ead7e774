# SPDX-License-Identifier: Apache-2.0
"""What a baseline's name stands for: keys of the recipe, so that each is one line of it.

A name sets the keys below wherever the recipe leaves them at their default.  ``fedavg`` is FedNL's
own graft with the gate shut: the same windowed backbone, so that a comparison is about the memory
and not about the span of attention.
"""

from __future__ import annotations

from fedloom.flat import Scalar

_LORA_ONLY: dict[str, Scalar] = {"memory.gate": "shut", "memory.beta-trainable": False}

BASELINES: dict[str, dict[str, Scalar]] = {
    "fedavg": {**_LORA_ONLY, "server.rule": "mean"},
    "fedprox": {**_LORA_ONLY, "server.rule": "mean", "train.proximal-mu": 0.01},
    "fedavgm": {**_LORA_ONLY, "server.rule": "mean", "server.momentum": 0.9},
}
"""Name -> the keys it sets."""
