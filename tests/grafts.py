"""A gate half open, and logits without gradients."""

from __future__ import annotations

import torch

from fedloom.config import RunConfig

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
CUTTABLE = ("llama", "qwen2", "qwen3")  # between layers, see models.trunk


HEARD = RunConfig().replaced(memory__gate_init=0.0, memory__chunk=16)  # the gate half open


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits
