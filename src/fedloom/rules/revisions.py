# SPDX-License-Identifier: Apache-2.0
"""Whose sums are in a total, in which revision: what may be added, replaced and deleted.

A total of sums takes any contribution, twice as well as once; this ledger is what makes adding
idempotent and deleting honest.  It holds a digest of each contribution and not the contribution; of
a deleted one nothing but the number of its revision, which the same client must exceed to come
back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedloom.errors import Refusal
from fedloom.wire import Update, arrays_digest


@dataclass(frozen=True)
class Entry:
    """One client's contribution."""

    revision: int
    count: float
    """Rows; 0 if they were added under masks, and are known with the others' only."""
    digest: str
    """SHA-256 over its sums and their count; empty under masks."""


def digest_of(update: Update) -> str:
    """Hash one contribution, to the bit."""
    return arrays_digest({**update.whole(), "count": np.array([update.weight])})


class Contributions:
    """A total of sums that knows what it is made of.

    >>> sums = {p: Update.summed({"gram": np.array([p, 0.1])}, 5, p) for p in (1.0, 2.0)}
    >>> held = Contributions()
    >>> for partition, update in sums.items():
    ...     held.add(int(partition), 1, update)
    >>> held.delete(1, 1, sums[1.0])
    >>> held.total.whole()["gram"], held.total.weight, sorted(held)
    (array([2. , 0.1]), 5.0, [2])
    """

    def __init__(
        self,
        total: Update | None = None,
        entries: Mapping[int, Entry] | None = None,
        gone: Mapping[int, int] | None = None,
    ) -> None:
        self._total, self._entries = total, dict(entries or {})
        self.gone = dict(gone or {})
        """Partition -> the last revision of it that was deleted."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, partition: int) -> bool:
        return partition in self._entries

    def __getitem__(self, partition: int) -> Entry:
        return self._entries[partition]

    @property
    def total(self) -> Update:
        """The sum of all contributions.

        Raises
        ------
        ValueError
            If there is none.
        """
        if self._total is None or not self._entries:
            raise ValueError("no contribution: there is nothing to solve")
        return self._total

    def check(self, partition: int, revision: int, digest: str) -> Entry | None:
        """Tell what a contribution would replace, if anything.

        Raises
        ------
        Refusal
            If it was here before, under this or another client's name, or is no later revision
            than one that is held or was deleted.
        """
        if revision < 1:
            raise Refusal(f"client {partition}: revision {revision} came, expected 1 or above")
        for other, entry in self._entries.items():
            if entry.digest == digest:
                whose = "its own" if other == partition else f"client {other}'s"
                raise Refusal(
                    f"client {partition}: these sums were added before, as {whose} revision"
                    f" {entry.revision}; a contribution counts once"
                )
        held = self._entries.get(partition)
        if held is not None and revision <= held.revision:
            raise Refusal(
                f"client {partition}: revision {revision} came, revision {held.revision} is held;"
                " other sums need a higher revision"
            )
        if held is None and revision <= self.gone.get(partition, 0):
            raise Refusal(
                f"client {partition}: revision {revision} came, revision {self.gone[partition]} was"
                " deleted; it may join again with a higher revision"
            )
        return held

    def is_news(self, partition: int, revision: int) -> bool:
        """Tell whether a client's rows of this revision are neither in the total nor deleted."""
        held = self._entries.get(partition)
        if held is None and partition not in self.gone:
            return True
        return revision > (held.revision if held is not None else self.gone[partition])

    def add(self, partition: int, revision: int, update: Update, old: Update | None = None) -> None:
        """Add a client's sums, in place of its ``old`` ones if it has some in the total.

        Raises
        ------
        Refusal
            As ``check`` does, or if there are old sums and ``old`` are not they.
        """
        digest = digest_of(update)
        held = self.check(partition, revision, digest)
        if held is not None:
            self._check_old(partition, held, old)
            self._put(-old if old is not None else None)
        self._put(update)
        self._entries[partition] = Entry(revision, update.weight, digest)

    def add_together(self, partitions: Collection[int], update: Update) -> None:
        """Add sums of which only the sum is known.

        Raises
        ------
        Refusal
            If one of these clients is in the total.
        """
        for partition in partitions:
            if partition in self:
                raise Refusal(
                    f"client {partition} is in the sums under masks already: there is nothing to"
                    " replace; start a new run"
                )
        self._put(update)
        self._entries |= dict.fromkeys(partitions, Entry(1, 0.0, ""))

    def delete(self, partition: int, revision: int, old: Update | None) -> None:
        """Take a client's sums out of the total: ``old`` must be they, to the bit.

        Raises
        ------
        Refusal
            If this client, or this revision of it, is not in the total, or ``old`` is not what was
            added.
        """
        held = self._entries.get(partition)
        if held is None:
            known = ", ".join(map(str, sorted(self._entries))) or "nobody"
            raise Refusal(f"client {partition} is not in these sums; expected one of {known}")
        if held.revision != revision:
            raise Refusal(
                f"client {partition}: revision {revision} is not in these sums, revision"
                f" {held.revision} is; nothing was deleted"
            )
        if len(self._entries) == 1:
            raise Refusal(f"client {partition} is the only one in these sums; delete the folder")
        self._check_old(partition, held, old)
        self._put(-old if old is not None else None)
        del self._entries[partition]
        self.gone[partition] = revision

    def to_tree(self) -> dict[str, dict[str, Any]]:
        """Return the entries as plain JSON."""
        return {str(partition): asdict(entry) for partition, entry in self._entries.items()}

    def gone_tree(self) -> dict[str, int]:
        """Return the deleted clients' revisions as plain JSON."""
        return {str(partition): revision for partition, revision in self.gone.items()}

    @classmethod
    def from_tree(
        cls,
        total: Update | None,
        tree: Mapping[str, Mapping[str, Any]],
        gone: Mapping[str, Any] | None = None,
    ) -> Contributions:
        """Read what ``to_tree`` and ``gone_tree`` made, for the total that they belong to."""
        entries = {
            int(name): Entry(int(e["revision"]), float(e["count"]), str(e["digest"]))
            for name, e in tree.items()
        }
        return cls(total, entries, {int(name): int(r) for name, r in (gone or {}).items()})

    def _check_old(self, partition: int, held: Entry, old: Update | None) -> None:
        if not held.digest:
            raise Refusal(
                f"client {partition}: its sums came under masks, so nobody but the client has them;"
                " it would have to send them again, bare, or the others run again without it"
            )
        if old is None:
            raise Refusal(
                f"client {partition}: its sums of revision {held.revision} were not kept:"
                " let the client send them again, or (bare sums) set faast.keep-sums = true and"
                " run anew"
            )
        if digest_of(old) != held.digest:
            raise Refusal(
                f"client {partition}: these are not its sums of revision {held.revision}; expected"
                f" digest {held.digest[:16]}, {digest_of(old)[:16]} came"
            )

    def _put(self, update: Update | None) -> None:
        if update is not None:
            self._total = update if self._total is None else self._total + update
