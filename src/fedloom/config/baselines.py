# SPDX-License-Identifier: Apache-2.0
"""What a baseline's name stands for: keys of the recipe, so that each is one line of it.

Words say what a method is: they hold whatever else the recipe says.  Numbers say how strong it is:
they stand where the recipe leaves them at their default.  ``fedavg`` is FedNL's own graft with the
gate shut: the same windowed backbone, so that a comparison is about the memory and not about the
span of attention.
"""

from __future__ import annotations

from fedloom.flat import Scalar

_PLAIN: dict[str, Scalar] = {
    "server.rule": "mean",
    "server.optimizer": "none",
    "local.method": "plain",
    "share": "all",
}
_AVERAGED: dict[str, Scalar] = {**_PLAIN, "memory.gate": "shut"}

BASELINES: dict[str, dict[str, Scalar]] = {
    "frozen": {**_AVERAGED, "local.method": "none", "share": "none"},
    "local": {**_AVERAGED, "share": "none"},
    "pooled": {**_AVERAGED, "local.method": "pooled"},
    "fedavg": _AVERAGED,
    "fedavg-ft": {**_AVERAGED, "local.method": "fine-tune"},
    "fedprox": {**_AVERAGED, "train.proximal-mu": 0.01},
    "scaffold": {**_AVERAGED, "local.method": "scaffold"},
    "fedavgm": {**_AVERAGED, "server.momentum": 0.9},
    "fedadam": {
        **_AVERAGED,
        "server.optimizer": "adam",
        "server.momentum": 0.9,
        "server.learning-rate": 0.01,
    },
    "ditto": {**_AVERAGED, "local.method": "ditto"},
    "fedala": {**_AVERAGED, "local.method": "fedala"},
    "fedssi": {**_AVERAGED, "local.method": "fedssi"},
    "ffa-lora": {**_AVERAGED, "server.rule": "ffa"},
    "rolora": {**_AVERAGED, "server.rule": "rolora"},
    "fedsa-lora": {**_AVERAGED, "server.rule": "fedsa"},
    "flora": {**_AVERAGED, "server.rule": "flora"},
    "fedex-lora": {**_AVERAGED, "server.rule": "fedex"},
    "flexlora": {**_AVERAGED, "server.rule": "flex"},
    "fed-mamba": {
        **_PLAIN,
        "model.source": "hub:state-spaces/mamba-1.4b-hf",
        "memory.enabled": False,
        "lora.targets": "in,x,out",
    },
}
"""Name -> the keys it sets."""
