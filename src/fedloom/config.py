# SPDX-License-Identifier: Apache-2.0
"""``RunConfig``: everything that a run can be told, and its image as a flat TOML recipe.

Each field of a part is one recipe key: ``RunConfig().lora.rank`` is ``lora.rank``, and
``train.batch_size`` is ``train.batch-size``.  The choices that FedNL's paper (arXiv 2605.16350)
leaves open are fields with a default, so that a recipe shows what was assumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_type_hints

from fedloom.errors import Refusal, nearest
from fedloom.flat import Scalar, flatten, kebab


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = nearest(value, allowed)
        raise Refusal(f'{key} = "{value}": expected one of {", ".join(allowed)}{hint}')


def _at_least(key: str, value: float, least: float) -> None:
    if not value >= least:  # also refuses nan
        raise Refusal(f"{key} = {value}: expected at least {least}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which frozen language model the adapter hangs on."""

    source: str = "embedded:smollm2-135m"
    """``embedded:NAME``, ``hub:ORG/NAME``, ``path:DIR``, ``gguf:FILE`` or ``tiny:FAMILY``."""
    dtype: str = "float32"
    """Dtype of the frozen weights: float32, bfloat16, float16 or (to check sums) float64.
    Adapters of half-precision weights stay float32."""
    device: str = "auto"
    """``auto`` takes a GPU if the client was given one, else the CPU."""

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, ("float32", "bfloat16", "float16", "float64"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the clients hold."""

    task: str = "mmlu"
    source: str = "packaged:mmlu-dev"
    """``packaged:mmlu-dev``, ``hub:cais/mmlu`` or ``path:FILE-OR-DIR`` (parquet, CSV, JSONL)."""
    max_train: int = 2000
    """At most so many training rows a client (FedNL, Table 3)."""
    max_test: int = 200
    test_share: float = 1 / 6
    """Of a client's rows, the share kept for testing before ``max_test`` caps it."""
    min_train: int = 8
    """A client with fewer training rows is refused before any model loads."""
    min_test: int = 4
    max_tokens: int = 0
    """Longer prompts lose their beginning; 0 keeps every token."""
    manifest: str = ""
    """A partition manifest (JSON) that every node must agree with; empty: no outside check."""

    def __post_init__(self) -> None:
        _one_of("data.task", self.task, ("mmlu",))
        _at_least("data.max-train", self.max_train, 1)
        _at_least("data.max-test", self.max_test, 1)
        _at_least("data.min-train", self.min_train, 1)
        _at_least("data.min-test", self.min_test, 1)
        _at_least("data.max-tokens", self.max_tokens, 0)
        if not 0 < self.test_share < 1:
            raise Refusal(f"data.test-share = {self.test_share}: expected a share between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, hung by peft."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str = "q,k,v"
    """Comma-separated projections, or ``all-linear`` (FedNL's 11.3 M baseline)."""

    def __post_init__(self) -> None:
        _at_least("lora.rank", self.rank, 1)
        known = ("q", "k", "v", "o", "gate", "up", "down")
        for name in [] if self.targets == "all-linear" else self.targets.split(","):
            _one_of("lora.targets", name.strip(), known)
        if not 0 <= self.dropout < 1:
            raise Refusal(f"lora.dropout = {self.dropout}: expected at least 0 and below 1")
        if not self.alpha > 0:
            raise Refusal(f"lora.alpha = {self.alpha}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The delta-rule memory beside attention and the gate that mixes it in (FedNL section 2.2)."""

    enabled: bool = True
    rule: str = "explicit"
    """``explicit`` eq. (3)/(9), ``proximal`` exact minimiser of eq. (2), ``hebbian`` ablation."""
    read_before_write: bool = False
    """False reads ``S_t q_t`` (Algorithm 1, appendix B); True reads ``S_{t-1} q_t`` (eq. 5)."""
    feature_map: str = "silu-l2"
    """Map of raw queries and keys, before any rotary embedding; ``l2`` leaves SiLU out."""
    scale_values: bool = True
    """Multiply values by ``d**-0.5`` as TPTT does."""
    beta: str = "token"
    """Step size: ``token`` is sigmoid of the pooled raw key, ``fixed`` is 0.5 everywhere."""
    beta_trainable: bool = False
    """Train the pool's three taps and bias. Frozen taps give FedNL's 32,768 parameters."""
    negative_eigenvalues: bool = False
    """Double the step size to (0, 2), as in arXiv 2411.12537."""
    gate: str = "vector"
    """``vector`` of width D a layer, one ``scalar`` a layer, ``dynamic`` (linear map of the token),
    ``fixed`` (not trained; with ``gate-init`` 0 TPTT's constant 0.5), ``shut`` (alpha = 0) or
    ``open`` (alpha = 1, memory only)."""
    gate_init: float = -3.0
    """Logit at the start: sigmoid(-3) is about 0.05, close to the pretrained function."""
    match_rms: bool = True
    """Rescale the memory's output to the softmax branch's RMS, token by token."""
    window: int = 0
    """Softmax branch sees so many tokens back; 0 is full attention."""
    chunk: int = 64
    """Tokens a chunk of the exact chunkwise delta rule."""

    def __post_init__(self) -> None:
        _one_of("memory.rule", self.rule, ("explicit", "proximal", "hebbian"))
        _one_of("memory.feature-map", self.feature_map, ("silu-l2", "l2"))
        _one_of("memory.beta", self.beta, ("token", "fixed"))
        _one_of("memory.gate", self.gate, ("vector", "scalar", "dynamic", "fixed", "shut", "open"))
        _at_least("memory.window", self.window, 0)
        _at_least("memory.chunk", self.chunk, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One client's work in one round. Optimiser state is fresh each round and never leaves."""

    epochs: int = 1
    max_steps: int = 0
    """Stop a client's round after so many optimiser steps; 0 is whole epochs."""
    batch_size: int = 4
    learning_rate: float = 5e-4
    memory_learning_rate: float = 0.0
    """For gates and taps; 0 uses ``learning-rate``."""
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Clip the gradient's norm over all trainable arrays; 0 does not clip."""
    proximal_mu: float = 0.0
    """FedProx: pull towards the round's start with ``mu / 2 |theta - start|^2``; 0 is FedAvg."""
    truncate_chunks: int = 0
    """Cut back-propagation through the memory every so many chunks; 0 is full BPTT."""
    checkpoint_layers: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    def __post_init__(self) -> None:
        _at_least("train.epochs", self.epochs, 1)
        _at_least("train.max-steps", self.max_steps, 0)
        _at_least("train.batch-size", self.batch_size, 1)
        _at_least("train.weight-decay", self.weight_decay, 0)
        _at_least("train.clip-norm", self.clip_norm, 0)
        _at_least("train.proximal-mu", self.proximal_mu, 0)
        _at_least("train.truncate-chunks", self.truncate_chunks, 0)
        _at_least("train.memory-learning-rate", self.memory_learning_rate, 0)
        if not self.learning_rate > 0:
            raise Refusal(f"train.learning-rate = {self.learning_rate}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and how the test rows are scored. No gradient, no test-time training of parameters."""

    every: int = 1
    """Score the global adapter after every so many rounds; the last round is always scored."""
    batch_size: int = 8

    def __post_init__(self) -> None:
        _at_least("evaluation.every", self.every, 1)
        _at_least("evaluation.batch-size", self.batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Which nodes work in a round: drawn from (seed, round) over sorted partition ids."""

    fraction: float = 1.0
    min_nodes: int = 1
    """Fewer usable replies than this end the run."""
    wait_seconds: float = 120.0
    """How long to wait for nodes before giving up, in seconds."""
    reply_seconds: float = 3600.0
    """How long a round may take, in seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise Refusal(f"sampling.fraction = {self.fraction}: expected above 0 and at most 1")
        _at_least("sampling.min-nodes", self.min_nodes, 1)
        _at_least("sampling.wait-seconds", self.wait_seconds, 0)
        _at_least("sampling.reply-seconds", self.reply_seconds, 0)


@dataclass(frozen=True, kw_only=True)
class ClientsConfig:
    """How a simulation lays its clients on the machine. A deployment heeds count and threads."""

    count: int = 5
    cpus: int = 1
    """CPUs that Ray reserves for one client; Flower takes whole numbers."""
    gpus: float = 0.0
    """Share of a GPU that Ray reserves for one client: 0.25 puts four clients on each GPU."""
    total_cpus: int = 0
    """What Ray is told the machine has; 0 lets it look."""
    total_gpus: int = 0
    """0 asks for none when ``gpus`` is 0, else lets Ray look."""
    threads: int = 1
    """Threads a client computes with, set explicitly: the same bits in process and on Ray."""

    def __post_init__(self) -> None:
        _at_least("clients.count", self.count, 1)
        _at_least("clients.cpus", self.cpus, 1)
        _at_least("clients.gpus", self.gpus, 0)
        _at_least("clients.total-cpus", self.total_cpus, 0)
        _at_least("clients.total-gpus", self.total_gpus, 0)
        _at_least("clients.threads", self.threads, 1)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server makes one adapter of the replies."""

    rule: str = "mean"
    """``mean`` averages LoRA's factors (FedNL eq. 6); ``svd`` takes the adapter of this rank that
    is nearest to the mean of their products. Gates and taps are averaged either way."""
    momentum: float = 0.0
    """FedAvgM on the mean of factors: 0 is the plain weighted mean of Algorithm 1."""

    def __post_init__(self) -> None:
        _one_of("server.rule", self.rule, ("mean", "svd"))
        if self.rule != "mean" and self.momentum:
            raise Refusal(
                f'server.momentum = {self.momentum} with server.rule = "{self.rule}": steps between'
                " factors of different gauges mean nothing; set one of the two to its default"
            )
        if not 0 <= self.momentum < 1:
            raise Refusal(f"server.momentum = {self.momentum}: expected at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run can be told; a recipe is its image.

    >>> config = RunConfig.from_flat({"rounds": 5, "lora.rank": 16})
    >>> config.lora.rank, RunConfig.from_flat(config.flat()) == config
    (16, True)
    """

    method: str = "fednl"
    name: str = "fednl"
    """Name of the folder that the run leaves."""
    output: str = "runs"
    """Folder that holds run folders; relative to where ``fedloom run`` was started (under
    ``flwr run``, to where its SuperLink was)."""
    seed: int = 0
    rounds: int = 3
    last_layers: int = 0
    """Adapt only so many layers next to the output; 0 adapts all. Gradients stop below them."""
    share: str = "all"
    """What is averaged: ``all`` (LoRA and gates) or ``memory`` (gates; LoRA stays at home)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    clients: ClientsConfig = field(default_factory=ClientsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        _one_of("method", self.method, ("fednl",))
        _one_of("share", self.share, ("all", "memory"))
        _at_least("rounds", self.rounds, 1)
        _at_least("seed", self.seed, 0)
        _at_least("last-layers", self.last_layers, 0)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise Refusal(
                f'name = "{self.name}": expected letters, digits, ".", "_" and "-", starting with a'
                " letter or digit, as it becomes a folder"
            )
        self._check_share()
        self._check_nodes()

    def _check_share(self) -> None:
        memory = self.memory
        taps = memory.beta_trainable and memory.beta == "token"
        trained = memory.enabled and (taps or memory.gate in ("vector", "scalar", "dynamic"))
        if self.share == "memory" and not trained:
            raise Refusal(
                'share = "memory" and no trained gate or taps: nothing would be sent; set'
                ' memory.gate = "vector" or share = "all"'
            )

    def _check_nodes(self) -> None:
        drawn = math.ceil(self.sampling.fraction * self.clients.count - 1e-9)
        if self.sampling.min_nodes > max(1, drawn):
            raise Refusal(
                f"sampling.min-nodes = {self.sampling.min_nodes}: a round asks {drawn} of"
                f" {self.clients.count} clients; lower it or raise sampling.fraction"
            )

    def flat(self) -> dict[str, Scalar]:
        """Return every key of the recipe with its value, dotted and in kebab case."""
        return dict(flatten(dataclasses.asdict(self)))

    def digest(self) -> str:
        """Hash all that decides the result, so that both ends know they mean the same run."""
        places = {"name", "output", "clients.total-cpus", "clients.total-gpus", "model.device"}
        kept = {key: value for key, value in self.flat().items() if key not in places}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_flat(cls, values: Mapping[str, Scalar]) -> RunConfig:
        """Build a config from dotted kebab keys; keys left out keep their default.

        Raises
        ------
        Refusal
            For an unknown key (with the nearest known one), a wrong type or a value out of range.
        """
        known = cls().flat()
        for key, value in values.items():
            if key not in known:
                raise Refusal(f"unknown key {key}{nearest(key, known)}; see docs/recipes.md")
            _check_type(key, value, known[key])
        return cast(RunConfig, _build(cls, values, ""))

    from_flower = from_flat
    """Flower's ``context.run_config`` is the same flat mapping."""

    @classmethod
    def from_toml(cls, path: Path) -> RunConfig:
        """Read a recipe.

        Raises
        ------
        Refusal
            If there is no such file, it is not TOML, or ``from_flat`` refuses what it says.
        """
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise Refusal(f"recipe {path}: {error.strerror}; expected a TOML file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise Refusal(f"recipe {path} is not TOML: {error}") from error
        return cls.from_flat(dict(flatten(tree)))

    def replaced(self, **flat: Scalar) -> RunConfig:
        """Return a copy with other values; ``__`` stands for a dot and ``_`` for a hyphen."""
        keys = {kebab(name.replace("__", ".")): value for name, value in flat.items()}
        return self.from_flat({**self.flat(), **keys})


def _check_type(key: str, value: object, example: Scalar) -> None:
    wanted = type(example)
    if type(value) is not wanted and not (wanted is float and type(value) is int):
        raise Refusal(
            f"{key} = {value!r} is {type(value).__name__}: expected {wanted.__name__},"
            f" for example {key} = {json.dumps(example)}"
        )


def _build(cls: type[Any], values: Mapping[str, Scalar], prefix: str) -> Any:
    hints = get_type_hints(cls)
    made: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        key, kind = prefix + kebab(item.name), hints[item.name]
        if dataclasses.is_dataclass(kind):
            made[item.name] = _build(cast(type[Any], kind), values, key + ".")
        elif key in values:
            made[item.name] = float(values[key]) if kind is float else values[key]
    return cls(**made)
