# SPDX-License-Identifier: Apache-2.0
"""``attach(model, config) -> Adapter``: hang it, take it off, list its trainable arrays.

Nothing of the LLM is replaced.  LoRA is peft's; the memory is a submodule of each attention layer
and a set of PyTorch hooks: projections are tapped for raw queries, keys and values, and the
layer's output is mixed with what the memory read, through the layer's own output projection.
Tested on Hugging Face's Llama, Qwen2 and Qwen3 attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from fedloom.adapters.caches import in_sight
from fedloom.adapters.centring import mean_projections
from fedloom.adapters.lora import checkpoint_name, hang_lora, peft_config
from fedloom.adapters.memory import (
    DeltaMemory,
    MemoryCache,
    MemoryGate,
    match_rms,
    unit_rms,
)
from fedloom.adapters.sequences import Layout, layout
from fedloom.adapters.side import SideAdapter
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.rules import is_side_array

_PASS = "fedloom_pass"  # keyword that carries a pass from the decoder to its attention layers


@dataclass
class _Pass:
    """What the layers of one forward pass share.

    It travels in the layers' keyword arguments, so that a layer that is recomputed in the backward
    pass (activation checkpointing) meets the pass it belonged to, not the latest one.
    """

    layout: Layout | None
    place_BK: Tensor | None = None
    """Index of each key's token in its own sequence; ``None`` where that is its index."""
    held: Tensor | None = None
    """Who sees whom where the cache holds no more than the window, [B, 1, Q, K]."""
    windows: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@dataclass
class _Switch:
    """Whether the memory takes part; the adapter turns it, all its layers look at it."""

    on: bool = True


class GraftedMemory(nn.Module):
    """The memory and gate of one attention layer, and the hooks that tie them in."""

    def __init__(self, attention: nn.Module, config: RunConfig, switch: _Switch) -> None:
        super().__init__()
        model_config = cast(Any, attention.config)
        if config.memory.window and getattr(attention, "sliding_window", None):
            raise Refusal(
                f"memory.window = {config.memory.window} on a model whose layers slide a window of"
                " their own: use memory.window = 0"
            )
        dim = cast(int, attention.head_dim)
        heads = model_config.num_key_value_heads
        groups = model_config.num_attention_heads // heads
        self.delta = DeltaMemory(config.memory, heads=heads, groups=groups, dim=dim)
        self.gate = MemoryGate(config.memory, width=model_config.hidden_size)
        self._match_rms, self._window = config.memory.match_rms, config.memory.window
        self._sinks = config.memory.sinks
        self._truncate = config.train.truncate_chunks
        self._index, self._switch = cast(int, attention.layer_idx), switch
        self._taps: dict[str, Tensor] = {}
        self._call: dict[str, Any] = {}

    def hook(self, attention: nn.Module) -> list[RemovableHandle]:
        """Tie in; the handles undo it."""
        handles = [
            attention.register_forward_pre_hook(self._before, with_kwargs=True),
            attention.register_forward_hook(self._after),
        ]
        for name in ("q", "k", "v"):
            projection = attention.get_submodule(f"{name}_proj")
            handles.append(projection.register_forward_hook(self._tap(name)))
        return handles

    def _tap(self, name: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self._taps[name] = output

        return keep

    def _before(self, _module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Note what the layer was given and narrow its attention to the window."""
        kwargs = dict(kwargs)
        shared = kwargs.pop(_PASS, None) or _Pass(None)  # the model need not know the keyword
        if not self._switch.on:
            return inputs, kwargs
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else inputs[0]
        past = cache.get_seq_length(self._index) if cache is not None else 0
        self._call = {"x": x, "cache": cache, "past": past, "layout": shared.layout}
        if self._window:
            kwargs["attention_mask"] = self._windowed(kwargs.get("attention_mask"), x, past, shared)
        return inputs, kwargs

    def _windowed(self, mask: Tensor | None, x: Tensor, past: int, shared: _Pass) -> Tensor:
        queries = x.shape[1]
        if shared.held is not None:  # what transformers' mask says is in it
            eager = mask is not None and mask.dtype != torch.bool
            return _additive(shared.held, x.dtype) if eager else shared.held
        keys = mask.shape[-1] if mask is not None else past + queries
        seen = shared.windows.get((queries, keys))
        if seen is None:
            place = torch.arange(keys, device=x.device)[None]
            if shared.place_BK is not None:
                place = shared.place_BK[:, :keys]
            at = place[:, past : past + queries]
            seen = in_sight(at, place, self._window, self._sinks)[:, None]
            shared.windows[queries, keys] = seen
        if mask is None:
            return seen
        if mask.dtype == torch.bool:
            return mask & seen
        narrowed: Tensor = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
        return narrowed

    def _after(self, attention: nn.Module, _inputs: Any, output: Any) -> Any:
        """Mix the softmax branch with what the memory read."""
        if not self._switch.on:
            return None
        base, *rest = output
        call, self._call = self._call, {}
        q, k, v = (self._taps.pop(name) for name in ("q", "k", "v"))
        if self.gate.kind == "shut":
            return None
        read = self._read(q, k, v, call["cache"], call["past"], call["layout"])
        o_proj = attention.get_submodule("o_proj")
        memory = o_proj(unit_rms(read).to(base.dtype))
        wide = torch.promote_types(base.dtype, torch.float32)
        memory, softmax = memory.to(wide), base.to(wide)
        if self._match_rms:
            memory = match_rms(memory, softmax)
        # At alpha = 0, lerp adds 0 * (memory - softmax): the LLM's own output to the bit.
        mixed = torch.lerp(softmax, memory, self.gate(call["x"]).to(wide))
        return (mixed.to(base.dtype), *rest)

    def _read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Cache | None,
        past: int,
        rows: Layout | None,
    ) -> Tensor:
        state = cache.memory.get(self._index) if isinstance(cache, MemoryCache) else None
        if past and state is None:
            raise ValueError(
                f"layer {self._index} continues a sequence ({past} tokens) without its memory:"
                " pass cache=MemoryCache(model.config) from the first token on"
            )
        read: Tensor
        if rows is None:
            read, state = self.delta(q, k, v, state, truncate_chunks=self._truncate)
        else:
            if isinstance(cache, MemoryCache) and not rows.one_a_row:
                raise ValueError("a row of several documents has no one memory to carry on")
            q, k, v = (rows.gather(each) for each in (q, k, v))
            read, state = self.delta(q, k, v, state, rows.real_NL, self._truncate)
            read = rows.scatter(read)
        if isinstance(cache, MemoryCache):
            cache.memory[self._index] = state
        return read


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
        self.peft_config = peft_config(config.lora, layers)
        self.model: peft.PeftModel = hang_lora(base, config.lora, layers=layers, seed=seed)
        self._switch = _Switch()
        self._handles: list[RemovableHandle] = []
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
            below = self.config.replaced(memory__gate="shut")
            for index in range(layers[0]):
                self._graft_one(decoder.layers[index].self_attn, below)
        for index in layers:
            attention = decoder.layers[index].self_attn
            self._graft_one(attention, self.config)
            self._attentions.append(attention)

    def _graft_one(self, attention: nn.Module, config: RunConfig) -> None:
        graft = GraftedMemory(attention, config, self._switch)
        if config.memory.gate == "shut":  # nothing of it is heard: nothing of it can learn
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
                delta.centre_q.copy_(q.view_as(delta.centre_q))
                delta.centre_k.copy_(k.view_as(delta.centre_k))

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
        places = _places(mask, found) if held is None else None
        return inputs, {**kwargs, _PASS: _Pass(found, places, held)}

    def narrow(self, cache: MemoryCache) -> None:
        """Let an empty cache hold no more than ``memory.window`` needs; the first pass does so too.

        Without a window, and while the adapter is off, attention needs all keys.
        """
        memory = self.config.memory
        if memory.window and self._grafted and self._switch.on:
            layers = [cast(int, attention.layer_idx) for attention in self._grafted]
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
        """Do not train parameters whose name ends so, for now; an empty ending trains all."""
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


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Write a mask as what eager attention adds to its scores."""
    zeros = torch.zeros_like(seen, dtype=dtype)
    return zeros.masked_fill(~seen, torch.finfo(dtype).min)


def _places(mask: Tensor | None, rows: Layout | None) -> Tensor | None:
    """Return each key's index in its own sequence, [B, K], -1 for padding."""
    if rows is not None and not rows.one_a_row:
        return torch.where(rows.used_BT, rows.back_BT % rows.take_NL.shape[1], -1)
    if mask is None:
        return None
    return torch.where(mask.bool(), mask.long().cumsum(1) - 1, -1)


def _graft_of(attention: nn.Module) -> GraftedMemory:
    return cast(GraftedMemory, attention.get_submodule("memory"))


def _layers(base: PreTrainedModel, last: int) -> list[int]:
    count = int(base.config.get_text_config().num_hidden_layers)
    if last > count:
        raise Refusal(f"last-layers = {last}: the model has {count} layers")
    return list(range(count - (last or count), count))


def is_memory_array(name: str) -> bool:
    """Whether an array belongs to the memory (gates, taps) rather than to LoRA."""
    return ".memory." in name


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
