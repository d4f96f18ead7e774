# SPDX-License-Identifier: Apache-2.0
"""``attach(model, config) -> Adapter``: hang it, take it off, list its trainable arrays.

Nothing of the LLM is replaced.  LoRA is peft's; the memory is a submodule of each attention layer
and a set of PyTorch hooks: projections are tapped for raw queries, keys and values, and the
layer's output is mixed with what the memory read, through the layer's own output projection.
Tested on Hugging Face's Llama, Qwen2, Qwen3 and Gemma3 attention; Mamba takes LoRA alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedloom.adapters import centring
from fedloom.adapters.centring import mean_projections
from fedloom.adapters.graft import PASS, GraftedMemory, Pass, Switch, places
from fedloom.adapters.lora import (
    checkpoint_name,
    hang_lora,
    is_mamba,
    peft_config,
    without_fused_kernel,
)
from fedloom.adapters.memory import (
    MemoryCache,
    chosen_kernel,
)
from fedloom.adapters.sequences import Layout, layout
from fedloom.adapters.side import SideAdapter
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.rules import is_side_array

log = logging.getLogger(__name__)


class Adapter:
    """LoRA and memory on one frozen model: what is trained, what travels, and how to take it off.

    Attributes
    ----------
    model : peft.PeftModel
        The model to call; its frozen weights are the caller's, untouched.
    """

    def __init__(
        self, base: PreTrainedModel, config: RunConfig, seed: int, sample: Sequence[int] = ()
    ) -> None:
        self.config = config
        layers = _layers(base, config.last_layers)
        self.peft_config = peft_config(config.lora, base, layers)
        if config.memory.enabled:  # refused before anything hangs on a model that others share
            _check_memory(base, config)
            _check_sample(config, sample)
        self.model: peft.PeftModel = hang_lora(base, self.peft_config, seed=seed)
        if config.lora.frozen:
            self.model.requires_grad_(False)
        self._switch = Switch()
        self._handles = without_fused_kernel(base) if is_mamba(base) else []
        self._attentions: list[nn.Module] = []  # those with a memory
        self._grafted: list[nn.Module] = []  # and those below that only keep to the window
        if config.memory.enabled:
            self._graft(base, layers)
            self._centre(base, sample)
        if config.train.checkpoint_layers:
            base.activation_checkpointing_enable({"use_reentrant": False})
        self.side = SideAdapter(self.model)
        self._own = self._trainable()
        self._still = ""
        self._start = {name: x.detach().clone() for name, x in self._own.items()}

    def _graft(self, base: PreTrainedModel, layers: list[int]) -> None:
        decoder = base.get_decoder()
        hook = decoder.register_forward_pre_hook(self._before_pass, with_kwargs=True)
        self._handles.append(hook)
        if self.config.memory.window:
            # A layer without an adapter that saw everything would tell those above of it.
            for index in range(layers[0]):
                self._graft_one(decoder.layers[index].self_attn, shut=True)
        for index in layers:
            attention = decoder.layers[index].self_attn
            self._graft_one(attention, shut=self.config.memory.gate == "shut")
            self._attentions.append(attention)

    def _graft_one(self, attention: nn.Module, *, shut: bool) -> None:
        memory = replace(self.config.memory, gate="shut") if shut else self.config.memory
        truncate = self.config.train.truncate_chunks
        graft = GraftedMemory(attention, memory, truncate, self._switch)
        if shut:  # nothing of it is heard: nothing of it can learn
            graft.requires_grad_(False)
        weight = next(attention.parameters())
        graft.to(device=weight.device)
        if weight.dtype == torch.float64:
            graft.to(dtype=torch.float64)
        attention.add_module("memory", graft)
        self._handles += graft.hook(attention)
        self._grafted.append(attention)

    def _centre(self, base: PreTrainedModel, sample: Sequence[int]) -> None:
        """Start learnt centres at the frozen model's means over a sample of text."""
        if self.config.memory.centre != "learnt" or self.config.memory.gate == "shut":
            return
        device = next(base.parameters()).device
        with self.off():
            ids = torch.tensor([list(sample)], device=device)
            means = mean_projections(base, self._attentions, ids)
        with torch.no_grad():
            for attention, (q, k) in zip(self._attentions, means, strict=True):
                delta = _graft_of(attention).delta
                delta.centre_k.copy_(k.view_as(delta.centre_k))
                asking = delta.centre_k[:, None] if delta.by_key else q.view_as(delta.centre_q)
                delta.centre_q.copy_(asking)

    def _before_pass(self, _module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Find padding and packed documents once, for all layers."""
        ids = kwargs.get("input_ids", inputs[0] if inputs else None)
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise ValueError("the memory needs the two-dimensional attention mask [B, T]")
        rows, tokens = cast(Tensor, ids).shape[:2]
        used = None if mask is None else mask[:, -tokens:]
        found = layout(rows, used, kwargs.get("position_ids"))
        held = self._held(kwargs.get("cache", kwargs.get("past_key_values")), ids, used, found)
        # Constant work a token, unless some layers slide windows of their own and still look.
        looked = held is None or any(_graft_of(a).slides for a in self._grafted)
        where = places(mask, found) if looked else None
        return inputs, {**kwargs, PASS: Pass(found, where, held)}

    def narrow(self, cache: MemoryCache) -> None:
        """Let an empty cache hold no more than ``memory.window`` needs; the first pass does so too.

        Without a window, and while the adapter is off, attention needs all keys.
        """
        memory = self.config.memory
        if memory.window and self._grafted and self._switch.on:
            grafts = ((a, _graft_of(a)) for a in self._grafted)
            layers = [cast(int, a.layer_idx) for a, graft in grafts if not graft.slides]
            cache.slide(memory.window, memory.sinks, layers)

    def _held(self, cache: Any, ids: Any, used: Tensor | None, rows: Layout | None) -> Any:
        """Return who sees whom in a cache that holds no more than the window."""
        if not isinstance(cache, MemoryCache):
            return None
        if not self._switch.on:
            if cache.span is not None:
                raise ValueError("the untouched LLM needs all keys: give it a cache of its own")
            return None
        self.narrow(cache)
        if cache.span is None:
            return None
        if rows is not None and not rows.one_a_row:
            raise ValueError("a row of several documents has no one memory to carry on")
        batch, tokens = ids.shape[:2]
        return cache.span.advance(batch, tokens, used, ids.device)

    def _trainable(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return dict(sorted((checkpoint_name(n), p) for n, p in named if p.requires_grad))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by the name they have on the wire and in a peft checkpoint."""
        still = self._still
        return {n: p for n, p in self._own.items() if not (still and n.endswith(still))}

    def hold(self, still: str) -> None:
        """Do not train parameters whose name ends so; an empty ending trains all again."""
        self._still = still
        trained = self.parameters()
        for name, parameter in self._own.items():
            parameter.requires_grad_(name in trained)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Copy LoRA and memory out, in sorted order, also what is held still."""
        return {n: p.detach().cpu().numpy().copy() for n, p in self._own.items()}

    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Set parameters, and the side adapter if it came; what is not named keeps its value.

        Raises
        ------
        Refusal
            For a name that is not trainable here, or a shape that differs.
        """
        if side := {name: array for name, array in arrays.items() if is_side_array(name)}:
            self.side.load(side)
            arrays = {name: array for name, array in arrays.items() if name not in side}
        own = self._own
        with torch.no_grad():
            for name, array in arrays.items():
                if name not in own:
                    raise Refusal(f"array {name} is no trainable parameter of this adapter")
                if own[name].shape != array.shape:
                    raise Refusal(
                        f"array {name}: shape {array.shape} came, {tuple(own[name].shape)} expected"
                    )
                own[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def reset(self) -> None:
        """Go back to the start: LoRA's B = 0, gates at their first value, no side adapter."""
        self.side.clear()
        with torch.no_grad():
            for name, parameter in self._own.items():
                parameter.copy_(self._start[name])

    @contextmanager
    def off(self) -> Iterator[None]:
        """The untouched LLM, for as long as the block lasts."""
        self._switch.on = False
        trained = {p: p.requires_grad for p in self.model.parameters()}
        try:
            with self.model.disable_adapter():
                yield
        finally:
            self._switch.on = True
            for parameter, requires_grad in trained.items():  # peft trains all LoRA from here on
                parameter.requires_grad_(requires_grad)

    def gates(self) -> list[Tensor]:
        """Return alpha of each layer that carries a memory."""
        return [_graft_of(attention).gate.values() for attention in self._attentions]

    def detach(self) -> PreTrainedModel:
        """Take everything off and return the model as it was."""
        self.side.clear()
        for handle in self._handles:
            handle.remove()
        for attention in self._grafted:
            del attention.memory
        if self.config.train.checkpoint_layers:
            self.model.get_base_model().activation_checkpointing_disable()
        return cast(PreTrainedModel, self.model.unload())


def _check_memory(base: PreTrainedModel, config: RunConfig) -> None:
    layer = cast(Any, base.get_decoder()).layers[0]
    if not hasattr(layer, "self_attn"):
        raise Refusal(
            f"memory.enabled = true on a {base.config.model_type} model, which has no attention to"
            " put a memory beside: set memory.enabled = false"
        )
    raw, dim = next(layer.self_attn.parameters()), layer.self_attn.head_dim
    kernel = chosen_kernel(config.memory, raw, dim, config.train.truncate_chunks)
    log.info("the memory runs on the %s kernel", kernel)


def _check_sample(config: RunConfig, sample: Sequence[int]) -> None:
    memory = config.memory
    if memory.centre == "learnt" and memory.gate != "shut" and len(sample) <= centring.SINKS:
        raise Refusal(
            f'memory.centre = "learnt" and a sample of {len(sample)} tokens: expected more than'
            f" {centring.SINKS}, of any text; give attach the tokens of centring.TEXT"
        )


def _graft_of(attention: nn.Module) -> GraftedMemory:
    return cast(GraftedMemory, attention.get_submodule("memory"))


def _layers(base: PreTrainedModel, last: int) -> list[int]:
    count = int(base.config.get_text_config().num_hidden_layers)
    if last > count:
        raise Refusal(f"last-layers = {last}: the model has {count} layers")
    return list(range(count - (last or count), count))


def attach(model: PreTrainedModel, config: RunConfig, sample: Sequence[int] = ()) -> Adapter:
    """Hang LoRA and memory on a frozen model; same seed, same start on any machine.

    Parameters
    ----------
    sample
        Token ids of a text, more than four, from which learnt centres (``memory.centre``) start.

    >>> from fedloom.models.base import load_base
    >>> model = load_base("tiny:llama").model
    >>> adapter = attach(model, RunConfig())
    >>> sum("lora_A" in name for name in adapter.arrays())
    6
    >>> adapter.detach() is model
    True
    """
    return Adapter(model, config, config.seed, sample)
