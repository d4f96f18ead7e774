# SPDX-License-Identifier: Apache-2.0
"""Two-layer random models of the real architectures: quick enough to need no mock.

They have what the grafts must cope with: grouped queries (4 query heads on 2 KV heads), rotary
embeddings and, by family, biases on q, k and v (Qwen2), norms on q and k (Qwen3) or both those
norms and one layer that slides a window (Gemma3). Mamba has no attention at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fedloom import seeds, wire
from fedloom.models.tokenizer import ByteTokenizer

SPREAD = 0.25
"""Standard deviation of the weights: wide enough that different tokens get different logits."""


WINDOW = 12
"""Tokens that Gemma3's first layer sees; its second sees all."""
_ATTENTION: dict[str, Any] = {
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
_OF: dict[str, dict[str, Any]] = {
    "llama": _ATTENTION,
    "qwen2": _ATTENTION,
    "qwen3": _ATTENTION,
    "gemma3": {
        **_ATTENTION,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "mamba": {"state_size": 8, "tie_word_embeddings": False},
}


def build(family: str) -> PreTrainedModel:
    """Build the model of one family in float32; same weights at each call and on each machine."""
    tokenizer = ByteTokenizer()
    config = AutoConfig.for_model(
        {"gemma3": "gemma3_text"}.get(family, family),
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **_OF[family],
    )
    how = {} if family == "mamba" else {"attn_implementation": "sdpa"}
    with torch.random.fork_rng(devices=[]):  # transformers draws weights, which are replaced
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
    _draw(model, family)
    return model


def digest(model: PreTrainedModel) -> str:
    """Hash the weights."""
    return wire.arrays_digest({name: w.numpy(force=True) for name, w in _weights(model)})


def _weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return sorted(model.named_parameters())


def _draw(model: PreTrainedModel, family: str) -> None:
    centre = 0.0 if family == "gemma3" else 1.0  # Gemma's norms multiply by one plus their weight
    # By numpy: the normal numbers of torch depend on the CPU's vector instructions.
    for name, weight in _weights(model):
        noise = seeds.generator(0, "tiny", family, name).standard_normal(tuple(weight.shape))
        drawn = centre + 0.1 * noise if "norm" in name else SPREAD * noise
        with torch.no_grad():
            weight.copy_(torch.from_numpy(drawn.astype(np.float32)))
