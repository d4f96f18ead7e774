# SPDX-License-Identifier: Apache-2.0
"""What the clients of one process share: the frozen base, one adapter on it, and the data at hand.

A client comes and goes with each message; loading an LLM for each would take minutes.  Here the
base is loaded once a process and every client that the process serves sets its own arrays on the
one adapter before it works.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from fedloom import __version__
from fedloom.adapters import centring
from fedloom.adapters.attach import Adapter, attach
from fedloom.config import RunConfig
from fedloom.local.methods import travelling
from fedloom.models.base import Base, forget_bases, load_base, pick_device
from fedloom.models.trunk import Trunk
from fedloom.rules.exchange import Exchange
from fedloom.wire import Manifest


@dataclass(frozen=True)
class Workbench:
    """A base model with the run's adapter on it."""

    base: Base
    adapter: Adapter
    manifest: Manifest
    """Of what travels, which ``share``, ``server.rule`` and ``local.method`` decide."""
    exchange: Exchange
    trunk: Trunk | None = None
    """What the layers below the adapter made of rows, with ``train.keep-trunk``."""
    encoded: dict[Any, Any] = field(default_factory=dict)
    """Training rows as tokens, by row."""

    def start(self) -> dict[str, NDArray[Any]]:
        """Go back to the adapter's start; return what of it travels and what is saved beside it."""
        self.adapter.reset()
        arrays = self.adapter.arrays()
        arrays |= travelling(self.adapter.config, arrays)
        return {
            name: arrays[name] for name in sorted({**self.manifest.arrays, **self.manifest.kept})
        }


class _Held:
    """The workbench of this process; a run of another recipe takes the old adapter off first."""

    def __init__(self) -> None:
        self._config: RunConfig | None = None
        self._bench: Workbench | None = None

    def get(self, config: RunConfig) -> Workbench:
        torch.set_num_threads(config.clients.threads)
        if self._bench is None or self._config != config:
            self.release()
            self._bench, self._config = _build(config), config
        return self._bench

    def release(self) -> None:
        if self._bench is not None:
            self._bench.adapter.detach()
            self._bench = None


def _build(config: RunConfig) -> Workbench:
    base = load_base(config.model.source, config.model.dtype, device(config))
    adapter = attach(base.model, config, base.tokenizer.encode(centring.TEXT))
    try:
        return _ready(config, base, adapter)
    except BaseException:
        adapter.detach()  # others share this model
        raise


def _ready(config: RunConfig, base: Base, adapter: Adapter) -> Workbench:
    arrays = adapter.arrays()
    sent = travelling(config, arrays)
    rest = {name: array for name, array in arrays.items() if name not in sent}
    manifest = Manifest.of(
        sent,
        # Otherwise LoRA is each client's own from the start.
        kept=rest if config.share == "all" else None,
        method=config.method,
        version=__version__,
        base=base.base_hash,
        tokenizer=base.tokenizer_hash,
    )
    return Workbench(base, adapter, manifest, Exchange(config, manifest), _trunk(base, config))


def _trunk(base: Base, config: RunConfig) -> Trunk | None:
    """Return what the frozen lower layers made of rows; it outlives the run and its adapter.

    Nothing but the cut and the window decides it, so runs that share them share their work.
    """
    if not config.train.keep_trunk:
        return None
    layers = int(base.model.config.get_text_config().num_hidden_layers)
    first, memory = layers - config.last_layers, config.memory
    window = (memory.window, memory.sinks) if memory.enabled else (0, 0)
    key = id(base.model), first, window, config.train.keep_trunk
    if key not in _TRUNKS:
        _TRUNKS.clear()  # one at a time: it may hold gigabytes
        _TRUNKS[key] = Trunk(base.model, first, config.train.keep_trunk * 10**6)
    return _TRUNKS[key]


_TRUNKS: dict[tuple[int, int, tuple[int, int], int], Trunk] = {}
_HELD = _Held()


def workbench(config: RunConfig) -> Workbench:
    """Return this process's workbench for a recipe, built on first use."""
    return _HELD.get(config)


def release() -> None:
    """Take the adapter off the process's base model, which is then as it was loaded."""
    _HELD.release()


def forget() -> None:
    """Let go of the base model and of all that was made with it."""
    release()
    _TRUNKS.clear()
    forget_bases()


def device(config: RunConfig) -> str:
    """Name the device to compute on: ``auto`` is the first GPU that this process may see."""
    return pick_device(config.model.device)


def visible_gpus() -> str:
    """Return what Ray or the user lets this process see, as ``CUDA_VISIBLE_DEVICES`` says it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
