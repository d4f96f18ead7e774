# SPDX-License-Identifier: Apache-2.0
"""The ServerApp: roll call, one node's initial adapter, the method's rounds, the run's folder.

The server needs neither torch nor the frozen model: what it must know of the adapter comes from
one node, which makes the same bytes as any other node would with this seed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from logging import INFO
from typing import Any

from flwr.app import Context, Message
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedloom import border
from fedloom.config import RunConfig
from fedloom.disk import held
from fedloom.errors import Refusal
from fedloom.secure.channel import MARK
from fedloom.simulations import groups, resume
from fedloom.simulations.folder import RunFolder
from fedloom.simulations.starting import initial_adapter
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.agreement import agree, check_properties, partition_told
from fedloom.strategies.checkpoint import FOLDER, Checkpoint, Checkpoints, Torn
from fedloom.strategies.choosing import SOLVING, strategy_of
from fedloom.strategies.faast import FAAST
from fedloom.strategies.fednl import FedNL
from fedloom.strategies.fuser_sums import SolveFuser
from fedloom.strategies.grouped import Grouped, manifests_in
from fedloom.strategies.groups import Group, GroupJournal, check_same, groups_of
from fedloom.strategies.journal import Journal
from fedloom.strategies.later_calls import later_calls
from fedloom.strategies.refine import FedRefine
from fedloom.strategies.roster import ReplyStream, Roster, roll_call, wait_for_nodes
from fedloom.wire import Manifest

STRATEGIES: dict[str, type[AdapterStrategy]] = {
    "fednl": FedNL,
    "faast": FAAST,
    "fedrefine": FedRefine,
    SOLVING: SolveFuser,
}

app = ServerApp()  # a plain assignment: Flower looks for it by syntax


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a recipe; whatever happens, the folder's events say how it ended."""
    config = RunConfig.from_flower(context.run_config)
    folder = RunFolder.of(config)
    with held(folder.path / resume.LOCK, seconds=20.0):
        if config.resume and resume.is_finished(config, resume.stand_of(folder.path)):
            return
        journal = Journal(folder.path)
        try:
            stream = ReplyStream(grid, config.sampling.reply_seconds)
            reason = run(stream, config, folder, journal)
        except Refusal as refusal:
            _last_words(journal, "refused", reason=str(refusal))
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _last_words(journal, "end", status="failed", reason=reason)
            raise
        journal.event("end", status="completed", reason=reason)
        Checkpoints(folder.path / FOLDER).keep_last()


def _last_words(journal: Journal, name: str, **values: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full, and that be what it died of
        journal.event(name, **values)


def run(grid: ReplyStream, config: RunConfig, folder: RunFolder, journal: Journal) -> str:
    """Carry out all rounds on whatever grid this is, or those that a stopped run still needs.

    Returns
    -------
    str
        Why it stopped before its last round, if it did.
    """
    strategy_of(config, STRATEGIES)  # refused before anything is written
    stand = resume.take_up(config, folder.path, journal) if config.resume else None
    folder.begin(config.replaced(refine__question=""))  # a text has no place in a run's folder
    if stand is not None and stand.checkpoint is not None:
        strategy = _go_on(grid, config, folder, journal, stand, stand.checkpoint)
    else:
        torn = stand.torn if stand is not None else ()
        strategy = _begin(grid, config, folder, journal, torn)
    if answers := [row for row in journal.rows["events"] if row["event"] == "answer"]:
        for row in answers:
            _tell_answer(row, len(answers))
        return ""
    if not any(row["round"] == strategy.budget.final for row in journal.of_phase("evaluate")):
        raise RuntimeError("no client could score the last round; its adapter is kept")
    return strategy.budget.reason


def _begin(
    grid: ReplyStream,
    config: RunConfig,
    folder: RunFolder,
    journal: Journal,
    torn: Iterable[Torn],
) -> AdapterStrategy:
    """Carry out all rounds."""
    method = strategy_of(config, STRATEGIES)
    journal.event(
        "start",
        method=config.method,
        rounds=config.rounds,
        clients=config.clients.count,
        seed=config.seed,
        folder=str(folder.path),
    )
    roster, agreed = _roster(grid, config, journal)
    folder.keep_partition(partition_told(roster, agreed))
    _announce(roster, journal)
    if found := groups_of(config, roster):
        return _begin_groups(grid, config, folder, journal, torn, roster, agreed, found)
    start = method.known_start()
    arrays, manifest, peft = start or initial_adapter(config, grid, roster, journal, agreed)
    folder.keep_manifest(manifest)
    if sizes := method.sizes(manifest):
        journal.event("adapter", **sizes)

    keep = _keeping(folder, manifest, peft)
    strategy = method(config, manifest, roster, journal, keep)
    strategy.resume(None, torn)
    strategy.checkpoint = resume.keeper(config, folder.path, strategy, agreed, peft)
    _call_again(strategy, grid, agreed)
    strategy.run(grid, arrays)
    return strategy


def _begin_groups(
    grid: ReplyStream,
    config: RunConfig,
    folder: RunFolder,
    journal: Journal,
    torn: Iterable[Torn],
    roster: Roster,
    agreed: dict[str, str],
    found: list[Group],
) -> AdapterStrategy:
    """Carry out all rounds with each encoder's nodes by themselves."""
    groups.announce(journal, found)
    method = strategy_of(config, STRATEGIES)
    arrays: dict[str, NDArray[Any]] = {}
    manifests: dict[str, Manifest] = {}
    for group in found:
        own = GroupJournal(journal, group.name)
        told = config, grid, group.roster, own, agreed, group.manifest
        start, manifest, _ = initial_adapter(*told)
        groups.begin(method, folder, own, group, manifest)
        manifests[group.name] = manifest
        arrays |= {f"{group.name}/{name}": array for name, array in start.items()}
    strategy = groups.together(method, config, folder, journal, roster, found, manifests)
    folder.keep_manifest(strategy.manifest)
    strategy.resume(None, torn)
    strategy.checkpoint = resume.keeper(config, folder.path, strategy, agreed, "")
    _call_again(strategy, grid, agreed)
    strategy.run(grid, arrays)
    return strategy


def _go_on(
    grid: ReplyStream,
    config: RunConfig,
    folder: RunFolder,
    journal: Journal,
    stand: resume.Stand,
    last: Checkpoint,
) -> AdapterStrategy:
    """Carry out what is left.

    The ledger says what the run's rounds took; asking anew who is there is told by the event.
    """
    asked = Journal()
    found, agreed = _roster(grid, config, asked)
    roster, manifest, about = resume.same_nodes(last, found, agreed), last.manifest(), last.about
    check_same(about["nodes"], roster)
    keep = _keeping(folder, manifest, about["peft"])
    token, method = about["run"], strategy_of(config, STRATEGIES)
    strategy = method(config, manifest, roster, journal, keep, token)
    if divided := groups_of(config, roster):
        held = manifests_in(last)
        divided.sort(key=lambda group: [*held].index(group.name))  # a newcomer moves none
        strategy = groups.together(method, config, folder, journal, roster, divided, held, token)
        keep = groups.keeping(folder, held)
    strategy.resume(last, stand.torn)
    strategy.checkpoint = resume.keeper(config, folder.path, strategy, agreed, about["peft"])
    _call_again(strategy, grid, agreed)
    if last.round:  # the folder's may be of a round that was cut
        keep(last.round, dict(last.arrays))
    journal.event(
        "resumed",
        after=last.round,
        rounds=config.rounds,
        note=stand.note,
        absent=sorted(roster.nodes.keys() - found.nodes.keys()),
        left_out=[row["reason"] for row in asked.rows["events"] if row["event"] == "client-failed"],
        roll_call_bytes=sum(row["bytes"] for row in asked.rows["ledger"]),
    )
    strategy.run(grid, last.arrays)
    return strategy


def _call_again(strategy: AdapterStrategy, grid: ReplyStream, agreed: dict[str, str]) -> None:
    """Let a strategy whose sums outlive a round ask before each later one who is there."""
    if isinstance(strategy, FAAST | Grouped):
        told = strategy.config, grid, agreed, strategy.journal
        strategy.roll_call = later_calls(*told)


def _keeping(
    folder: RunFolder, manifest: Manifest, peft: str
) -> Callable[[int, dict[str, NDArray[Any]]], None]:
    def keep(server_round: int, averaged: dict[str, NDArray[Any]]) -> None:
        folder.keep_adapter(averaged, manifest, peft)

    return keep


def _tell_answer(row: dict[str, Any], count: int) -> None:
    """Write an answer, one of so many, to the run's log, where whoever submitted it finds it."""
    told = {key: row[key] for key in ("partition", "model", "receipt", "sealed", "public")}
    told["answers"] = count
    log(INFO, "%s%s", MARK, json.dumps(told))


def _roster(
    grid: ReplyStream, config: RunConfig, journal: Journal
) -> tuple[Roster, dict[str, str]]:
    """Ask who is there; return what all nodes agree on, besides."""
    sampling = config.sampling
    nodes = wait_for_nodes(grid, config.clients.count, sampling.wait_seconds, sampling.min_nodes)

    def ask(node: int) -> Message:
        return Message(border.content(config={"partition": True}), node, "query.properties")

    found, dropped = roll_call(grid, nodes, ask, check_properties, journal)
    agreed = agree(config, found, dropped, journal)
    if (left := len(agreed.roster.nodes)) < sampling.min_nodes:
        raise RuntimeError(f"{left} of {len(nodes)} nodes answered the roll call")
    return agreed.roster, agreed.common


def _announce(roster: Roster, journal: Journal) -> None:
    shown = ("partition", "name", "train", "test", "held", "device", "visible-gpus", "pid")
    # A client whose sums would tell does not say how many rows they are of.
    said = [{"train": "hidden", **roster.properties[p]} for p in roster.partitions]
    nodes = [{key: told.get(key, "") for key in shown} for told in said]
    journal.event("nodes", nodes=nodes)
