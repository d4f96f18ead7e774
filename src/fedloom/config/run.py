# SPDX-License-Identifier: Apache-2.0
"""``RunConfig``: everything that a run can be told, and its image as a flat TOML recipe."""

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

from fedloom.config.adapter import LoraConfig, MemoryConfig
from fedloom.config.baselines import BASELINES
from fedloom.config.checks import at_least, one_of
from fedloom.config.custom import CustomConfig
from fedloom.config.faast import FaastConfig
from fedloom.config.gate import GateConfig, WireConfig
from fedloom.config.learning import OF_ANY_RANKS, EvaluationConfig, ServerConfig, TrainConfig
from fedloom.config.local import LocalConfig
from fedloom.config.machine import ClientsConfig, SamplingConfig
from fedloom.config.material import DataConfig, ModelConfig, NiahConfig
from fedloom.config.privacy import PrivacyConfig
from fedloom.config.refine import RefineConfig
from fedloom.errors import Refusal, nearest
from fedloom.flat import Scalar, flatten, kebab
from fedloom.references import check_reference

_CUSTOM = "custom."


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run can be told; a recipe is its image.

    >>> config = RunConfig.from_flat({"rounds": 5, "lora.rank": 16})
    >>> config.lora.rank, RunConfig.from_flat(config.flat()) == config
    (16, True)
    """

    method: str = "fednl"
    """``fednl`` (LoRA and memory gates, averaged over rounds; docs/fednl.md), ``faast`` (sums
    over frozen keys, solved once; docs/faast.md) or ``fedrefine`` (models that hear each other's
    caches; docs/fedrefine.md). The others' parts are not looked at."""
    name: str = "fednl"
    """Name of the folder that the run leaves."""
    output: str = "runs"
    """Folder that holds run folders; relative to where ``fedloom run`` was started (under
    ``flwr run``, to where its SuperLink was)."""
    resume: bool = False
    """Go on with the run in the folder ``output/name`` after its last whole round; ``fedloom run
    --resume DIR`` sets this (docs/resume.md)."""
    seed: int = 0
    rounds: int = 3
    last_layers: int = 0
    """Adapt only so many layers next to the output; 0 adapts all. Gradients stop below them."""
    baseline: str = ""
    """Name of a method to compare with (docs/fednl.md lists them). It sets the words that make it,
    whatever the recipe says of them, and numbers that the recipe leaves at their default. Empty is
    FedNL."""
    share: str = "all"
    """What is averaged: ``all`` (LoRA and gates), ``memory`` (gates; LoRA stays at home) or
    ``none`` (each client trains alone)."""
    strategy: str = ""
    """Your own ``mypkg.mod:MyStrategy``, a subclass of ``fedloom.strategies.AdapterStrategy`` that
    is installed on the server (docs/custom.md). Empty is the method's own."""
    client: str = ""
    """Your own ``mypkg.mod:MyClient``, a subclass of ``fedloom.clients.bridge.AdapterClient`` that
    is installed on every node. Empty is the method's own."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    niah: NiahConfig = field(default_factory=NiahConfig)
    faast: FaastConfig = field(default_factory=FaastConfig)
    refine: RefineConfig = field(default_factory=RefineConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    clients: ClientsConfig = field(default_factory=ClientsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    custom: CustomConfig = field(default_factory=CustomConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)

    def __post_init__(self) -> None:
        one_of("method", self.method, ("fednl", "faast", "fedrefine"))
        if self.baseline:
            one_of("baseline", self.baseline, tuple(BASELINES))
        one_of("share", self.share, ("all", "memory", "none"))
        at_least("rounds", self.rounds, 1)
        at_least("seed", self.seed, 0)
        at_least("last-layers", self.last_layers, 0)
        check_reference("strategy", self.strategy)
        check_reference("client", self.client)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise Refusal(
                f'name = "{self.name}": expected letters, digits, ".", "_" and "-", starting with a'
                " letter or digit, as it becomes a folder"
            )
        self._check_task()
        if self.method == "faast":
            self._check_faast()
        elif self.method == "fedrefine":
            self._check_refine()
        else:
            self._check_share()
            self._check_ranks()
            self._check_trunk()
            self.local.check_with(self.share, self.server.rule)
            self._check_private()
        self.wire.check_with(self.method, self.share, self.server.rule)
        self.evaluation.check_with(self.method, self.local.method, self.privacy.on)
        self._check_nodes()

    def _check_private(self) -> None:
        """Refuse beside ``privacy`` what counts on changes that can be seen."""
        asked = math.ceil(self.sampling.fraction * self.clients.count - 1e-9)
        self.privacy.check_with(self.share, self.server.rule, self.local.method, asked)
        if not self.privacy.on:
            return
        for key, odd in (
            ("wire.dtype", self.wire.dtype != "float32"),
            ("wire.budget-bytes", self.wire.budget_bytes),
            ("sampling.rest-after", self.sampling.rest_after),
        ):
            if odd:
                raise Refusal(
                    f"{key} with privacy: what it needs to see of each client is hidden; leave"
                    " one of the two out"
                )

    def _check_task(self) -> None:
        classes = self.data.task == "classes"
        if classes != (self.method == "faast"):
            raise Refusal(
                f'method = "{self.method}" with data.task = "{self.data.task}": faast learns'
                ' data.task = "classes", fednl mmlu or niah, fedrefine asks mmlu; change one of the'
                " two"
            )
        if self.data.task == "niah" and self.data.max_tokens:
            raise Refusal(
                f"data.max-tokens = {self.data.max_tokens}: it would cut needles off; set it to 0"
                " and choose the lengths by niah.train-tokens-max and niah.test-tokens"
            )

    def _check_faast(self) -> None:
        """Refuse what would have the server do anything else with sums than add them."""
        of_fednl = {
            "baseline": (self.baseline, ""),
            "share": (self.share, "all"),
            "local.method": (self.local.method, "plain"),
            "server.rule": (self.server.rule, "svd"),
            "server.optimizer": (self.server.optimizer, "none"),
            "privacy": ("..." if self.privacy != PrivacyConfig() else "", ""),
        }
        for key, (came, default) in of_fednl.items():
            if came != default:
                raise Refusal(
                    f'{key} = "{came}" with method = "faast": its sums are added and nothing else;'
                    f" leave {key} out"
                )
        most = min(self.data.max_train, self.faast.max_count or self.data.max_train)
        count = self.clients.count
        self.faast.check_room(count * most, f"clients.count = {count} clients")

    def _check_refine(self) -> None:
        if self.data.task != "mmlu" or self.rounds != 1:
            raise Refusal(
                f'method = "fedrefine" with data.task = "{self.data.task}" and rounds ='
                f' {self.rounds}: nothing is trained; set data.task = "mmlu" and rounds = 1'
            )
        if self.refine.mutual and self.clients.count < 2:
            raise Refusal(
                f"refine.mutual = {self.refine.mutual} with clients.count = 1: nobody is there to"
                " exchange caches with; expected two or more"
            )
        if self.refine.receiver >= self.clients.count:
            raise Refusal(
                f"refine.receiver = {self.refine.receiver}: clients.count = {self.clients.count}"
                f" has partitions 0 to {self.clients.count - 1}"
            )

    def _check_share(self) -> None:
        memory = self.memory
        taps = memory.beta_trainable and memory.beta == "token"
        gate = memory.gate in ("vector", "scalar", "dynamic")
        learnt = "learnt" in (memory.centre, memory.key_taps)
        trained = memory.enabled and memory.gate != "shut" and (taps or gate or learnt)
        if self.share == "memory" and not trained:
            raise Refusal(
                'share = "memory" and no trained gate or taps: nothing would be sent; set'
                ' memory.gate = "vector" or share = "all"'
            )
        if self.lora.frozen and not trained and self.local.method != "none":
            raise Refusal(
                "lora.frozen = true and no trained gate or taps: nothing would be trained; set"
                ' memory.gate = "vector" or lora.frozen = false'
            )

        if self.share != "all" and self.server.rule not in ("mean", "svd"):
            raise Refusal(
                f'share = "{self.share}" with server.rule = "{self.server.rule}": LoRA stays at'
                ' home and the rule has nothing to do; leave server.rule out or set share = "all"'
            )

    def _check_trunk(self) -> None:
        if self.data.task == "niah" and "x" in self.lora.targets.split(","):
            raise Refusal(
                f'data.task = "niah" with lora.targets = "{self.lora.targets}": needles are scored'
                " from a repeated cache, which Mamba has not; use another backbone"
            )
        if self.train.keep_trunk and not self.last_layers:
            raise Refusal(
                f"train.keep-trunk = {self.train.keep_trunk} with last-layers = 0: every layer is"
                " adapted and nothing lies below; set last-layers or train.keep-trunk = 0"
            )

    def _check_ranks(self) -> None:
        own, rule = self.lora.own_ranks(), self.server.rule
        if not own:
            return
        if rule not in OF_ANY_RANKS:
            raise Refusal(
                f'lora.ranks = "{self.lora.ranks}" with server.rule = "{rule}": this rule needs one'
                f" rank; leave lora.ranks out or take one of {', '.join(OF_ANY_RANKS)}"
            )
        if len(own) != self.clients.count:
            raise Refusal(
                f'lora.ranks = "{self.lora.ranks}": {len(own)} ranks for clients.count ='
                f" {self.clients.count}; expected one a client, in the order of partitions"
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
        places = {"name", "output", "resume", "clients.total-cpus", "clients.total-gpus"}
        # A run that its budget stopped may go on with a larger one.
        places |= {"model.device", "clients.warm", "wire.budget-bytes"}
        if self.data.split == "files":
            places.add("data.source")  # where each client's file lies is its own matter
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
            if key.startswith(_CUSTOM):
                continue  # ``CustomConfig`` looks at them
            if key not in known:
                raise Refusal(f"unknown key {key}{nearest(key, known)}; see docs/recipes.md")
            _check_type(key, value, known[key])
        named = values.get("baseline", "")
        preset = BASELINES.get(str(named), {})  # an unknown name is refused below
        words = {
            key: value
            for key, value in preset.items()
            if isinstance(value, str) and not key.startswith("model.")
        }
        kept = {key: value for key, value in values.items() if value != known.get(key)}
        hidden = "privacy.masks" in kept or "privacy.clip" in kept
        if hidden and "server.rule" not in values and not kept.keys() & {"share", "method"}:
            preset = {"server.rule": "ffa", **preset}  # the default rule is no sum
        return cast(RunConfig, _build(cls, {**preset, **kept, **words}, ""))

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
        return self.from_flat({**self.without_preset(), **keys})

    def without_preset(self) -> dict[str, Scalar]:
        """Return ``flat`` without what only the baseline's name set: another may take its place.

        Nor with the rule where it is the default's, in whose place privacy has another.
        """
        preset = {"server.rule": ServerConfig().rule, **BASELINES.get(self.baseline, {})}
        return {key: value for key, value in self.flat().items() if preset.get(key) != value}


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
        if kind is CustomConfig:
            own = {k.removeprefix(_CUSTOM): v for k, v in values.items() if k.startswith(_CUSTOM)}
            made[item.name] = CustomConfig(own)
        elif dataclasses.is_dataclass(kind):
            made[item.name] = _build(cast(type[Any], kind), values, key + ".")
        elif key in values:
            made[item.name] = float(values[key]) if kind is float else values[key]
    return cls(**made)
