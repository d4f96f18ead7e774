# SPDX-License-Identifier: Apache-2.0
"""Generate from a context of any length in constant memory, and go on with it another day.

What is kept of a context is ``S``, the last raw keys of the pool and, with ``memory.window``, the
sinks and the last keys and values of attention (FedNL, arXiv 2605.16350, section 2.2).  A prompt is
read a chunk at a time, then each token takes one step; neither allocates by what came before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fedloom import __version__, seeds, states
from fedloom.adapters.attach import Adapter
from fedloom.adapters.caches import WindowLayer
from fedloom.adapters.memory import MemoryCache, MemoryState
from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.models.tokenizer import Tokenizer
from fedloom.wire import arrays_digest


class Context:
    """One context that goes on: what a model keeps of it, and its last token.

    The last token is always still to be read: reading it gives the next one's distribution, so
    that a context is a cache and one token id, with no logits to keep.

    Parameters
    ----------
    model : PreTrainedModel
        Read with whatever hangs on it.
    chunk : int
        Tokens of a prompt that are read at once.
    """

    def __init__(self, model: PreTrainedModel, *, chunk: int = 256) -> None:
        if chunk < 1:
            raise ValueError(f"chunk = {chunk}: expected 1 at least")
        self.model, self.chunk = model.eval(), chunk
        self.cache = MemoryCache(self.model.config)
        self.pending: int | None = None
        self.tokens = 0
        """Of the context, the pending one counted."""

    def read(self, ids: Iterable[int]) -> None:
        """Take in more of the context."""
        waiting = [] if self.pending is None else [self.pending]
        for token in ids:
            waiting.append(token)
            self.tokens += 1
            if len(waiting) > self.chunk:
                self._step(waiting[:-1])
                del waiting[:-1]
        if len(waiting) > 1:
            self._step(waiting[:-1])
        self.pending = waiting[-1] if waiting else None

    def generate(
        self,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Collection[int] = (),
    ) -> Iterator[int]:
        """Make tokens one at a time, the one that stops it included.

        Parameters
        ----------
        temperature : float
            0 takes the most probable token.
        seed : int
            A token is drawn with a number of its own, by seed and place in the context: a session
            that was saved and loaded goes on as it would have.
        stop : collection of int
            Tokens that end the answer.
        """
        if temperature < 0:
            raise Refusal(f"temperature = {temperature}: expected 0 (greedy) or above")
        for _ in range(max_new_tokens):
            if self.pending is None:
                raise Refusal("an empty context has no next token: give a prompt")
            logits = self._step([self.pending])
            self.pending = _choose(logits, temperature, seed, self.tokens)
            self.tokens += 1
            yield self.pending
            if self.pending in stop:
                return

    @torch.no_grad()
    def _step(self, ids: Sequence[int]) -> Tensor:
        """Read tokens and return the logits after the last, [vocabulary]."""
        row = torch.tensor([ids], device=self.model.device)
        # No mask: one row has no padding, and a mask would be as long as the context.
        out = self.model(row, cache=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1]  # type: ignore[no-any-return]


class Session(Context):
    """A context of an adapter's, which can be saved and gone on with."""

    def __init__(self, adapter: Adapter, *, chunk: int = 256) -> None:
        super().__init__(adapter.model.get_base_model(), chunk=chunk)
        self.adapter = adapter


def _choose(logits: Tensor, temperature: float, seed: int, place: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    share = torch.softmax(logits.double() / temperature, dim=0).cumsum(0)
    drawn = seeds.generator(seed, "generate", place).random() * float(share[-1])
    return min(int(torch.searchsorted(share, drawn, right=True)), len(share) - 1)


def generate(
    session: Context,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """Read a prompt and yield the answer's text as it comes.

    Parameters
    ----------
    prompt : str or sequence of int
        Goes behind what the session has read; a session that has begun may be given an empty one.
    max_new_tokens, temperature, seed
        As in ``Session.generate``.
    """
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt, add_special_tokens=not session.tokens)
    session.read(prompt)
    stop = stop_tokens(session.model, tokenizer)
    made = session.generate(max_new_tokens, temperature=temperature, seed=seed, stop=stop)
    return text_of(made, tokenizer, stop)


def stop_tokens(model: PreTrainedModel, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end an answer, of model and tokenizer."""
    named = getattr(model.generation_config, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    return {int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None}


def text_of(tokens: Iterable[int], tokenizer: Tokenizer, stop: Iterable[int] = ()) -> Iterator[str]:
    """Turn tokens into text as they come; a character of several tokens waits for its last.

    >>> from fedloom.models.tokenizer import ByteTokenizer
    >>> list(text_of([104, 195, 169, 258], ByteTokenizer(), stop=[258]))
    ['h', 'é']
    """
    ends, before, waiting = set(stop), list[int](), list[int]()
    for token in tokens:
        if token in ends:
            break
        waiting.append(token)
        # The last piece goes before it, as some tokenizers drop a text's first blank.
        said = tokenizer.decode([*before, *waiting])[len(tokenizer.decode(before)) :]
        if said and not said.endswith("\ufffd"):
            yield said
            before, waiting = waiting, []
    rest = tokenizer.decode([*before, *waiting])[len(tokenizer.decode(before)) :]
    if rest:
        yield rest


def owner_of(base: Base, adapter: Adapter) -> states.Owner:
    """Name all that a state of this adapter depends on."""
    deciding = ("lora.", "memory.", "last-layers", "model.dtype")
    keys = {k: v for k, v in adapter.config.flat().items() if k.startswith(deciding)}
    del keys["memory.chunk"], keys["lora.dropout"]  # speed, and training
    settings = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()
    arrays = arrays_digest({**adapter.arrays(), **adapter.side.arrays})
    return states.Owner(base.base_hash, base.tokenizer_hash, arrays, settings)


def save_state(
    path: Path, session: Session, owner: states.Owner, *, expires: timedelta | None = None
) -> states.Header:
    """Write a session to one safetensors file (mode 0600), whole or not at all.

    Parameters
    ----------
    expires : timedelta, optional
        The state is refused when so much time has passed.
    """
    if session.pending is None:
        raise Refusal(f"state {path}: nothing was read yet, so there is nothing to keep")
    now = datetime.now(UTC).replace(microsecond=0)
    until = "" if expires is None else (now + expires).isoformat()
    header = states.Header(owner, session.tokens, now.isoformat(), until, __version__)
    tensors = {name: x.contiguous() for name, x in _tensors(session).items()}
    states.write_private(path, save_tensors(tensors, metadata=header.to_metadata()))
    return header


def load_state(path: Path, adapter: Adapter, owner: states.Owner, *, chunk: int = 256) -> Session:
    """Return the session that a file holds, ready to go on.

    Raises
    ------
    Refusal
        If the file is missing, cut short, expired, of another model or adapter, holds a value
        that is not finite or a shape that this model does not have.
    """
    header = states.read_header(path)
    states.check_use(path, header, owner)
    try:
        tensors = load_tensors(path.read_bytes())
    except SafetensorError as error:
        raise Refusal(f"state {path} cannot be read ({error}): the file is cut short") from error
    session = Session(adapter, chunk=chunk)
    fresh = _like(session, header.tokens)
    _check(path, tensors, fresh, session.model.config.get_text_config().vocab_size)
    _restore(session, {n: x.to(session.model.device) for n, x in tensors.items()}, header.tokens)
    return session


def cache_bytes(cache: MemoryCache) -> dict[str, int]:
    """Count what a cache holds, tensor by tensor: ``memory`` and ``attention``."""
    memory = sum(x.nbytes for x in _memory_tensors(cache).values())
    return {"memory": memory, "attention": sum(x.nbytes for x in _attention(cache).values())}


def _tensors(session: Session) -> dict[str, Tensor]:
    """Name all that a session is made of."""
    cache, span = session.cache, session.cache.span
    named = {**_memory_tensors(cache), **_attention(cache)}
    if span is not None and span.place_BK is not None:
        named["span.place"] = span.place_BK
    named["pending"] = torch.tensor([session.pending])
    return named


def _memory_tensors(cache: MemoryCache) -> dict[str, Tensor]:
    named = {}
    for layer, state in cache.memory.items():
        named[f"memory.{layer:03d}.S"] = state.S_BHDD
        named[f"memory.{layer:03d}.tail"] = state.tail_BTHD
        if state.asked_BTHGD.shape[1]:
            named[f"memory.{layer:03d}.asked"] = state.asked_BTHGD
    return named


def _attention(cache: MemoryCache) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer):
            raise Refusal(f"layer {index} keeps a {type(layer).__name__}: it cannot be saved")
        if layer.is_initialized:
            parts = {"keys": layer.keys, "values": layer.values}
            if isinstance(layer, WindowLayer) and layer.span.sinks:
                parts |= {"sink-keys": layer.sink_keys, "sink-values": layer.sink_values}
            named |= {f"attention.{index:03d}.{part}": x for part, x in parts.items()}
    return named


def _like(session: Session, tokens: int) -> dict[str, Tensor]:
    """Return tensors of the names, shapes and dtypes that a state of so many tokens has here.

    They are those of a session that has read two tokens, with the window's length put in.
    """
    probe = Session(session.adapter)
    probe.read([0, 0, 0])
    made, grown = _tensors(probe), {}
    span, read = probe.cache.span, tokens - 1
    for name, x in made.items():
        grown[name] = x
        if name.startswith("attention.") and ".sink" not in name:
            layer = probe.cache.layers[int(name.split(".")[1])]
            held = read
            if isinstance(layer, WindowLayer):
                held = min(read, layer.span.window - 1)
            elif getattr(layer, "is_sliding", False):
                held = min(read, layer.sliding_window - 1)
            grown[name] = x[:, :, :1].expand(-1, -1, held, -1)
        elif name == "span.place" and span is not None:
            grown[name] = x[:, :1].expand(-1, span.sinks + min(read, span.window - 1))
    return grown if read else {"pending": made["pending"]}


def _check(
    path: Path, tensors: dict[str, Tensor], wanted: dict[str, Tensor], vocabulary: int
) -> None:
    if odd := sorted(tensors.keys() ^ wanted.keys()):
        side = "is missing" if odd[0] in wanted else "is not known here"
        raise Refusal(f"state {path}: tensor {odd[0]} ({len(odd)} in all) {side}; start anew")
    for name, x in tensors.items():
        like = wanted[name]
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            raise Refusal(
                f"state {path}: {name} is {tuple(x.shape)} {x.dtype}, this model's is"
                f" {tuple(like.shape)} {like.dtype}; start anew"
            )
        if not torch.isfinite(x).all():
            raise Refusal(f"state {path}: {name} holds a value that is not finite; start anew")
    if not 0 <= int(tensors["pending"]) < vocabulary:
        raise Refusal(f"state {path}: its last token is not in the vocabulary; start anew")


def _restore(session: Session, tensors: dict[str, Tensor], tokens: int) -> None:
    cache, read = session.cache, tokens - 1
    session.pending, session.tokens = int(tensors.pop("pending")), tokens
    if not read:
        return
    session.adapter.narrow(cache)
    if cache.span is not None:
        cache.span.place_BK = tensors.pop("span.place")
        cache.span.seen = read
        cache.span.count_B = cache.span.place_BK.new_tensor([read])
    for name, x in tensors.items():
        kind, index, part = name.split(".")
        if kind == "memory" and part == "S":
            seen = torch.full((len(x),), read, device=x.device)
            tail = tensors[f"memory.{index}.tail"]
            none = tail[:, :0, :, None]  # as many queries as a state of narrow taps keeps
            asked = tensors.get(f"memory.{index}.asked", none)
            cache.memory[int(index)] = MemoryState(x, tail, asked, seen)
        elif kind == "attention" and part == "keys":
            layer, values = cache.layers[int(index)], tensors[f"attention.{index}.values"]
            layer.lazy_initialization(x, values)
            layer.keys, layer.values = x, values
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = read
            if isinstance(layer, WindowLayer) and layer.span.sinks:
                layer.sink_keys = tensors[f"attention.{index}.sink-keys"]
                layer.sink_values = tensors[f"attention.{index}.sink-values"]
