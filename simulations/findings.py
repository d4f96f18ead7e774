# SPDX-License-Identifier: Apache-2.0
"""What a run found: the numbers in the folder that it left, counted and given intervals.

Nothing is worded or drawn here; ``report`` does that.  What a run did not record is absent, and
no reason to fail: a run that broke off needs its report most.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.intervals import Interval, worst_decile
from fedloom.rules import without_controls
from fedloom.simulations.fast_facts import FastFacts, fast_facts
from fedloom.simulations.refine_facts import RefinedFacts, refined_facts
from fedloom.simulations.scores import (
    FOUR,
    MEASURES,
    Depth,
    Drop,
    Lowered,
    Row,
    Score,
    compare,
    lowered,
    macros,
    read_score,
)
from fedloom.simulations.traffic import Traffic, read_traffic
from fedloom.wire import Manifest

PHASES = {"frozen": "frozen", "local": "local", "federated": "evaluate"}  # adapter -> phase
DONE = ("completed", "finished", "done", "ok")


@dataclass(frozen=True, kw_only=True)
class Client:
    """Everything that a run recorded about one client."""

    partition: int
    name: str
    train_rows: int | None
    test_rows: int | None
    scores: dict[str, Score]
    """Adapter -> its score in the last round that has one."""
    curves: dict[str, dict[int, float]]
    """Measure -> round -> mean; round 0 is the frozen backbone."""
    training: dict[int, Row]
    """Round -> the row of its local training."""
    drop: Drop | None

    @property
    def chance(self) -> dict[str, float]:
        """``accuracy`` and ``letter-ce`` of guessing, for the options that its rows have."""
        found = [self.scores[how].chance for how in ("federated", "frozen") if how in self.scores]
        return found[0] if found else FOUR

    def at_depth(self, depth: int) -> dict[str, Depth]:
        """Return its scores on prompts of one length, by adapter."""
        return {how: s.depths[depth] for how, s in self.scores.items() if depth in s.depths}

    def total(self, key: str) -> float | None:
        """Sum one number over the rounds of training."""
        found = [row[key] for row in self.training.values() if key in row]
        return sum(found) if found else None

    def gate(self, key: str) -> float | None:
        """Return ``gate-mean`` or ``gate-max`` as last seen."""
        found = [row[key] for _, row in sorted(self.training.items()) if key in row]
        return found[-1] if found else None


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The numbers of a report, before any wording."""

    name: str
    config: RunConfig | None
    manifest: Manifest | None
    status: str
    reason: str
    rounds_done: int
    clients: tuple[Client, ...]
    macros: dict[str, dict[str, Interval]]
    """Adapter -> measure -> mean over clients, each with the same weight."""
    macro_clients: dict[str, int]
    lowered: dict[str, Lowered]
    """``gold-ce`` and ``letter-ce`` -> how many clients gained."""
    parameters: dict[str, int]
    """``LoRA`` and ``memory`` -> trainable numbers."""
    traffic: Traffic
    failures: tuple[Row, ...]
    aggregation_errors: dict[int, float]
    environment: dict[str, str]
    notes: tuple[str, ...]
    """What a reader must know before comparing columns."""
    fast: FastFacts | None = None
    """FAAST's solution, if that was the method."""
    privacy: Row = field(default_factory=dict)
    """What the server saw of FedNL's updates, and at what price; empty without ``privacy``."""
    refined: RefinedFacts | None = None
    """FedRefine's pairs, if that was the method."""

    @property
    def succeeded(self) -> bool:
        """Whether the run says that it reached its end."""
        return self.status.rpartition(":")[2] in DONE  # Flower says finished:completed

    @property
    def below_chance(self) -> Lowered:
        """In how many clients the federated letter CE is better than guessing."""
        found = [
            (score.measured["letter-ce"], score.chance["letter-ce"])
            for c in self.clients
            if (score := c.scores.get("federated")) and "letter-ce" in score.measured
        ]
        return Lowered(
            compared=len(found),
            lower=sum(at.value < chance for at, chance in found),
            apart=sum(at.high < chance for at, chance in found),
        )

    @property
    def raised_accuracy(self) -> Lowered:
        """In how many clients the federated accuracy is above the frozen one."""
        found = [
            (c.scores["frozen"].measured["accuracy"], c.scores["federated"].measured["accuracy"])
            for c in self.clients
            if all(
                how in c.scores and "accuracy" in c.scores[how].measured
                for how in ("frozen", "federated")
            )
        ]
        return Lowered(
            compared=len(found),
            lower=sum(ours.value > base.value for base, ours in found),
            apart=sum(ours.low > base.high for base, ours in found),
        )

    @property
    def chance(self) -> dict[str, float]:
        """Average the clients' chance lines, each client counting the same."""
        n = len(self.clients)
        return {
            measure: math.fsum(c.chance[measure] for c in self.clients) / n if n else four
            for measure, four in FOUR.items()
        }

    @property
    def four_options(self) -> bool:
        """Whether every client's rows have four options, as MMLU's do."""
        return all(
            math.isclose(c.chance[measure], four)
            for c in self.clients
            for measure, four in FOUR.items()
        )

    @property
    def depths(self) -> tuple[int, ...]:
        """Prompt lengths that some client told apart."""
        return tuple(
            sorted({d for c in self.clients for score in c.scores.values() for d in score.depths})
        )

    def worst(self, how: str, measure: str) -> tuple[float, tuple[str, ...]] | None:
        """Average a measure over the worst tenth of the clients, and name them."""
        found = [
            (c.name, c.scores[how].measured[measure].value)
            for c in self.clients
            if how in c.scores and measure in c.scores[how].measured
        ]
        if not found:
            return None
        value, at = worst_decile([v for _, v in found], lowest=not measure.endswith("-ce"))
        return value, tuple(found[i][0] for i in at)

    def client_name(self, partition: int | None) -> str:
        """Name a partition, known or not."""
        if partition is None or partition < 0:
            return "unknown node"
        names = {client.partition: client.name for client in self.clients}
        return names.get(partition, f"client {partition}")

    def mean_drop(self, key: str) -> tuple[float, int] | None:
        """Average one field of ``Drop`` over the clients that have it, and count them."""
        found = [value for c in self.clients if (value := getattr(c.drop, key, None)) is not None]
        return (math.fsum(found) / len(found), len(found)) if found else None

    def mean_curve(self, measure: str) -> dict[int, float]:
        """Average the clients' curves in rounds that scored every one of them."""
        curves = [curve for c in self.clients if (curve := c.curves.get(measure))]
        rounds = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        return {r: math.fsum(c[r] for c in curves) / len(curves) for r in sorted(rounds)}


def report_data(folder: Path) -> ReportData:
    """Read a run's folder.

    Raises
    ------
    Refusal
        If there is no such folder, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise Refusal(f"no run folder at {folder}; expected what `fedloom run` leaves")
    recipe, arrays = folder / "config.toml", folder / "manifest.json"
    config = RunConfig.from_toml(recipe) if recipe.exists() else None
    manifest = Manifest.from_json(arrays.read_text("utf-8")) if arrays.exists() else None
    events, metrics = _lines(folder / "events.jsonl"), _lines(folder / "metrics.jsonl")
    failures = tuple(row for row in events if row.get("event") == "client-failed")
    clients = _clients(_json(folder / "partition.json"), metrics, failures)
    traffic = read_traffic(_lines(folder / "ledger.jsonl"))
    end: Row = next((row for row in reversed(events) if row.get("event") == "end"), {})
    scored = {how: [c.scores[how] for c in clients if how in c.scores] for how in PHASES}
    errors = {int(e["round"]): float(e["agg-error"]) for e in events if "agg-error" in e}
    return ReportData(
        name=config.name if config else folder.name,
        config=config,
        manifest=manifest,
        status=str(end.get("status", "no end recorded")),
        reason=str(end.get("reason") or ""),
        rounds_done=max((int(m["round"]) for m in metrics if m["phase"] == "train"), default=0),
        clients=clients,
        macros={how: macros(scores) for how, scores in scored.items()},
        macro_clients={how: len(scores) for how, scores in scored.items()},
        lowered={
            measure: lowered([c.scores for c in clients], measure)
            for measure in ("gold-ce", "letter-ce")
        },
        parameters=_parameters(manifest),
        traffic=traffic,
        failures=failures,
        aggregation_errors=errors,
        environment=dict(_flat(_json(folder / "environment.json"))),
        notes=tuple(_notes(clients, manifest if _sent_whole(config) else None, traffic)),
        fast=fast_facts(config, events),
        privacy=next((e for e in reversed(events) if e.get("event") == "privacy"), {}),
        refined=refined_facts(config, events),
    )


def _clients(partition: Row, metrics: Sequence[Row], failures: Sequence[Row]) -> tuple[Client, ...]:
    listed = {int(c.get("partition", i)): c for i, c in enumerate(partition.get("clients", []))}
    found: dict[int, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    names: dict[int, str | None] = {}
    for row in metrics:  # a resumed run may tell a round twice: the later row stands
        found[int(row["partition"])][row["phase"]][int(row["round"])] = row
        names[int(row["partition"])] = row.get("name")
    failed = {(int(f.get("round", -1)), f.get("partition")) for f in failures}
    return tuple(
        _client(
            k, listed.get(k, {"name": names.get(k)}), found[k], {r for r, p in failed if p == k}
        )
        for k in sorted(listed.keys() | names.keys())
    )


def _client(
    k: int, listed: Row, phases: Mapping[str, Mapping[int, Row]], failed: set[int]
) -> Client:
    rows = {how: sorted(phases.get(phase, {}).items()) for how, phase in PHASES.items()}
    by_round = {how: {r: s for r, row in rows[how] if (s := read_score(r, row))} for how in rows}
    whole = by_round["frozen"] | by_round["federated"]
    means = {
        measure: {r: s.measured[measure].value for r, s in whole.items() if measure in s.measured}
        for measure in MEASURES
    }
    return Client(
        partition=k,
        name=str(listed.get("name") or f"client {k}"),
        train_rows=len(listed["train"]) if "train" in listed else None,
        test_rows=len(listed["test"]) if "test" in listed else None,
        scores={how: scores[max(scores)] for how, scores in by_round.items() if scores},
        curves={measure: curve for measure, curve in means.items() if curve},
        training=dict(sorted(phases.get("train", {}).items())),
        drop=compare(by_round["local"], by_round["federated"], failed),
    )


def _parameters(manifest: Manifest | None) -> dict[str, int]:
    if manifest and manifest.method == "faast":
        return {"fast weights": sum(math.prod(shape) for shape, _ in manifest.arrays.values())}
    if manifest and manifest.method == "fedrefine" and manifest.arrays:
        return {"fuser": sum(math.prod(shape) for shape, _ in manifest.arrays.values())}
    counts = {"LoRA": 0, "memory": 0}
    for name, (shape, _) in without_controls(manifest.arrays if manifest else {}).items():
        group = "memory" if ".memory." in f".{name}" else "LoRA"
        counts[group] += math.prod(shape)
    return counts if manifest else {}


def _sent_whole(config: RunConfig | None) -> bool:
    """Whether every training message carries just the manifest's arrays."""
    if config is None:
        return True
    if config.method == "faast" or config.refine.solve:  # sums go up, what is solved goes down
        return False
    parts = config.server.rule in ("flora", "fedex", "rolora") or config.lora.own_ranks()
    return not parts and config.wire.dtype == "float32"


def _notes(clients: Iterable[Client], manifest: Manifest | None, traffic: Traffic) -> Iterable[str]:
    for client in clients:
        sizes = {how: score.examples for how, score in client.scores.items()}
        if client.test_rows is not None:
            sizes["the partition"] = client.test_rows
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{how} {n}" for how, n in sizes.items())
            yield f"{client.name}: not the same number of test rows everywhere ({told})."
        for how in ("frozen", "federated"):
            if how not in client.scores:
                yield f"{client.name}: no {how} score; it is missing from that macro mean."
        if client.drop is None and "local" in client.scores:
            yield f"{client.name}: its last local adapter has no federated score of the same round."
    claimed = manifest.nbytes() if manifest else 0
    if traffic.payloads and manifest and traffic.payloads != (claimed,):
        yield (
            f"The manifest's arrays take {claimed} B, but training messages carried"
            f" {', '.join(map(str, traffic.payloads))} B of arrays."
        )


def _lines(path: Path) -> list[Row]:
    text = path.read_text("utf-8") if path.exists() else ""
    whole, _, torn = text.rpartition("\n")
    rows = [_parsed(line, f"{path.name} line {n}") for n, line in enumerate(whole.split("\n"), 1)]
    with suppress(json.JSONDecodeError):  # a run that was killed may leave half a line
        rows.append(json.loads(torn))
    return [row for row in rows if isinstance(row, dict)]


def _json(path: Path) -> Row:
    tree = _parsed(path.read_text("utf-8"), path.name) if path.exists() else {}
    if not isinstance(tree, dict):
        raise Refusal(f"{path.name} holds no JSON object; was it edited by hand?")
    return tree


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text or "null")
    except json.JSONDecodeError as error:
        raise Refusal(f"{where} is not JSON: {error}") from error


def _flat(tree: Row, prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        elif isinstance(value, list):
            yield prefix + key, " ".join(map(str, value))
        else:
            yield prefix + key, str(value)
