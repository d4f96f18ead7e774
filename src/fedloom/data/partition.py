# SPDX-License-Identifier: Apache-2.0
"""``Partition``: who trains and who tests on which rows, with a seed and a hash.

Rows are named by a hash of their content, so that a node can check what it holds and a manifest
that is passed around tells nothing of the questions themselves.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol, TypeVar

from fedloom import seeds
from fedloom.config import DataConfig
from fedloom.data import bigbench, mmlu
from fedloom.data.questions import Question, distinct, load_questions
from fedloom.errors import Refusal


class Row(Protocol):
    """A question, whatever its task."""

    def row(self) -> str:
        """Identify the row by its content."""


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class Client:
    """The rows of one client."""

    name: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    subjects: dict[str, int]
    """Subject -> rows, train and test together."""


@dataclass(frozen=True)
class Partition:
    """Who holds what; a client's index is its partition id."""

    seed: int
    source: str
    """Where the questions were read; not part of the digest, as a copy is as good."""
    source_hash: str
    """SHA-256 over the distinct rows of the source."""
    clients: tuple[Client, ...]

    def to_json(self) -> str:
        """Write the partition as one canonical line."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Read what ``to_json`` wrote.

        Raises
        ------
        Refusal
            If the text is no partition, or names a row twice.
        """
        try:
            tree = json.loads(text)
            clients = tuple(_client(**client) for client in tree["clients"])
            found = cls(int(tree["seed"]), str(tree["source"]), str(tree["source_hash"]), clients)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refusal(f"not a partition manifest: {error!r}") from error
        counts = Counter(row for client in clients for row in (*client.train, *client.test))
        if twice := [row for row, count in counts.items() if count > 1]:
            raise Refusal(f"partition manifest names row {twice[0]} twice: make it anew")
        return found

    def digest(self) -> str:
        """SHA-256 of all but where the questions were read."""
        kept = asdict(self)
        del kept["source"]
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def check_same(self, other: Partition) -> None:
        """Refuse a partition that differs, naming the first thing that does."""
        for what, mine, theirs in _differences(self, other):
            if mine != theirs:
                raise Refusal(
                    f"partitions differ in {what}: {theirs} came, {mine} was expected; use the"
                    " same questions, seed and data settings on every node"
                )


def make_partition(
    questions: Sequence[Question],
    *,
    source: str,
    seed: int,
    max_train: int,
    max_test: int,
    test_share: float,
    min_train: int,
    min_test: int,
) -> Partition:
    """Deal questions out to FedNL's five kinds of clients, and split each one's for testing.

    Questions that share their text are on one side, even if two clients hold them; the split
    depends on the rows and the seed, not on the order in which the rows came.

    Parameters
    ----------
    questions
        All questions; repetitions are dropped.
    source
        Where they were read.
    seed
        Decides the shuffles.
    max_train, max_test
        Caps for each client.
    test_share
        Of a client's rows, the share for testing before ``max_test`` caps it, rounded down.
    min_train, min_test
        Fewer rows than these are refused.

    Raises
    ------
    Refusal
        If a client has too few rows.
    """
    rows = distinct(questions)
    # Told by the rows, not the source: a copy of them in a table makes the same clients.
    other = any(row.subject.startswith(bigbench.PREFIX) for row in rows)
    groups = bigbench.groups() if other else mmlu.CLIENTS
    held = mmlu.by_client(rows, groups)
    owners: defaultdict[str, set[int]] = defaultdict(set)
    for index, own in enumerate(held):
        for question in own:
            owners[question.stem()].add(index)
    shared = {stem for stem, holders in owners.items() if len(holders) > 1}
    clients = [
        client_of(
            groups[index][0],
            index,
            own,
            seed=seed,
            max_train=max_train,
            max_test=max_test,
            test_share=test_share,
            min_train=min_train,
            min_test=min_test,
            shared=shared,
        )
        for index, own in enumerate(held)
    ]
    return Partition(seed, source, rows_hash(rows), tuple(clients))


def client_of(
    name: str,
    index: int,
    own: Sequence[Question],
    *,
    seed: int,
    max_train: int,
    max_test: int,
    test_share: float,
    min_train: int,
    min_test: int,
    shared: Set[str] = frozenset(),
) -> Client:
    """Shuffle one client's rows by (seed, index) and split them for testing.

    Parameters are ``make_partition``'s; ``shared`` are stems that another client holds as well.

    Raises
    ------
    Refusal
        If the client has too few rows.
    """
    share = Fraction(test_share).limit_denominator(10_000)  # 1/6 of 1098 is 183, also in floats
    order = seeds.generator(seed, index, "partition").permutation(len(own))
    n_test = min(max_test, int(len(own) * share))
    train, test = _split([own[i] for i in order], n_test, shared)
    client = _named(name, train[:max_train], test)
    _check_enough(client, min_train, min_test, len(own))
    return client


def client_rows(
    partition: Partition, questions: Sequence[AnyRow], client_index: int
) -> tuple[list[AnyRow], list[AnyRow]]:
    """Return a client's training and test questions in the partition's order.

    Raises
    ------
    Refusal
        If there is no such client, or ``questions`` lack one of its rows.
    """
    if not 0 <= client_index < len(partition.clients):
        raise Refusal(f"partition id {client_index}: expected 0 to {len(partition.clients) - 1}")
    client = partition.clients[client_index]
    known = {question.row(): question for question in questions}
    if missing := [row for row in (*client.train, *client.test) if row not in known]:
        raise Refusal(
            f"{client.name} lacks {len(missing)} of its rows, first {missing[0]}: expected the"
            f" questions of {partition.source}; check data.source on this node"
        )
    return [known[row] for row in client.train], [known[row] for row in client.test]


def table(partition: Partition) -> list[tuple[str, int, int, int]]:
    """List (client, training rows, test rows, subjects)."""
    return [(c.name, len(c.train), len(c.test), len(c.subjects)) for c in partition.clients]


def _split(
    shuffled: Sequence[Question], n_test: int, shared: Set[str]
) -> tuple[list[Question], list[Question]]:
    """Fill the test side with whole groups of one text, in shuffled order, up to ``n_test`` rows.

    Groups that another client holds too are for training at both, so that no client is tested on
    a text that another one trained on.
    """
    groups: dict[str, list[Question]] = {}
    for question in shuffled:
        groups.setdefault(question.stem(), []).append(question)
    train: list[Question] = []
    test: list[Question] = []
    for stem, group in groups.items():
        fits = stem not in shared and len(test) + len(group) <= n_test
        (test if fits else train).extend(group)
    return train, test


def _named(name: str, train: Sequence[Question], test: Sequence[Question]) -> Client:
    subjects = Counter(question.subject for question in (*train, *test))
    return Client(
        name,
        tuple(question.row() for question in train),
        tuple(question.row() for question in test),
        dict(sorted(subjects.items())),
    )


def _check_enough(client: Client, min_train: int, min_test: int, held: int) -> None:
    for side, rows, least in (("train", client.train, min_train), ("test", client.test, min_test)):
        if len(rows) < least:
            raise Refusal(
                f"{client.name} has {len(rows)} {side} rows of {held} in all: data.min-{side}"
                f" asks for {least}; give it more questions or lower data.min-{side}"
            )


def rows_hash(rows: Sequence[Row]) -> str:
    """SHA-256 over the names of rows."""
    return hashlib.sha256("\n".join(row.row() for row in rows).encode()).hexdigest()


def _client(
    name: str, train: Sequence[str], test: Sequence[str], subjects: dict[str, int]
) -> Client:
    counts = {str(subject): int(count) for subject, count in subjects.items()}
    return Client(str(name), tuple(map(str, train)), tuple(map(str, test)), counts)


def _differences(a: Partition, b: Partition) -> list[tuple[str, object, object]]:
    pairs: list[tuple[str, object, object]] = [
        ("seed", a.seed, b.seed),
        ("source_hash", a.source_hash[:16], b.source_hash[:16]),
        ("the number of clients", len(a.clients), len(b.clients)),
    ]
    for mine, theirs in zip(a.clients, b.clients, strict=False):
        pairs.append(("a client's name", mine.name, theirs.name))
        for side in ("train", "test"):
            left, right = getattr(mine, side), getattr(theirs, side)
            pairs.append((f"{mine.name}'s number of {side} rows", len(left), len(right)))
            pairs += [
                (f"{mine.name}'s {side} row {index}", x, y)
                for index, (x, y) in enumerate(zip(left, right, strict=False))
            ]
    return [*pairs, ("the digest", a.digest()[:16], b.digest()[:16])]


@functools.lru_cache(maxsize=4)
def holdings(data: DataConfig, seed: int) -> tuple[list[Question], Partition]:
    """Load a recipe's questions and divide them; hold the result against ``data.manifest``.

    Raises
    ------
    Refusal
        If the data cannot be read, a client has too few rows, or the manifest says otherwise.
    """
    questions = load_questions(data.source)
    made = make_partition(
        questions,
        source=data.source,
        seed=seed,
        max_train=data.max_train,
        max_test=data.max_test,
        test_share=data.test_share,
        min_train=data.min_train,
        min_test=data.min_test,
    )
    if data.manifest:
        read_partition(Path(data.manifest)).check_same(made)
    return questions, made


def read_partition(path: Path) -> Partition:
    """Read the partition manifest that every node must agree with.

    Raises
    ------
    Refusal
        If there is no such file or it is no partition.
    """
    try:
        return Partition.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"data.manifest {path} cannot be read ({error}); expected a file that"
            " `fedloom partition RECIPE --write FILE` made"
        ) from error
