# SPDX-License-Identifier: Apache-2.0
"""Randomness is an argument: one seed, split by (round, partition, purpose)."""

from __future__ import annotations

import hashlib

import numpy as np


def split(seed: int, *path: int | str) -> int:
    """Derive a 63-bit seed that depends on every part of ``path`` and on nothing else.

    >>> split(0, 1, 2, "batches") == split(0, 1, 2, "batches") != split(0, 2, 1, "batches")
    True
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *path: int | str) -> np.random.Generator:
    """Return numpy's generator for one purpose; the stream is fixed by PCG64 and ``split``."""
    return np.random.Generator(np.random.PCG64(split(seed, *path)))
