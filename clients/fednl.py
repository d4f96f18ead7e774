# SPDX-License-Identifier: Apache-2.0
"""FedNL's local work: set the arrays that came, train on own rows, send the arrays back.

The memory's state lives inside a forward pass; the optimiser inside ``train_locally``; rows and
text stay in this process.  What ``share`` or ``local.method`` keep from round to round lies on this
node's disk (``fedloom.local.home``); a client object lives for one message.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import torch
from flwr.app import Context
from flwr.common import NDArrays
from numpy.typing import NDArray

from fedloom import __version__, border, seeds
from fedloom.adapters.lora import narrow, redraw
from fedloom.clients.bridge import AdapterClient, client_at, partition_of, with_own_rows
from fedloom.clients.private import update_to_send
from fedloom.clients.workbench import Workbench, device, visible_gpus, workbench
from fedloom.config import RunConfig
from fedloom.data import by_file
from fedloom.errors import Refusal
from fedloom.holdings import holdings
from fedloom.local.feedback import changes
from fedloom.local.home import Home
from fedloom.local.methods import method_of, travelling
from fedloom.local.work import Work
from fedloom.models.base import bases_loaded
from fedloom.models.sources import locate, parse_source
from fedloom.models.trunk import Trunk
from fedloom.rules import without_controls
from fedloom.rules.workload import steps_of
from fedloom.tasks import Task, length
from fedloom.wire import Arrays, check_own_start, other_manifest

_ADAPTER = "adapter"  # what of it is not averaged


class FedNLClient(AdapterClient):
    """One owner of data: a partition of the questions, and a share in this process's workbench."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.config = with_own_rows(RunConfig.from_flower(context.run_config), context)
        self.partition_id = partition_of(context)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say what this node holds; only with ``adapter`` in ``config`` is a model loaded."""
        if config.get("adapter"):
            bench = workbench(self.config)
            settings = bench.adapter.peft_config.to_dict()
            return {"manifest": bench.manifest.to_json(), "peft": _as_json(settings)}
        _, partition = holdings(self.config)
        client = client_at(partition, self.partition_id)
        own, asked = by_file.is_own(self.config.data.source), config.get("partition")
        location = locate(parse_source(self.config.model.source))
        hidden = self.config.privacy.on
        return {
            "partition": self.partition_id,
            "name": client.name,
            **({} if hidden else {"train": len(client.train)}),
            "test": len(client.test),
            **({"data": by_file.OWN, "held": partition.digest()} if own else {}),
            **({} if own else {"data": partition.digest()}),
            "partition-json": "" if hidden or own or not asked else partition.to_json(),
            "version": __version__,
            "recipe": self.config.digest(),
            "base": location.base_hash,
            "tokenizer": location.tokenizer_hash,
            "device": device(self.config),
            "visible-gpus": visible_gpus(),
            "pid": os.getpid(),
        }

    def get_parameters(self, config: dict[str, Any]) -> NDArrays:
        """Return the adapter's start, which is the same on every node with this seed."""
        start = workbench(self.config).start()
        self.array_names = list(start)
        return list(start.values())

    def fit(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[NDArrays, int, dict[str, Any]]:
        """Train on this client's rows for one round."""
        server_round = int(config["round"])
        bench, received = self._receive(parameters, config, scoring=False)
        self._begin_round(bench, server_round)
        work = self._work(bench, config, server_round)
        work.home.rewind(server_round)
        trained = method_of(self.config).fit(work, received)
        arrays = {**bench.adapter.arrays(), **trained.beside}
        learnt = bench.adapter.parameters()
        own = {name: arrays[name] for name in learnt if name not in bench.manifest.arrays}
        if own:
            work.home.keep(_ADAPTER, own, server_round)
        sent = bench.exchange.up(server_round, self.partition_id, arrays)
        if self.config.privacy.on:  # a count, a time or a score would tell what the arrays hide
            report = trained.report
            sent = update_to_send(
                self.config, self.context, config, received, sent,
                examples=report.examples, loss=report.loss,
            )  # fmt: skip
            self.array_names = list(sent)
            return list(sent.values()), 1, {}
        metrics = {key.replace("_", "-"): value for key, value in asdict(trained.report).items()}
        metrics |= {**trained.metrics, **_gate_metrics(bench), **self._place()}
        if config.get("last"):  # this very adapter is averaged next: the aggregation drop's base
            metrics |= _prefixed("local-", self._score(bench, bench.trunk))
        if (code := self.config.wire.dtype) != "float32":
            self.code = code
            sent = changes(sent, received, code, work.home, server_round)
        self.array_names = list(sent)
        return list(sent.values()), metrics.pop("examples"), metrics

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Score this client's test rows with the arrays that came, or with the frozen model.

        Where clients end up with adapters of their own, that one's scores stand beside them.
        """
        if config.get("frozen"):
            bench = workbench(self.config)
            whole = bench.trunk if not self.config.memory.window else None
            with bench.adapter.off():  # and its window: a windowed trunk is of another model
                metrics = self._score(bench, whole)
        else:
            bench, received = self._receive(parameters, config, scoring=True)
            metrics = self._score(bench, bench.trunk)
            metrics |= self._personal(bench, received, config, metrics)
        examples = int(metrics.pop(border.WEIGHT))
        return metrics["gold-ce-sum"] / examples, examples, metrics

    def _personal(
        self, bench: Workbench, received: Arrays, config: dict[str, Any], scores: dict[str, Any]
    ) -> dict[str, Any]:
        """Score this client's own adapter; what is not averaged was its own all along."""
        if self.config.share != "all" or self.config.server.rule == "fedsa":
            return _prefixed("personal-", scores)
        method = method_of(self.config)
        work = self._work(bench, config, int(config["round"]) + 1)
        if not method.is_personal(work):
            return {}
        bench.adapter.hold(bench.exchange.still(int(config["round"])))
        method.personalise(work, received)
        return _prefixed("personal-", self._score(bench, bench.trunk))

    def _receive(
        self, parameters: NDArrays, config: dict[str, Any], *, scoring: bool
    ) -> tuple[Workbench, dict[str, NDArray[Any]]]:
        """Check what came against the manifest, then set it and what was kept on the adapter."""
        self._check_base(config)  # before a model is loaded
        bench = workbench(self.config)
        if config["manifest"] != bench.manifest.digest():
            came, own = str(config["manifest"]), bench.manifest.digest()
            raise other_manifest(self.partition_id, came, own, "model, tokenizer, recipe")
        arrays = dict(zip(self.array_names, parameters, strict=True))
        exchange = bench.exchange.without_controls() if scoring else bench.exchange
        received = exchange.received(self.partition_id, arrays)
        bench.adapter.hold("")  # what an earlier message held in this process
        bench.adapter.reset()
        self._narrow(bench)
        if self._is_start(config, scoring):
            mine = travelling(self.config, bench.adapter.arrays())
            check_own_start(self.partition_id, received, mine)
        if self.config.share != "all" or self.config.server.rule == "fedsa":
            kept = self._home(bench, config).find(_ADAPTER, int(config["round"]) + scoring)
            bench.adapter.load(kept or {})
        bench.adapter.load(without_controls(received))
        return bench, received

    def _is_start(self, config: dict[str, Any], scoring: bool) -> bool:
        """Whether a message must bring the start; a strategy of one's own may send anything."""
        untrained = self.config.local.method == "none" if scoring else int(config["round"]) == 1
        return untrained and not self.config.strategy

    def _check_base(self, config: dict[str, Any]) -> None:
        base = locate(parse_source(self.config.model.source)).base_hash
        if (came := str(config.get("base", base))) != base:
            raise Refusal(
                f"partition {self.partition_id}: an adapter of base {came[:16]} came, this node's"
                f" {self.config.model.source} is {base[:16]}; use the same model on every node"
            )

    def _home(self, bench: Workbench, config: dict[str, Any]) -> Home:
        return Home(str(config.get("run", "")), self.partition_id, bench.manifest.digest())

    def _narrow(self, bench: Workbench) -> None:
        """Give LoRA this client's own rank and scale."""
        lora = self.config.lora
        if lora.own_ranks():
            rank, scale = lora.rank_of(self.partition_id), lora.scale_of(self.partition_id)
            narrow(bench.adapter.model, rank, scale)

    def _begin_round(self, bench: Workbench, server_round: int) -> None:
        """Hold what the rule does not train in this round, and start LoRA anew if it says so."""
        bench.adapter.hold(bench.exchange.still(server_round))
        if self.config.server.rule == "flora":
            seed = seeds.split(self.config.seed, server_round, "lora")
            redraw(bench.adapter.parameters(), seed)
            self._narrow(bench)

    def _task(self, bench: Workbench, partition: int | None = None) -> Task:
        whose = self.partition_id if partition is None else partition
        return Task(self.config, bench.base, whose, bench.encoded)

    def _work(self, bench: Workbench, config: dict[str, Any], server_round: int) -> Work:
        """Put together what a method works with; ``pool`` lets one client stand in for all."""
        pool = [int(p) for p in config.get("pool", [])]
        held = {p: self._task(bench, p) for p in pool or [self.partition_id]}
        lessons = {p: task.lessons(server_round) for p, task in held.items()}
        stands_for = [int(p) for p in config.get("stands-for", [])]
        task = next(iter(held.values()))
        return Work(
            adapter=bench.adapter,
            rows=[row for rows in lessons.values() for row in rows],
            loss=lambda batch: task.loss(batch, bench.trunk),
            length=length,
            config=self.config,
            home=self._home(bench, config),
            round=server_round,
            partition=self.partition_id,
            last=bool(config.get("last")),
            steps=sum(steps_of(len(lessons[p]), self.config.train) for p in stands_for),
        )

    def _score(self, bench: Workbench, trunk: Trunk | None) -> dict[str, Any]:
        metrics = self._task(bench).score(trunk)
        return {border.WEIGHT: metrics.pop("examples"), **metrics}

    def _place(self) -> dict[str, int]:
        """Return where this was computed, as numbers: metrics carry nothing else."""
        first = visible_gpus().split(",")[0]
        gpu = int(first) if first.isdigit() else -1
        return {"gpu": gpu, "pid": os.getpid(), "base-loads": bases_loaded()}


def _prefixed(prefix: str, scores: dict[str, Any]) -> dict[str, Any]:
    return {prefix + key: value for key, value in scores.items()}


def _gate_metrics(bench: Workbench) -> dict[str, float]:
    gates = bench.adapter.gates()
    if not gates:
        return {}
    values = torch.cat([gate.flatten() for gate in gates])
    moved = {"gate-mean": values.mean(), "gate-min": values.min(), "gate-max": values.max()}
    moved |= {f"gate-layer-{i:02d}": gate.mean() for i, gate in enumerate(gates)}
    return {key: float(value) for key, value in moved.items()}


def _as_json(settings: dict[str, Any]) -> str:
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in settings.items()}
    return json.dumps(plain, sort_keys=True, default=str)
