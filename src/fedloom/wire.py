# SPDX-License-Identifier: Apache-2.0
"""What travels: ``Update``, a weighted sum, and ``Manifest``, how both ends know its names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal

Arrays = Mapping[str, NDArray[Any]]
Listing = dict[str, tuple[tuple[int, ...], str]]
"""Name -> (shape, dtype)."""


def _two_sum(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``s = fl(a + b)`` and the rounding error, exactly (Knuth's TwoSum)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@dataclass(frozen=True)
class Update:
    """A weighted sum of named arrays; the only thing that is aggregated.

    Sums are carried in float64 together with their rounding errors (``residue``), about 106 bits
    in all, so that updates may be added in any order and any grouping and ``mean`` still rounds
    to the same float32 arrays.  A product of a float32 entry and a whole weight below 2**29 is
    exact in float64, so no bit is lost before the sum either.

    >>> a, b = Update.of({"w": np.float32([1.0])}, 1), Update.of({"w": np.float32([4.0])}, 2)
    >>> (a + b).mean()["w"], (b + a).weight
    (array([3.]), 3.0)
    """

    sums: dict[str, NDArray[np.float64]]
    """Sum over contributions of weight times array."""
    weight: float
    """Sum of weights; examples, not batches."""
    residue: dict[str, NDArray[np.float64]]
    """What float64 rounded off the sums."""
    origin: int = -1
    """Partition that a single contribution came from; a sum has none."""

    @classmethod
    def of(cls, arrays: Arrays, weight: float, origin: int = -1) -> Update:
        """One contribution: ``arrays`` as trained on ``weight`` examples."""
        sums = {name: np.asarray(array, np.float64) * weight for name, array in arrays.items()}
        residue = {name: np.zeros_like(s) for name, s in sums.items()}
        return cls(sums, float(weight), residue, origin)

    @classmethod
    def summed(cls, arrays: Arrays, weight: float, origin: int = -1) -> Update:
        """One contribution whose ``arrays`` are sums over ``weight`` rows already (a Gram's)."""
        sums = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        return cls(sums, float(weight), {n: np.zeros_like(s) for n, s in sums.items()}, origin)

    def __neg__(self) -> Update:
        """Return what takes this contribution out of a sum again."""
        sums, residue = ({n: -a for n, a in part.items()} for part in (self.sums, self.residue))
        return Update(sums, -self.weight, residue)

    def whole(self) -> dict[str, NDArray[np.float64]]:
        """Return the sums, each rounded once."""
        return {name: s + self.residue[name] for name, s in self.sums.items()}

    def __add__(self, other: Update) -> Update:
        if odd := self.sums.keys() ^ other.sums.keys():
            raise ValueError(f"updates of different adapters: only one side has {sorted(odd)}")
        sums: dict[str, NDArray[np.float64]] = {}
        residue: dict[str, NDArray[np.float64]] = {}
        for name, mine in self.sums.items():
            theirs = other.sums[name]
            if mine.shape != theirs.shape:  # numpy would broadcast without a word
                raise ValueError(f"{name}: shapes {mine.shape} and {theirs.shape} differ")
            high, low = _two_sum(mine, theirs)
            low = low + (self.residue[name] + other.residue[name])
            sums[name], residue[name] = _two_sum(high, low)
        return Update(sums, self.weight + other.weight, residue)

    def mean(self) -> dict[str, NDArray[np.float64]]:
        """Divide by the weight.

        Raises
        ------
        ValueError
            If the weight is not positive: there is nothing to average.
        """
        if not self.weight > 0:
            raise ValueError(f"mean of an update of weight {self.weight}: expected above 0")
        return {n: (s + self.residue[n]) / self.weight for n, s in self.sums.items()}


@dataclass(frozen=True)
class Manifest:
    """What an adapter's arrays are called and which frozen model they belong to.

    Both ends compare manifests before any work; an array that is not listed does not travel.
    """

    method: str
    version: str
    """fedloom's version."""
    base: str
    """SHA-256 over the frozen weights."""
    tokenizer: str
    """SHA-256 over the tokenizer's files."""
    arrays: Listing
    """Name -> (shape, dtype) in sorted order."""
    kept: Listing = field(default_factory=dict)
    """Arrays that stay on the nodes; the server gets their start once, to save a whole adapter."""
    start: str = ""
    """SHA-256 over the start of ``kept``: the same on every node."""
    values: str = ""
    """SHA-256 over classes, the table of their values and the preprocessing, where sums are of
    labelled rows: they may be added only if these are the same."""

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        *,
        method: str,
        version: str,
        base: str,
        tokenizer: str,
        kept: Arrays | None = None,
        values: str = "",
    ) -> Manifest:
        """Describe ``arrays``, and ``kept`` if some stay."""
        start = arrays_digest(kept) if kept else ""
        listings = _listing(arrays), _listing(kept or {})
        return cls(method, version, base, tokenizer, *listings, start, values)

    def to_json(self) -> str:
        """Write the manifest as one canonical line."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what ``to_json`` wrote.

        Raises
        ------
        Refusal
            If the text is no manifest.
        """
        try:
            tree = json.loads(text)
            arrays, kept = (
                {n: (tuple(s), d) for n, (s, d) in tree.pop(part).items()}
                for part in ("arrays", "kept")
            )
            for name, (shape, dtype) in (*arrays.items(), *kept.items()):
                _check_entry(name, shape, dtype)
            if odd := [key for key, text in tree.items() if not isinstance(text, str)]:
                raise ValueError(f"{odd[0]} is no text")
            return cls(**tree, arrays=arrays, kept=kept)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Refusal(f"not an adapter manifest: {error}"[:300]) from error

    def digest(self) -> str:
        """SHA-256 of ``to_json``: what a message carries instead of the whole manifest."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def nbytes(self) -> int:
        """Bytes of the arrays themselves, without any framing."""
        return sum(
            int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            for shape, dtype in self.arrays.values()
        )

    def check_arrays(self, arrays: Arrays) -> None:
        """Refuse arrays with other names, shapes or dtypes, or with a value that is not finite."""
        self._check_listing(_listing(arrays))
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise Refusal(f"array {name} holds a value that is not finite")

    def check_start(self, arrays: Arrays) -> None:
        """Refuse a start that is not all of the adapter, or whose kept part is not the nodes'."""
        replace(self, arrays={**self.arrays, **self.kept}).check_arrays(arrays)
        kept = {name: arrays[name] for name in self.kept}
        if kept and arrays_digest(kept) != self.start:
            raise Refusal("the start of the arrays that stay is not the one in the manifest")

    def _check_listing(self, listing: Listing) -> None:
        if odd := sorted(self.arrays.keys() ^ listing.keys()):
            side = "expected but did not come" if odd[0] in self.arrays else "not in the manifest"
            raise Refusal(f"array {odd[0]} ({len(odd)} in all): {side}")
        for name, came in listing.items():
            if came != self.arrays[name]:
                raise Refusal(f"array {name}: {came} came, {self.arrays[name]} was expected")


_NAME = re.compile(r"[^/\\\x00-\x1f]+(/[^/\\\x00-\x1f]+)?")
"""No path: at most one slash, which marks a control, and no dots beside it."""
_DTYPE = re.compile(r"(float(16|32|64)|u?int(8|16|32|64)|bool)")
_MOST = 2**40


def _check_entry(name: str, shape: tuple[Any, ...], dtype: Any) -> None:
    """Check what a manifest lists before anybody makes room for it, or calls a file by it."""
    if not _NAME.fullmatch(name) or ".." in name or len(name) > 1000:
        raise ValueError(f"an array cannot be called {name!r:.60}")
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"array {name} of {dtype!r:.20}")
    if len(shape) > 8 or not all(type(n) is int and 0 <= n <= _MOST for n in shape):
        raise ValueError(f"array {name} has the shape {shape!r:.60}")


def ticket(run: str, server_round: int, manifest: str, kind: str, partition: int) -> int:
    """Number that a reply carries to say which message it answers.

    Both ends work it out: the client of the run and round it was told, of its own partition and
    of the manifest that it holds.  A reply of another round, run, adapter or client has another
    number.  It is no signature: it finds mistakes and replays, and Flower's keys say who sent it.

    Parameters
    ----------
    kind
        ``train`` or ``evaluate``.
    """
    text = f"{run}|{server_round}|{manifest}|{kind}|{partition}"
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    return 2**56 + drawn  # as long on the wire whatever it is


START_PHASE = "initial-adapter"
"""Phase of the message that asks one node for the start of the adapter."""

_SAME_START = 0.02
"""How far, in length, a start may be from one's own.  What is drawn is the same to the bit; what is
measured on the frozen model (``memory.centre``) rounds otherwise on another processor."""
_DOUBT = re.compile(r"partition \d+: (manifest \S{0,16} came|the start that came)")


def other_manifest(partition: int, came: str, own: str, same: str) -> Refusal:
    """Return what a node says to a manifest that is not its own; ``same`` is what to look at."""
    return Refusal(
        f"partition {partition}: manifest {came[:16]} came, {own[:16]} is this node's; use the same"
        f" {same} and fedloom version on every node"
    )


def check_own_start(partition: int, came: Arrays, own: Arrays) -> None:
    """Refuse a start of the global adapter that is not what this node makes of the recipe's seed.

    Raises
    ------
    Refusal
        Naming the array that is farthest off.
    """
    off: dict[str, float] = {}
    for name in came.keys() & own.keys():
        mine = np.asarray(own[name], np.float64)
        far = float(np.linalg.norm(np.asarray(came[name], np.float64) - mine))
        off[name] = far / (_SAME_START * float(np.linalg.norm(mine)) + 1e-6)
    worst = max(sorted(off), key=lambda name: off[name], default="")
    if worst and not off[worst] <= 1:
        raise Refusal(
            f"partition {partition}: the start that came is not the one that this node makes of the"
            f" recipe's seed: {worst} is {off[worst]:.3g} times as far off as rounding may be"
        )


def doubts_start(reason: str) -> bool:
    """Whether a node's failure says that it has another start of the adapter than it was sent."""
    return _DOUBT.match(reason) is not None


def _listing(arrays: Arrays) -> Listing:
    return {n: (tuple(a.shape), str(a.dtype)) for n, a in sorted(arrays.items())}


def arrays_digest(arrays: Arrays) -> str:
    """SHA-256 over names, dtypes, shapes and bytes in sorted order: equal means bit-identical."""
    whole = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        plain = np.ascontiguousarray(array)
        whole.update(f"{name}|{plain.dtype.str}|{plain.shape}|".encode())
        whole.update(plain.tobytes())
    return whole.hexdigest()
