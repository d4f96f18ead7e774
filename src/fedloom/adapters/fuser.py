# SPDX-License-Identifier: Apache-2.0
"""``CacheFuser``: one sender's cache into one receiver's room (FedRefine, arXiv 2603.28772).

``prefix`` is the paper's rule: a projection of the sender's cache alone is put before the
receiver's own along the sequence.  ``residual`` is Cache-to-Cache (arXiv 2510.03215), from which
the paper takes its fuser: what is projected from both caches is added to the receiver's, token by
token.  Keys go in and come out before the rotary embedding, so a fuser knows nothing of positions.
"""

# Shapes: B row, T token, H KV head, D head dim, W = H * D, L gated layer.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom import seeds
from fedloom.adapters.alignment import layer_map, taps
from fedloom.adapters.gates import Draw, LayerGates
from fedloom.adapters.projectors import C2C_WIDTH, C2CProjector, SmallProjector
from fedloom.errors import Refusal, nearest
from fedloom.slices.geometry import Geometry
from fedloom.slices.slice import SliceBatch

MODES = ("prefix", "residual")
SIZES = ("small", "c2c")
SINKS = ("sender", "receiver", "none")
_STEP = 8  # widths are multiples of it
Pair = tuple[Tensor, Tensor]
"""Keys and values of one receiver layer, [B, H, T, D]."""


@dataclass(frozen=True, kw_only=True)
class FuserConfig:
    """How a fuser is built."""

    mode: str = "prefix"
    """``prefix`` (FedRefine's equation) or ``residual`` (Cache-to-Cache)."""
    layer_map: str = "depth"
    """Which sender layer feeds which receiver layer: depth, terminal or bottom_up."""
    taps: int = 3
    """Neighbouring sender layers that each receiver layer looks at."""
    size: str = "small"
    """``small``, or ``c2c`` for two separate streams in every layer."""
    width: int = 0
    """Rank of the small one, 0 for the widest that ``share`` allows; for ``c2c``, 0 is 1024."""
    share: float = 0.05
    """Of the receiver's parameters, what a fuser of width 0 may have."""
    gate_init: float = 2.0
    """First logit of each layer's gate: open."""
    tail: int = 0
    """Last tokens of the receiver's prompt that see a prefix: 0 for all; 1 is the equation as it is
    written, in which the receiver's cache is its own, and a fraction of the work."""
    sink: str = "sender"
    """Whose first token stands first, where attention rests (arXiv 2309.17453): what is made of the
    sender's, or the receiver's own; with ``none`` the sender's is left out and the receiver's stays
    where its prompt begins."""

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("size", SIZES), ("sink", SINKS)):
            told = getattr(self, name)
            if told not in known:
                hint = nearest(told, known)
                raise Refusal(f'fuser {name} "{told}"{hint}: expected one of {", ".join(known)}')
        if self.taps < 1 or self.width < 0 or not 0 < self.share <= 1:
            raise Refusal(
                f"fuser taps = {self.taps}, width = {self.width}, share = {self.share}: expected"
                " 1 or more, 0 or more, and a share of 0 to 1"
            )
        apart = self.alone or self.sink != "sender"
        if self.tail < 0 or (apart and self.mode == "residual"):
            raise Refusal(
                f"fuser tail = {self.tail}, sink = {self.sink} in {self.mode} mode: expected 0 or"
                " more; a residual fuser has neither, so leave both out"
            )

    @property
    def alone(self) -> bool:
        """Whether the receiver reads a part of its prompt without guests."""
        return self.tail > 0 or self.sink == "receiver"


@dataclass(frozen=True)
class Guests:
    """What a fuser made of one sender's cache, for one receiver; keys before RoPE.

    Attributes
    ----------
    sender : str
        Its model hash; guests are seated in the order of these.
    keys, values : mapping
        Receiver layer -> [B, H, T, D]; a layer whose gate is shut is not there.
    real_BT : Tensor
        Which tokens are real (prefix) or have a counterpart (residual).
    log_gate : mapping
        Receiver layer -> [B], while gates are learnt.
    bias : Tensor or None
        Added to the attention scores of all slots of this sender.
    residual : bool
        Whether they are added to the receiver's own tokens instead of standing before them.
    """

    sender: str
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    real_BT: Tensor
    log_gate: Mapping[int, Tensor] = field(default_factory=dict)
    bias: Tensor | None = None
    residual: bool = False


class CacheFuser(nn.Module):
    """The fuser of one ordered pair.

    Parameters
    ----------
    seed : int
        Of the first parameters: the same on any machine.

    Raises
    ------
    Refusal
        If no layer of the receiver can be given anything: a prefix does not stay in a layer that
        slides a window.

    Attributes
    ----------
    layers : tuple of int
        Receiver layers that have a projector and a gate.
    """

    def __init__(
        self,
        sender: Geometry,
        receiver: Geometry,
        config: FuserConfig | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.sender, self.receiver, self.config = sender, receiver, config or FuserConfig()
        count = 1 if self.config.size == "c2c" else self.config.taps
        found = layer_map(receiver.layers, sender.layers, self.config.layer_map)
        self._sources = {
            n: taps(source, sender.layers, count)
            for n, source in enumerate(found)
            if source is not None and n in receiver.full
        }
        self.layers = tuple(self._sources)
        if not self.layers:
            raise Refusal(
                f"a {receiver.family} receiver with layer map {self.config.layer_map}: every layer"
                " that is fed slides a window, in which a prefix would not stay; use depth, or"
                " another receiver"
            )
        if self.config.alone and len(receiver.full) < receiver.layers:
            raise Refusal(
                f"a {receiver.family} receiver with tail = {self.config.tail}, sink ="
                f" {self.config.sink}: what it reads alone does not stay where a window slides; use"
                " tail = 0 and sink = sender"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.split(seed, "fuser", sender.model, receiver.model))
            self.projector = self._build()
        gates = 1 if self.config.mode == "prefix" else 2
        self.gates = LayerGates(gates * len(self.layers), self.config.gate_init)
        if self.config.mode == "prefix":
            self.bias = nn.Parameter(torch.zeros(()))
        for side, geometry in (("sender", sender), ("receiver", receiver)):
            shape = (geometry.layers, 2 * geometry.width)
            self.register_buffer(f"{side}_mean", torch.zeros(shape))
            self.register_buffer(f"{side}_scale", torch.ones(shape))

    def _build(self) -> nn.Module:
        residual = self.config.mode == "residual"
        count = len(next(iter(self._sources.values())))
        inputs = 2 * self.sender.width * count + (2 * self.receiver.width if residual else 0)
        weights = 2 * self.receiver.heads if residual else 0
        shape = (len(self.layers), inputs, 2 * self.receiver.width)
        if self.config.size == "c2c":
            return C2CProjector(*shape, weights, self.config.width or C2C_WIDTH)
        return SmallProjector(*shape, self.config.width or self._widest(shape, weights), weights)

    def _widest(self, shape: tuple[int, int, int], weights: int) -> int:
        """Return the largest rank, no more than a full one, within the share of parameters."""
        rest = 2 * len(self.layers) + 1  # gates and bias
        budget = self.config.share * self.receiver.parameters - rest
        ranks = range(_STEP, max(min(shape[1:]), _STEP) + 1, _STEP)
        fit = [r for r in ranks if SmallProjector.count(*shape, r, weights) <= budget]
        if not fit:
            raise Refusal(
                f"a fuser within {self.config.share:g} of {self.receiver.parameters} parameters:"
                " not even a rank of 8 fits; set its width, or a larger share"
            )
        return fit[-1]

    @property
    def sources(self) -> dict[int, list[int]]:
        """Receiver layer -> the sender's layers that it looks at, in the features' order."""
        return dict(self._sources)

    @property
    def sender_layers(self) -> tuple[int, ...]:
        """Layers of the sender that are looked at, gates considered: all that has to travel."""
        shown = self.open_layers() if not self.training else self.layers
        return tuple(sorted({s for n in shown for s in self._sources[n]}))

    def open_layers(self) -> tuple[int, ...]:
        """Receiver layers that listen when gates are hard."""
        opened = torch.tensor(self.gates.open()).view(-1, len(self.layers)).any(0).tolist()
        return tuple(n for n, o in zip(self.layers, opened, strict=True) if o)

    def forward(
        self,
        source: SliceBatch,
        target: SliceBatch | None = None,
        draw: Draw | None = None,
        done: Mapping[int, Pair] | None = None,
    ) -> Guests:
        """Project a batch of slices.

        Parameters
        ----------
        source
            The sender's; for residual fusion with the tokens that go with the receiver's.
        target
            The receiver's own slices, for residual fusion alone.
        draw
            Gates of a training step; without it they are open or shut.
        done
            What ``project`` has made before of the same slices, by receiver layer.
        """
        self._check(source, target)
        shown = self.layers if draw is not None else self.open_layers()
        ready = done or {}
        made = {n: ready[n] if n in ready else self.project(n, source, target) for n in shown}
        soft = None if draw is None else self.gates.log_soft(len(source.real_BT), draw)
        residual = target is not None
        return Guests(
            sender=self.sender.model,
            keys={n: self._gated(x, n, 0, soft) for n, (x, _) in made.items()},
            values={n: self._gated(x, n, 1, soft) for n, (_, x) in made.items()},
            real_BT=source.real_BT
            if target is None
            else source.real_BT.to(target.real_BT.device) & target.real_BT,
            log_gate={}
            if soft is None or residual
            else {n: soft[:, i] for i, n in enumerate(self.layers)},
            bias=None if residual else self.bias,
            residual=residual,
        )

    def _check(self, source: SliceBatch, target: SliceBatch | None) -> None:
        if source.geometry != self.sender:
            raise Refusal(
                f"a fuser for sender {self.sender.model[:12]} was given a cache of"
                f" {source.geometry.model[:12]}: fetch the fuser of this pair"
            )
        if missing := set(self.sender_layers) - set(source.layers):
            raise Refusal(f"the slice lacks the sender's layer {min(missing)}: ask for it")
        if (target is not None) != (self.config.mode == "residual"):
            raise ValueError(f"a {self.config.mode} fuser and target = {target is not None}")

    def project(self, n: int, source: SliceBatch, target: SliceBatch | None = None) -> Pair:
        """Return keys and values for the receiver's layer ``n``; needs ``sources[n]`` alone."""
        parts = [self._features(source, "sender", s) for s in self._sources[n]]
        if target is not None:
            parts.append(self._features(target, "receiver", n))
        x = torch.cat([p[0] for p in parts] + [p[1] for p in parts], dim=-1)
        y, weight = self.projector(self.layers.index(n), x)
        scale = cast(Tensor, self.receiver_scale)[n].to(y)
        # A residual is a difference: it has no mean of its own to be put back.
        y = y * scale if target is not None else y * scale + cast(Tensor, self.receiver_mean)[n]
        keys, values = (part.unflatten(-1, (self.receiver.heads, -1)) for part in y.chunk(2, -1))
        if weight is not None:
            k_weight, v_weight = (part[..., None] for part in weight.chunk(2, dim=-1))
            keys, values = keys * k_weight, values * v_weight
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _features(self, batch: SliceBatch, side: str, layer: int) -> tuple[Tensor, Tensor]:
        """Return normalised keys and values [B, T, W] of one layer, where the fuser is."""
        pair = (batch.keys[layer], batch.values[layer])
        flat = [x.transpose(1, 2).flatten(2).to(self.gates.logit) for x in pair]
        mean, scale = (getattr(self, f"{side}_{what}")[layer] for what in ("mean", "scale"))
        made = ((torch.cat(flat, dim=-1) - mean) / scale).chunk(2, dim=-1)
        return made[0], made[1]

    def _gated(self, x: Tensor, n: int, which: int, soft: Tensor | None) -> Tensor:
        """Shut a residual's keys or values: 0 adds nothing; a prefix is gated in the scores."""
        if self.config.mode == "prefix":
            return x
        at = which * len(self.layers) + self.layers.index(n)
        if soft is None:
            return x if self.gates.open()[at] else torch.zeros_like(x)
        return x * soft[:, at].exp()[:, None, None, None]

    @torch.no_grad()
    def calibrate(self, source: Iterable[SliceBatch], target: Iterable[SliceBatch]) -> None:
        """Set means and scales of features and outputs from examples of both caches.

        Keys have channels with large means; a projection that starts without them starts far off.
        """
        for side, batches in (("sender", source), ("receiver", target)):
            found = [self._flat(batch) for batch in batches]
            rows = {n: torch.cat([f[n] for f in found]) for n in found[0]}
            for n, x in rows.items():
                getattr(self, f"{side}_mean")[n] = x.mean(0)
                getattr(self, f"{side}_scale")[n] = x.std(0).clamp_min(1e-4)

    @staticmethod
    def _flat(batch: SliceBatch) -> dict[int, Tensor]:
        """Return all real tokens of a batch by layer, [tokens, 2 W]."""

        def rows(x: Tensor) -> Tensor:
            return x.transpose(1, 2)[batch.real_BT].flatten(1)

        return {
            n: torch.cat((rows(batch.keys[n]), rows(batch.values[n])), -1) for n in batch.layers
        }

    @property
    def parameter_share(self) -> float:
        """Parameters, divided by the receiver's."""
        return sum(p.numel() for p in self.parameters()) / self.receiver.parameters

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Copy all out: parameters and scales, in sorted order."""
        return {n: x.detach().cpu().numpy().copy() for n, x in sorted(self.state_dict().items())}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Read what ``arrays`` returned.

        Raises
        ------
        Refusal
            If a name or a shape is not this fuser's, or a number is not finite.
        """
        own = self.state_dict()
        if odd := sorted(own.keys() ^ arrays.keys()):
            raise Refusal(f"fuser array {odd[0]} ({len(odd)} in all): expected {len(own)} others")
        for name, x in arrays.items():
            if x.shape != tuple(own[name].shape) or not np.isfinite(x).all():
                raise Refusal(f"fuser array {name}: {x.shape} came, finite {own[name].shape} fits")
        self.load_state_dict({n: torch.from_numpy(np.array(x)) for n, x in arrays.items()})
