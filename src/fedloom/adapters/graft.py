# SPDX-License-Identifier: Apache-2.0
"""One attention layer's memory, and the hooks that tie it in: nothing of the layer is replaced.

Projections are tapped for raw queries, keys and values; the layer's attention is narrowed to the
window; its output is mixed with what the memory read, through the layer's own output projection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from fedloom.adapters.caches import in_sight
from fedloom.adapters.memory import DeltaMemory, MemoryCache
from fedloom.adapters.mixing import MemoryGate, match_rms, unit_rms
from fedloom.adapters.sequences import Layout
from fedloom.config import MemoryConfig

PASS = "fedloom_pass"  # keyword that carries a pass from the decoder to its attention layers


@dataclass
class Pass:
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
class Switch:
    """Whether the memory takes part; the adapter turns it, all its layers look at it."""

    on: bool = True


class GraftedMemory(nn.Module):
    """The memory and gate of one attention layer, and the hooks that tie them in."""

    def __init__(
        self, attention: nn.Module, memory: MemoryConfig, truncate_chunks: int, switch: Switch
    ) -> None:
        super().__init__()
        model_config = cast(Any, attention.config)
        dim = cast(int, attention.head_dim)
        heads = model_config.num_key_value_heads
        groups = model_config.num_attention_heads // heads
        self.delta = DeltaMemory(memory, heads=heads, groups=groups, dim=dim)
        self.gate = MemoryGate(memory, width=model_config.hidden_size)
        self._match_rms, self._window = memory.match_rms, memory.window
        self._sinks = memory.sinks
        self.slides = bool(getattr(attention, "sliding_window", None))
        self._truncate = truncate_chunks
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
            if self._switch.on:  # else nobody would take it off
                self._taps[name] = output

        return keep

    def _before(self, _module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Note what the layer was given and narrow its attention to the window."""
        kwargs = dict(kwargs)
        shared = kwargs.pop(PASS, None) or Pass(None)  # the model need not know the keyword
        if not self._switch.on:
            return inputs, kwargs
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else inputs[0]
        past = cache.get_seq_length(self._index) if cache is not None else 0
        self._call = {"x": x, "cache": cache, "past": past, "layout": shared.layout}
        if self._window:
            kwargs["attention_mask"] = self._windowed(kwargs.get("attention_mask"), x, past, shared)
        return inputs, kwargs

    def _windowed(self, mask: Tensor | None, x: Tensor, past: int, shared: Pass) -> Tensor:
        """Narrow the layer's own mask, so that of two windows the shorter one holds.

        A layer that slides a window of its own (Gemma3) keeps only the last keys in its cache:
        those before ``first`` are gone, sinks among them.
        """
        queries, cache = x.shape[1], self._call["cache"]
        if shared.held is not None and not self.slides:  # transformers' mask is in it
            eager = mask is not None and mask.dtype != torch.bool
            return _additive(shared.held, x.dtype) if eager else shared.held
        keys, first = (queries, 0)
        if cache is not None:
            keys, first = cache.get_mask_sizes(queries, self._index)
        seen = shared.windows.get((first, keys))
        if seen is None:
            place = torch.arange(first + keys, device=x.device)[None]
            if shared.place_BK is not None:
                place = shared.place_BK[:, : first + keys]
            at = place[:, past : past + queries]
            seen = in_sight(at, place[:, first:], self._window, self._sinks)[:, None]
            if shared.layout is not None and not shared.layout.one_a_row:
                seen = seen & _same_document(shared.layout)
            shared.windows[first, keys] = seen
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


def _same_document(rows: Layout) -> Tensor:
    """Tell which tokens of a row belong together, [B, 1, T, T]: places alone do not."""
    whose = torch.where(rows.used_BT, rows.back_BT // rows.take_NL.shape[1], -1)
    return (whose[:, :, None] == whose[:, None, :])[:, None]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Write a mask as what eager attention adds to its scores."""
    zeros = torch.zeros_like(seen, dtype=dtype)
    return zeros.masked_fill(~seen, torch.finfo(dtype).min)


def places(mask: Tensor | None, rows: Layout | None) -> Tensor | None:
    """Return each key's index in its own sequence, [B, K], -1 for padding."""
    if rows is not None and not rows.one_a_row:
        return torch.where(rows.used_BT, rows.back_BT % rows.take_NL.shape[1], -1)
    if mask is None:
        return None
    return torch.where(mask.bool(), mask.long().cumsum(1) - 1, -1)
