# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on the projections of a frozen LLM, hung by peft (LoRA, arXiv 2106.09685).

peft does the work; what is ours is the start: ``A`` is drawn from a named seed by numpy, so every
node begins with the same bytes whatever its torch did before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import peft
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from fedloom import seeds
from fedloom.config import LoraConfig
from fedloom.errors import Refusal

_ATTENTION = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


_MAMBA = {"in": "in_proj", "x": "x_proj", "out": "out_proj"}


def peft_config(config: LoraConfig, model: PreTrainedModel, layers: list[int]) -> peft.LoraConfig:
    """Translate a recipe's LoRA part into peft's own configuration for this model.

    Raises
    ------
    Refusal
        If a target is no projection of the model's family.
    """
    known = _MAMBA if is_mamba(model) else _ATTENTION
    every = config.targets == "all-linear"
    names = list(known) if every else [name.strip() for name in config.targets.split(",")]
    if foreign := [name for name in names if name not in known]:
        raise Refusal(
            f'lora.targets = "{config.targets}": a {model.config.model_type} model has no'
            f" {foreign[0]}; expected some of {', '.join(known)}, or all-linear"
        )
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=[known[name] for name in names],
        layers_to_transform=layers,
    )


def is_mamba(model: PreTrainedModel) -> bool:
    """Whether the model's layers are Mamba's mixers (arXiv 2312.00752) and no attention."""
    return bool(model.config.model_type == "mamba")


def hang_lora(model: PreTrainedModel, config: peft.LoraConfig, *, seed: int) -> peft.PeftModel:
    """Put LoRA on ``model`` in place: ``B = 0`` and ``A`` uniform as in ``nn.Linear``."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _out_proj_allowed(model):
        # peft draws its own start, which we overwrite, and asks transformers by a deprecated name.
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing", category=FutureWarning
        )
        hung = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in hung.named_parameters():
            if ".lora_A." in name:
                parameter.copy_(_uniform_start(parameter, seed, checkpoint_name(name)))
    hung.train(model.training)  # peft's dropout begins in training mode
    return hung


@contextmanager
def _out_proj_allowed(model: PreTrainedModel) -> Iterator[None]:
    """Let peft adapt Mamba's ``out_proj``, which it refuses by the model's type.

    Its reason is the fused kernel that reads the frozen weight past LoRA; that kernel reads
    ``x_proj`` so too, which peft lets pass. ``without_fused_kernel`` keeps it off for both.
    """
    kind = model.config.model_type
    model.config.model_type = f"{kind} with its projections called" if is_mamba(model) else kind
    try:
        yield
    finally:
        model.config.model_type = kind


def without_fused_kernel(model: PreTrainedModel) -> list[RemovableHandle]:
    """Make Mamba's mixers call their projections in training as they do in evaluation."""

    def call_projections(mixer: nn.Module, _inputs: Any) -> None:
        mixer.training = False  # of the mixer alone: dropout inside LoRA goes by its own flag

    layers = cast(Any, model.get_decoder()).layers
    return [layer.mixer.register_forward_pre_hook(call_projections) for layer in layers]


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
