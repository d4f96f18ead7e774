# SPDX-License-Identifier: Apache-2.0
"""``fedloom faast forget``: take a client out of the weights that a run of FAAST left."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from safetensors.numpy import load_file

from fedloom.config import RunConfig
from fedloom.disk import held, sweep
from fedloom.errors import Refusal
from fedloom.rules.candidates import candidates
from fedloom.rules.membership import membership_auc
from fedloom.rules.revisions import Contributions
from fedloom.simulations.folder import RunFolder
from fedloom.simulations.resume import LOCK
from fedloom.strategies.checkpoint import FOLDER as CHECKPOINTS
from fedloom.strategies.checkpoint import Checkpoint, Checkpoints, State
from fedloom.strategies.faast import WEIGHTS, gram_of
from fedloom.strategies.groups import FOLDER as GROUPS
from fedloom.strategies.shelf import Choice, SumsShelf, summed_arrays
from fedloom.wire import Manifest, Update, arrays_digest

CERTIFIED = 1e-12
"""Largest relative difference between deleted and retrained weights that is accepted."""


@dataclass(frozen=True)
class Forgotten:
    """A client's rows out of the weights, and how sure that is."""

    weights: NDArray[np.float64]
    held: Contributions
    difference: float
    """Largest difference to weights retrained without the client, over the largest weight."""
    retrained: NDArray[np.float64]
    same: bool
    """Whether sums and weights are those of retraining to the last bit."""


def without(shelf: SumsShelf, client: int, revision: int) -> tuple[Forgotten, Choice]:
    """Take one client's sums out of the total, solve, and solve again from the others' sums alone.

    Raises
    ------
    Refusal
        If this revision of the client is not in the sums, or a client's sums were not kept.
    """
    held, choice = shelf.restore()
    held.delete(client, revision, shelf.find(client, revision))
    anew = _added_anew(shelf, held)
    deleted, retrained = (_solved(held.total, choice), _solved(anew, choice))
    largest = float(np.abs(retrained).max()) or 1.0
    difference = float(np.abs(deleted - retrained).max()) / largest
    sums = [arrays_digest(summed_arrays(total)) for total in (held.total, anew)]
    same = sums[0] == sums[1] and deleted.tobytes() == retrained.tobytes()
    return Forgotten(deleted, held, difference, retrained, same), choice


def _added_anew(shelf: SumsShelf, held: Contributions) -> Update:
    """Add the sums of those who stay, as if nobody else had ever been there."""
    fresh = Contributions()
    for partition in held:
        entry = held[partition]
        update = shelf.find(partition, entry.revision)
        if update is None:
            raise Refusal(
                f"client {partition}'s sums were not kept, so deleting cannot be held against"
                " retraining; run with faast.keep-sums = true"
            )
        fresh.add(partition, entry.revision, update)
        if fresh[partition] != entry:
            raise Refusal(f"client {partition}'s kept sums are not those that were added")
    return fresh.total


def _solved(total: Update, choice: Choice) -> NDArray[np.float64]:
    (found,) = candidates(gram_of(total), [choice.alpha], choice.ridge)
    return found.weights


def forget(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    client: Annotated[int, typer.Option(help="Its partition id.")],
    revision: Annotated[int, typer.Option(help="Which of its contributions.")],
    membership: Annotated[
        bool,
        typer.Option("--membership", help="Score how well its rows are told from unseen ones."),
    ] = False,
) -> None:
    """Take a client out of a run's fast weights, and certify that this equals retraining."""
    place = _place_of(folder, client)
    with held(folder / LOCK):  # a run that is at work would put the client back
        _forget(folder, place, client, revision, membership)


def _forget(folder: Path, place: Path, client: int, revision: int, membership: bool) -> None:
    shelf = SumsShelf(place / "sums")
    manifest = Manifest.from_json(_text(place / "manifest.json"))
    before = _text(place / "adapter" / "digest.txt").strip()
    started = time.perf_counter()
    found, choice = without(shelf, client, revision)
    seconds = time.perf_counter() - started
    typer.echo(f"largest relative difference to retraining: {found.difference:.3g}")
    config = RunConfig.from_toml(folder / "config.toml")
    if not found.difference <= CERTIFIED:
        typer.echo(f"above {CERTIFIED:.0e}: nothing was changed", err=True)
        raise typer.Exit(1)
    if config.faast.exact_bits and not found.same:
        typer.echo("not the same bits as retraining: nothing was changed", err=True)
        raise typer.Exit(1)
    last = _checkpoint_without(folder, place, shelf, found)
    scored = _membership(config, manifest, place, client, found) if membership else {}
    run = RunFolder(place)
    after = run.keep_adapter({WEIGHTS: found.weights}, manifest, "")
    run.keep_manifest(manifest)
    shelf.keep(found.held, choice)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # their totals hold the client's sums
    if last is not None:
        Checkpoints(folder / CHECKPOINTS).write(last)
    shelf.prune({(p, found.held[p].revision) for p in found.held})  # earlier revisions, too
    sweep(place / "sums")
    certificate = {
        "client": client,
        "revision": revision,
        "time": datetime.now(UTC).isoformat(),
        "seconds": seconds,
        "difference": found.difference,
        "same-bits": found.same,
        **({"membership": scored} if scored else {}),
        "sums-after": arrays_digest(summed_arrays(found.held.total)),
        "rows-left": found.held.total.weight,
        "clients-left": len(found.held),
        "alpha": choice.alpha,
        **({"group": place.name} if place != folder else {}),
        "weights-before": before,
        "weights-after": after,
        "recipe": config.digest(),
    }
    with (folder / "forgotten.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(certificate) + "\n")
    typer.echo(f"{len(found.held)} clients and {found.held.total.weight:.0f} rows are left")
    if scored:
        told = ", ".join(f"{key} {scored[key]:.3f}" for key in ("before", "after", "retrained"))
        typer.echo(f"its rows told from unseen ones (AUC, 0.5 is not at all): {told}")
    typer.echo(f"weights: {place / 'adapter' / 'weights.safetensors'}")
    typer.echo(f"certificate: {folder / 'forgotten.jsonl'}")


def _checkpoint_without(
    folder: Path, place: Path, shelf: SumsShelf, found: Forgotten
) -> Checkpoint | None:
    """Return the run's last checkpoint without the client, from which the run can go on.

    There is none if the shelf is ahead of it: the round that was torn had brought other sums.
    """
    last, _ = Checkpoints(folder / CHECKPOINTS).newest()
    head = "" if place == folder else f"{place.name}."
    part = f"{head}sums"
    if last is None or part not in last.parts:
        return None
    tree, before = dict(last.parts[part].tree), shelf.restore()[0]
    if tree["clients"] != before.to_tree():
        return None
    tree |= {"clients": found.held.to_tree(), "gone": found.held.gone_tree()}
    tree["weight"] = found.held.total.weight
    sums = State(summed_arrays(found.held.total), tree)
    name = f"{head.replace('.', '/')}{WEIGHTS}"
    arrays = {**last.arrays, name: found.weights}
    return replace(last, arrays=arrays, parts={**last.parts, part: sums})


def _membership(
    config: RunConfig, manifest: Manifest, place: Path, client: int, found: Forgotten
) -> dict[str, float]:
    """Score the client's rows before and after, where this machine has them.

    Raises
    ------
    Refusal
        If it has not: the rows of nodes are the nodes' own.
    """
    from fedloom.clients.keys import key_bench  # an encoder: only where it is asked for

    bench = key_bench(config, config.faast.encoder_of(client))
    if bench.manifest.digest() != manifest.digest():
        raise Refusal(
            f"--membership: this machine makes other keys than client {client} did (another encoder"
            " or other classes); nothing was changed"
        )
    summed, unseen = (bench.side(client, side) for side in ("summed", "test"))
    before = load_file(place / "adapter" / f"{WEIGHTS}.safetensors")[WEIGHTS]
    sides = (summed.unit(), summed.labels), (unseen.unit(), unseen.labels)
    scored = {"rows": float(len(summed)), "unseen": float(len(unseen))}
    for name, weights in (
        ("before", before),
        ("after", found.weights),
        ("retrained", found.retrained),
    ):
        scored[name] = membership_auc(weights, *sides)
    return scored


def _place_of(folder: Path, client: int) -> Path:
    """Return where a client's sums are: the run's folder, or that of the client's group."""
    places = sorted(p.parent for p in (folder / GROUPS).glob("*/sums")) or [folder]
    if not (places[0] / "sums").is_dir():
        raise Refusal(f"no sums in {folder}; expected a folder that a run of method faast left")
    if places == [folder]:
        return folder
    held = {place: SumsShelf(place / "sums").restore()[0] for place in places}
    for place, contributions in held.items():
        if client in contributions:
            return place
    known = ", ".join(str(p) for p in sorted(p for found in held.values() for p in found))
    raise Refusal(f"client {client} is in no group's sums; expected one of {known}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"{path} cannot be read; expected a folder that a run of method faast left"
        ) from error
