"""FAAST against numpy alone: the rows that clients summed, and what least squares says of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from fedloom.clients.keys import key_bench
from fedloom.config import RunConfig
from fedloom.models.encoders import Pixels
from fedloom.rules.fixed_point import rounding_bound
from fedloom.rules.statistics import Gram
from fedloom.wire import Update

WIRE_METRICS = {
    "ticket", "num-examples", "revision", "seconds", "seconds-encoding", "seconds-summing",
    "forwards", "pid", "loss", "correct", "gold-ce-sum", "gold-ce-sq-sum",
    "chance-sum", "chance-ce-sum",
}  # fmt: skip


def rows_of(config: RunConfig, partitions: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and one-hot values that these clients sum, in one pile."""
    bench = key_bench(config)
    sides = [bench.side(p, "summed") for p in partitions]
    keys = np.concatenate([side.unit() for side in sides])
    labels = np.concatenate([side.labels for side in sides])
    return keys, np.eye(len(bench.classes))[labels]


def least_squares(keys: np.ndarray, values: np.ndarray, alpha: float) -> np.ndarray:
    """Return what FAAST is: LAPACK's truncated SVD over all rows, no sums anywhere."""
    return np.linalg.lstsq(keys, values, rcond=float(len(keys)) ** -alpha)[0]


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference over the largest weight."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def weights_of(config: RunConfig) -> np.ndarray:
    """Return what a run left."""
    return load_file(Path(config.output) / config.name / "adapter/weights.safetensors")["weights"]


def upload(keys: np.ndarray, values: np.ndarray, origin: int) -> Update:
    """Return one client's contribution."""
    gram = Gram.of(keys, values)
    return Update.summed(gram.arrays(), gram.count, origin)


def weights_bound(gram: Gram, alpha: float, parties: int) -> float:
    """How far weights can be moved by rounding each number of the sums, to first order, twice.

    ``W = P G^-1 P C`` over eigenvalues above the cut; both the inverse and the projector move with
    ``E``: by ``|E| / l^2`` and by ``|E| / gap`` (Davis and Kahan).
    """
    values = np.linalg.eigvalsh(gram.dense())[::-1]
    kept = int((values > values[0] * gram.count ** (-2 * alpha)).sum())
    least, gap = values[kept - 1], values[kept - 1] - (values[kept] if kept < len(values) else 0)
    moved = rounding_bound(parties) * gram.keys  # Frobenius, d x d entries
    return (
        2
        * moved
        * (float(np.linalg.norm(gram.cross, 2)) * (1 / least**2 + 2 / (least * gap)) + 1 / least)
    )


def encoded(monkeypatch) -> list[bytes]:
    """Return a list that each item goes into when the encoder of pixels reads it."""
    seen: list[bytes] = []
    encode = Pixels.encode

    def counting(self, items):
        seen.extend(item.tobytes() for item in items)
        return encode(self, items)

    monkeypatch.setattr(Pixels, "encode", counting)
    return seen
