# SPDX-License-Identifier: Apache-2.0
"""``FastMemory``: fast weights ``W = K^+ V`` hung on a frozen decoder (FAAST, arXiv 2605.04651).

A place is counted in blocks: place ``p`` is the residual stream before block ``p``, and the last
place, behind all blocks, is before the final norm.  There sits the output memory, which needs no
training: ``h <- (1 - r) h + r (h W)``.  Middle memories sit lower, ``h <- h + (h W) P``, and say
nothing until their read-out ``P`` was trained once.  Tested on Hugging Face's Llama, Qwen2, Qwen3
and Gemma3.
"""

# Shapes: B batch, T token, D width of the residual stream, N pair.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from fedloom.errors import Refusal

SHARE = 0.9
"""The paper's fixed ``r`` (its released code); right for no model in particular: validate it."""
DROPOUT = 0.1
"""Of what a middle memory reads, while its read-out is trained."""
_MARK = "fast_memory"


class ReadOut(nn.Module):
    """What of one middle memory is trained, once: how it is heard, and which values count.

    Parameters
    ----------
    width : int
        Of the residual stream.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.P_DD = nn.Parameter(torch.zeros(width, width))
        """Zero at first: an untrained middle memory changes nothing."""
        self.gate_2D = nn.Parameter(torch.zeros(2 * width))
        """``u``: a pair's value is taken times ``sigmoid(u . [k; v])``."""

    @staticmethod
    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter."""
        return {"P_DD": (width, width), "gate_2D": (2 * width,)}

    def gated(self, keys_ND: Tensor, values_ND: Tensor) -> Tensor:
        """Weigh values; the keys stay, so that this is no weighted least squares."""
        gate = self.gate_2D.to(values_ND.dtype)
        score = torch.cat((keys_ND, values_ND), dim=-1) @ gate
        return torch.sigmoid(score)[:, None] * values_ND

    def silent(self) -> bool:
        """Tell whether nothing of what is read would be heard."""
        return not bool(self.P_DD.any())


class FastMemory:
    """Fast weights beside a frozen model; hung when made, gone after ``detach``.

    Parameters
    ----------
    weights : mapping
        Place -> ``W`` ``[D, D]``, held in float32.  A place without weights has no hook.
    r : float
        How much of the output memory is heard; at 0 the model is untouched, bit for bit.
    match_scale : bool
        Bring what the output memory reads to the length of ``h`` before mixing.  The residual
        stream may be hundreds of times longer than an embedding; without this only an ``r`` near 1
        is heard, and one nearer drowns ``h``.
    readouts : mapping
        Place -> the trained read-out of each middle memory.

    Attributes
    ----------
    weights : dict
        Place -> tensor that is read from; a training step may put one with a graph there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Mapping[int, NDArray[Any]],
        *,
        r: float = SHARE,
        match_scale: bool = False,
        readouts: Mapping[int, ReadOut] | None = None,
    ) -> None:
        decoder = decoder_of(model)
        if hasattr(decoder, _MARK):
            raise ValueError("the model has a fast memory already: detach it first")
        self.model, self.match_scale = model, match_scale
        self.r = r
        self.readouts = dict(readouts or {})
        self.last = len(decoder.layers)
        """The output memory's place."""
        device = next(model.parameters()).device
        self.weights = {
            place: torch.tensor(w, dtype=torch.float32, device=device)
            for place, w in sorted(weights.items())
        }
        self._check()
        for readout in self.readouts.values():
            readout.to(device)
        self._on = True
        self._handles = [self._hook(decoder, place) for place in self._places()]
        setattr(decoder, _MARK, self)

    @property
    def r(self) -> float:
        """How much of the output memory is heard."""
        return self._r

    @r.setter
    def r(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise Refusal(f"r = {value}: expected 0 (nothing of the memory is heard) to 1")
        self._r = float(value)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what can be trained, by name: the read-outs; never the fast weights."""
        return {
            f"middle.{place}.{name}": parameter
            for place, readout in sorted(self.readouts.items())
            for name, parameter in readout.named_parameters()
        }

    @contextmanager
    def off(self) -> Iterator[None]:
        """The untouched model, for as long as the block lasts."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def detach(self) -> PreTrainedModel:
        """Take everything off and return the model as it was."""
        for handle in self._handles:
            handle.remove()
        decoder = decoder_of(self.model)
        if self._handles or getattr(decoder, _MARK, None) is self:
            self._handles = []
            delattr(decoder, _MARK)
        return self.model

    def nbytes(self) -> int:
        """Count the bytes of all fast weights; they do not grow with the pairs."""
        return sum(w.nbytes for w in self.weights.values())

    def _places(self) -> list[int]:
        return sorted(self.weights.keys() | self.readouts.keys())

    def _check(self) -> None:
        width = self.model.config.get_text_config().hidden_size
        for place, w in self.weights.items():
            if tuple(w.shape) != (width, width):
                raise Refusal(f"W at place {place} is {tuple(w.shape)}: expected {(width, width)}")
        for place in self._places():
            if not 0 <= place <= self.last:
                raise Refusal(f"place {place}: expected 0 to {self.last}, the model's blocks")
        odd = (self.weights.keys() - {self.last}) - self.readouts.keys()
        if odd or self.last in self.readouts:
            raise Refusal(
                f"read-outs for places {sorted(self.readouts)} and weights for"
                f" {sorted(self.weights)}: expected a read-out for each place but {self.last}"
            )

    def _hook(self, decoder: Any, place: int) -> RemovableHandle:
        read = self._read_output if place == self.last else self._read_middle

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            changed = read(place, inputs[0]) if self._on and place in self.weights else None
            return None if changed is None else (changed, *inputs[1:])

        return module_at(decoder, place).register_forward_pre_hook(before)

    def _read_output(self, place: int, hidden_BTD: Tensor) -> Tensor | None:
        if self.r == 0:  # not "times zero": the path is not taken at all
            return None
        return mix(hidden_BTD, self.weights[place], self.r, match_scale=self.match_scale)

    def _read_middle(self, place: int, hidden_BTD: Tensor) -> Tensor | None:
        readout = self.readouts[place]
        if not torch.is_grad_enabled() and readout.silent():
            return None
        guess = _product(hidden_BTD, self.weights[place])
        guess = F.dropout(guess, DROPOUT, training=self.model.training)
        return (hidden_BTD + guess @ readout.P_DD.to(guess.dtype)).to(hidden_BTD.dtype)


def mix(hidden: Tensor, weights_DD: Tensor, r: float, *, match_scale: bool = False) -> Tensor:
    """Return ``(1 - r) h + r (h W)``; a memory that reads zero leaves a zero at r = 1, no NaN."""
    guess = _product(hidden, weights_DD)
    if match_scale:
        lengths = (x.to(guess.dtype).norm(dim=-1, keepdim=True) for x in (hidden, guess))
        wanted, came = lengths
        guess = guess * (wanted / came.clamp_min(1e-30))
    return ((1 - r) * hidden + r * guess).to(hidden.dtype)


def _product(hidden: Tensor, weights_DD: Tensor) -> Tensor:
    """Read in float32 at least: ``W`` spans more than half precision holds."""
    wide = torch.promote_types(hidden.dtype, weights_DD.dtype)
    return hidden.to(wide) @ weights_DD.to(wide)


def middle_places(blocks: int, memories: int) -> list[int]:
    """Return where the paper puts so many middle memories: evenly, none before the first block.

    >>> middle_places(30, 2), middle_places(48, 23)[:3]
    ([10, 20], [2, 4, 6])
    """
    if not 0 <= memories < blocks:
        raise Refusal(
            f"{memories} middle memories: a model of {blocks} blocks has room for 0 to {blocks - 1}"
        )
    return [blocks * (j + 1) // (memories + 1) for j in range(memories)]


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the stack of blocks.

    Raises
    ------
    Refusal
        If it is not laid out as blocks and a final norm.
    """
    decoder = cast(Any, model.get_decoder())
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise Refusal(
            f"a {type(decoder).__name__} has no blocks with a final norm to put a memory between:"
            " expected a decoder like Llama's, Qwen's or Gemma's"
        )
    return decoder


def module_at(decoder: Any, place: int) -> nn.Module:
    """Return the module whose input is the residual stream at a place."""
    return cast(nn.Module, [*decoder.layers, decoder.norm][place])


def hung_on(model: PreTrainedModel) -> FastMemory | None:
    """Return the fast memory that hangs on a model, if any."""
    return getattr(decoder_of(model), _MARK, None)
