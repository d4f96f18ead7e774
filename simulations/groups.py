# SPDX-License-Identifier: Apache-2.0
"""A run of groups in a run's folder: ``groups/NAME/`` is to a group what the folder is to a run.

There lie its manifest, its weights and its sums; recipe, journal and checkpoints are the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.simulations.folder import RunFolder
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.grouped import Grouped
from fedloom.strategies.groups import FOLDER, Group
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import Roster
from fedloom.wire import Manifest

Keep = Callable[[int, dict[str, NDArray[Any]]], None]


def announce(journal: Journal, groups: Sequence[Group]) -> None:
    """Tell who is in which group."""
    journal.event("groups", round=0, groups=[group.told() for group in groups])


def begin(
    method: type[AdapterStrategy],
    folder: RunFolder,
    journal: Journal,
    group: Group,
    manifest: Manifest,
) -> None:
    """Make a group's folder once a node has sent its manifest.

    Raises
    ------
    Refusal
        If the manifest is not the one that put the node into this group.
    """
    if manifest.digest() != group.manifest:
        raise Refusal(
            f"group {group.name} ({group.encoder}): a node sent manifest {manifest.digest()[:16]}"
            f" and had told {group.manifest[:16]}; use the same fedloom version on every node"
        )
    journal.event("adapter", **method.sizes(manifest))
    _folder(folder, group.name).keep_manifest(manifest)


def together(
    method: type[AdapterStrategy],
    config: RunConfig,
    folder: RunFolder,
    journal: Journal,
    roster: Roster,
    groups: Sequence[Group],
    manifests: Mapping[str, Manifest],
    token: str | None = None,
) -> Grouped:
    """Build the strategy of a run of groups."""
    pairs = {group.name: (group, manifests[group.name]) for group in groups}

    def keep_of(group: Group, manifest: Manifest) -> Keep:
        place = _folder(folder, group.name)

        def keep(server_round: int, weights: dict[str, NDArray[Any]]) -> None:
            place.keep_adapter(weights, manifest, "")

        return keep

    return Grouped(method, pairs, config, roster, journal, keep_of, token)


def keeping(folder: RunFolder, manifests: Mapping[str, Manifest]) -> Keep:
    """Return what writes all groups' arrays, as a checkpoint holds them, to the groups' folders."""

    def keep(server_round: int, arrays: dict[str, NDArray[Any]]) -> None:
        for name, manifest in manifests.items():
            head = f"{name}/"
            own = {n.removeprefix(head): a for n, a in arrays.items() if n.startswith(head)}
            _folder(folder, name).keep_adapter(own, manifest, "")

    return keep


def _folder(folder: RunFolder, name: str) -> RunFolder:
    place = folder.path / FOLDER / name
    place.mkdir(parents=True, exist_ok=True)
    return RunFolder(place)
