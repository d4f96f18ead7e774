# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on the projections of a frozen LLM, hung by peft (LoRA, arXiv 2106.09685).

peft does the work; what is ours is the start: ``A`` is drawn from a named seed by numpy, so every
node begins with the same bytes whatever its torch did before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

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


def redraw(parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    """Start LoRA anew in place, with another A than the run's first: ``B = 0`` leaves the model."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if ".lora_A." in name:
                parameter.copy_(_uniform_start(parameter, seed, name))
            elif ".lora_B." in name:
                parameter.zero_()


def narrow(model: nn.Module, rank: int, scale: float) -> None:
    """Leave LoRA ``rank`` directions and multiply its product by ``scale``.

    The other rows of A and columns of B become zero.  Then both their gradients are zero, and no
    optimiser step moves them: what is trained is an adapter of that rank, on tensors whose shapes
    are the same for every client of the process.
    """
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name in module.scaling:
                module.scaling[name] = scale
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter[rank:] = 0
            elif ".lora_B." in name:
                parameter[:, rank:] = 0


def checkpoint_name(name: str) -> str:
    """Name a parameter as peft's checkpoints do: without the adapter's own name.

    >>> checkpoint_name("base_model.model.q_proj.lora_A.default.weight")
    'base_model.model.q_proj.lora_A.weight'
    """
    return name.replace(".default.", ".")
