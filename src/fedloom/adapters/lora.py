# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on the projections of a frozen LLM, hung by peft (LoRA, arXiv 2106.09685).

peft does the work; what is ours is the start: ``A`` is drawn from a named seed by numpy, so every
node begins with the same bytes whatever its torch did before.
"""

from __future__ import annotations

import math
import warnings

import peft
import torch
from torch import nn

from fedloom import seeds
from fedloom.config import LoraConfig

_MODULES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def peft_config(config: LoraConfig, layers: list[int]) -> peft.LoraConfig:
    """Translate a recipe's LoRA part into peft's own configuration."""
    names = list(_MODULES) if config.targets == "all-linear" else config.targets.split(",")
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=[_MODULES[name.strip()] for name in names],
        layers_to_transform=layers,
    )


def hang_lora(
    model: nn.Module, config: LoraConfig, *, layers: list[int], seed: int
) -> peft.PeftModel:
    """Put LoRA on ``model`` in place: ``B = 0`` and ``A`` uniform as in ``nn.Linear``."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft draws its own start, which we overwrite, and asks transformers by a deprecated name.
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing", category=FutureWarning
        )
        hung = peft.get_peft_model(model, peft_config(config, layers))
    with torch.no_grad():
        for name, parameter in hung.named_parameters():
            if ".lora_A." in name:
                parameter.copy_(_uniform_start(parameter, seed, checkpoint_name(name)))
            if config.frozen and ".lora_" in name:
                parameter.requires_grad_(False)
    return hung


def _uniform_start(parameter: torch.Tensor, seed: int, name: str) -> torch.Tensor:
    bound = 1 / math.sqrt(parameter.shape[1])  # Kaiming with a = sqrt(5), peft's own choice
    drawn = seeds.generator(seed, "lora", name).uniform(-bound, bound, tuple(parameter.shape))
    return torch.from_numpy(drawn).to(parameter)


def checkpoint_name(name: str) -> str:
    """Name a parameter as peft's checkpoints do: without the adapter's own name.

    >>> checkpoint_name("base_model.model.q_proj.lora_A.default.weight")
    'base_model.model.q_proj.lora_A.weight'
    """
    return name.replace(".default.", ".")
