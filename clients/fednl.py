# SPDX-License-Identifier: Apache-2.0
"""FedNL's local work: set the arrays that came, train on own rows, send the arrays back.

The memory's state lives inside a forward pass; the optimiser inside ``train_locally``; rows and
text stay in this process.  With ``share = "memory"`` LoRA stays too, in Flower's per-node context.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import torch
from flwr.app import Context
from flwr.common import NDArrays

from fedloom import __version__, border, seeds
from fedloom.clients.bridge import AdapterClient
from fedloom.clients.workbench import Workbench, device, visible_gpus, workbench
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.holdings import holdings
from fedloom.models.base import bases_loaded
from fedloom.models.sources import locate, parse_source
from fedloom.models.trunk import Trunk
from fedloom.tasks import Task, length
from fedloom.training import train_locally

_AT_HOME = "arrays-at-home"


class FedNLClient(AdapterClient):
    """One owner of data: a partition of the questions, and a share in this process's workbench."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.config = RunConfig.from_flower(context.run_config)
        if "partition-id" not in context.node_config:
            raise Refusal(
                "this node's config has no partition-id: start it with --node-config"
                ' "partition-id=0 num-partitions=5"'
            )
        self.partition_id = int(context.node_config["partition-id"])

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say what this node holds; only with ``adapter`` in ``config`` is a model loaded."""
        if config.get("adapter"):
            bench = workbench(self.config)
            settings = bench.adapter.peft_config.to_dict()
            return {"manifest": bench.manifest.to_json(), "peft": _as_json(settings)}
        _, partition = holdings(self.config)
        if not 0 <= self.partition_id < len(partition.clients):
            raise Refusal(
                f"partition-id {self.partition_id}: the data divide into"
                f" {len(partition.clients)} clients, 0 to {len(partition.clients) - 1}"
            )
        client = partition.clients[self.partition_id]
        location = locate(parse_source(self.config.model.source))
        return {
            "partition": self.partition_id,
            "name": client.name,
            "train": len(client.train),
            "test": len(client.test),
            "data": partition.digest(),
            "partition-json": partition.to_json() if config.get("partition") else "",
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
        bench = workbench(self.config)
        bench.adapter.reset()
        arrays = bench.adapter.arrays()
        self.array_names = bench.shared_names()
        return [arrays[name] for name in self.array_names]

    def fit(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[NDArrays, int, dict[str, Any]]:
        """Train on this client's rows for one round."""
        bench = self._bench(parameters, config)
        task = self._task(bench)
        report = train_locally(
            bench.adapter,
            task.lessons(int(config["round"])),
            lambda batch: task.loss(batch, bench.trunk),
            length,
            self.config.train,
            seed=seeds.split(self.config.seed, config["round"], self.partition_id, "training"),
        )
        arrays = bench.adapter.arrays()
        self._keep_at_home(bench, arrays)
        metrics = {key.replace("_", "-"): value for key, value in asdict(report).items()}
        metrics |= _gate_metrics(bench) | self._place()
        if config.get("last"):  # this very adapter is averaged next: the aggregation drop's base
            scores = self._score(bench, bench.trunk)
            metrics |= {f"local-{key}": value for key, value in scores.items()}
        return [arrays[name] for name in bench.shared_names()], metrics.pop("examples"), metrics

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Score this client's test rows with the arrays that came, or with the frozen model."""
        if config.get("frozen"):
            bench = workbench(self.config)
            with bench.adapter.off():  # and its window: the trunk is of another model
                metrics = self._score(bench, None)
        else:
            bench = self._bench(parameters, config)
            metrics = self._score(bench, bench.trunk)
        examples = int(metrics.pop(border.WEIGHT))
        return metrics["gold-ce-sum"] / examples, examples, metrics

    def _bench(self, parameters: NDArrays, config: dict[str, Any]) -> Workbench:
        """Check what came against the manifest, then set it on the adapter."""
        bench = workbench(self.config)
        if config["manifest"] != bench.manifest.digest():
            raise Refusal(
                f"partition {self.partition_id}: manifest {str(config['manifest'])[:16]} came,"
                f" {bench.manifest.digest()[:16]} is this node's; use the same model, tokenizer,"
                " recipe and fedloom version on every node"
            )
        arrays = dict(zip(self.array_names, parameters, strict=True))
        bench.manifest.check_arrays(arrays)
        bench.adapter.reset()
        if _AT_HOME in self.context.state:
            kept = self.context.state.array_records[_AT_HOME]
            bench.adapter.load(border.unpack_arrays(kept))
        bench.adapter.load(arrays)
        return bench

    def _keep_at_home(self, bench: Workbench, arrays: dict[str, Any]) -> None:
        own = {name: array for name, array in arrays.items() if name not in bench.manifest.arrays}
        if own:
            self.context.state[_AT_HOME] = border.pack_arrays(own)

    def _task(self, bench: Workbench) -> Task:
        return Task(self.config, bench.base, self.partition_id)

    def _score(self, bench: Workbench, trunk: Trunk | None) -> dict[str, Any]:
        metrics = self._task(bench).score(trunk)
        return {border.WEIGHT: metrics.pop("examples"), **metrics}

    def _place(self) -> dict[str, int]:
        """Return where this was computed, as numbers: metrics carry nothing else."""
        first = visible_gpus().split(",")[0]
        gpu = int(first) if first.isdigit() else -1
        return {"gpu": gpu, "pid": os.getpid(), "base-loads": bases_loaded()}


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
