# SPDX-License-Identifier: Apache-2.0
"""``Geometry``: all that a fuser and a wire need to know of a model's cache, and which model it is.

A fuser belongs to one ordered pair of these; a frame that declares another one is refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from fedloom.errors import Refusal
from fedloom.ops.rotary import Rotary, unrotate

FULL, SLIDING = "full_attention", "sliding_attention"
_PROBE = 5


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's KV cache and the identity of the model.

    Attributes
    ----------
    model, tokenizer : str
        SHA-256 over weights and architecture, and over the tokenizer: names do not bind, hashes do.
    heads, dim : int
        KV heads (not query heads) and their dimension.
    windows : tuple of int
        By layer, tokens that it sees; 0 for all.
    bases, scalings : tuple of float
        By layer, the rotary base and the factor on sine and cosine.
    parameters : int
        Of the whole model; a fuser is measured against it.
    """

    model: str
    tokenizer: str
    family: str
    layers: int
    heads: int
    dim: int
    windows: tuple[int, ...]
    bases: tuple[float, ...]
    scalings: tuple[float, ...]
    parameters: int

    @property
    def width(self) -> int:
        """Numbers in one token's keys in one layer."""
        return self.heads * self.dim

    @property
    def full(self) -> tuple[int, ...]:
        """Layers that see everything: the only ones in which a prefix stays."""
        return tuple(i for i, window in enumerate(self.windows) if not window)

    def to_json(self) -> str:
        """Write one canonical line."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Geometry:
        """Read what ``to_json`` wrote."""
        try:
            told: dict[str, Any] = json.loads(text)
            told |= {k: tuple(v) for k, v in told.items() if isinstance(v, list)}
            made = cls(**told)
            by_layer = (made.windows, made.bases, made.scalings)
            whole = (getattr(made, f.name) for f in fields(made) if f.type == "int")
            if any(len(x) != made.layers for x in by_layer) or min(whole) < 1:
                raise ValueError("counts that do not fit together")
            return made
        except (ValueError, TypeError, AttributeError) as error:
            raise Refusal(f"not a cache geometry: {error}; expected what to_json wrote") from error


def geometry_of(model: PreTrainedModel, model_hash: str, tokenizer_hash: str) -> Geometry:
    """Measure a model.

    Raises
    ------
    Refusal
        For a model without a KV cache in every layer (Mamba and hybrids), with heads that differ,
        or with a rotary embedding that ``fedloom.ops.rotary`` does not turn back.
    """
    attentions = _attentions(model)
    config = model.config.get_text_config(decoder=True)
    kinds = layer_kinds(model)
    heads = {(_kv_heads(a), int(cast(Any, a).head_dim)) for a in attentions}
    if len(heads) != 1:
        raise _unfit(model, f"KV heads that differ between layers ({sorted(heads)})")
    rotaries = rotaries_of(model)
    ((count, dim),) = heads
    made = Geometry(
        model=model_hash,
        tokenizer=tokenizer_hash,
        family=str(model.config.model_type),
        layers=len(attentions),
        heads=count,
        dim=dim,
        windows=tuple(int(config.sliding_window) if k == SLIDING else 0 for k in kinds),
        bases=tuple(_base(config, kind) for kind in kinds),
        scalings=tuple(rotary.scaling for rotary in rotaries),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    _check_rotary(model, rotaries[0])
    return made


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """Name each layer's kind of attention."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or [_only_kind(config)] * config.num_hidden_layers
    if odd := sorted(set(kinds) - {FULL, SLIDING}):
        raise _unfit(model, f"{odd[0]} layers")
    return list(kinds)


def _only_kind(config: Any) -> str:
    """Name the kind of all layers where none is listed, as transformers' own cache infers it."""
    if getattr(config, "sliding_window", None) is not None:  # Mistral, Phi3
        return SLIDING
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return "chunked_attention" if chunked else FULL


def rotaries_of(model: PreTrainedModel) -> list[Rotary]:
    """Return the rotary embedding of each layer."""
    embedding = getattr(cast(Any, model.get_decoder()), "rotary_emb", None)
    if embedding is None:
        raise _unfit(model, "positions that are not rotary")
    return [Rotary.of(embedding, kind) for kind in layer_kinds(model)]


def _attentions(model: PreTrainedModel) -> list[torch.nn.Module]:
    layers = list(cast(Any, model.get_decoder()).layers)
    if bare := [i for i, layer in enumerate(layers) if not hasattr(layer, "self_attn")]:
        raise _unfit(model, f"no attention in layer {bare[0]}")
    found = [layer.self_attn for layer in layers]
    if not all(hasattr(a, part) for a in found for part in ("k_proj", "v_proj", "head_dim")):
        raise _unfit(model, "projections without the names k_proj and v_proj")
    return found


def _kv_heads(attention: torch.nn.Module) -> int:
    at = cast(Any, attention)
    return int(at.k_proj.out_features // at.head_dim)


def _base(config: Any, kind: str) -> float:
    told = config.rope_parameters
    return float(told.get(kind, told)["rope_theta"])


@torch.no_grad()
def _check_rotary(model: PreTrainedModel, rotary: Rotary) -> None:
    """See whether the first layer's keys of one repeated token are equal, once turned back."""
    if next(model.parameters()).is_meta:
        return
    ids = torch.ones(1, _PROBE, dtype=torch.long, device=model.device)
    found = model.get_decoder()(input_ids=ids, cache=DynamicCache(), use_cache=True).cache
    keys = found.layers[0].keys
    position = torch.arange(_PROBE, device=keys.device)[None]
    raw = unrotate(keys.float(), position, rotary, keys.dtype)
    eps = max(torch.finfo(keys.dtype).eps, torch.finfo(torch.float32).eps)  # sines are float32
    tolerance = 4 * eps**0.5 * float(raw.abs().max())
    if float((raw - raw[:, :, :1]).abs().max()) > tolerance:
        raise _unfit(model, "a rotary embedding that pairs other dimensions")


def _unfit(model: PreTrainedModel, why: str) -> Refusal:
    return Refusal(
        f"a {model.config.model_type} model has {why}: expected a decoder with one KV cache and one"
        " rotary embedding in every layer, such as Llama, Qwen2, Qwen3 or Gemma3"
    )
