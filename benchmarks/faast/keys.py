# SPDX-License-Identifier: Apache-2.0
"""Keys of whole data sets, encoded once and kept in fedloom's cache: what the studies work on."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from fedloom import archives, seeds
from fedloom.data.labelled import Items, Labelled, load_labelled
from fedloom.models.encoders import load_encoder


@dataclass(frozen=True)
class Keyed:
    """A data set as keys."""

    keys: NDArray[np.float32]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    test: NDArray[np.bool_] | None
    rows: tuple[str, ...]
    """What each item is, to leave out those that are there twice."""
    label_keys: NDArray[np.float32] | None
    encoding_seconds: float
    """Process time of the one pass, as it was measured when it was done."""


def keyed(data: str, encoder: str, most: int = 0) -> Keyed:
    """Encode a data set, or ``most`` items drawn from it; read keys that were made before."""
    labelled = load_labelled(data)
    places = np.arange(len(labelled))
    if most and most < len(places):
        drawn = seeds.generator(0, data, "some").permutation(len(places))[:most]
        places = np.sort(drawn)
    made = load_encoder(encoder)
    keys, seconds = _cached(labelled, places, data, made)
    names = labelled.rows()
    return Keyed(
        keys,
        labelled.labels[places],
        labelled.classes,
        None if labelled.test is None else labelled.test[places],
        tuple(names[i] for i in places),
        made.label_keys(labelled.classes),
        seconds,
    )


def _cached(labelled: Labelled, places: NDArray[np.intp], data: str, encoder: object):
    told = f"{data}|{encoder.digest}|{hashlib.sha256(places.tobytes()).hexdigest()}"
    name = hashlib.sha256(told.encode()).hexdigest()[:20]
    path = archives.cache_dir() / "keys" / f"{name}.safetensors"
    if path.is_file():
        found = load_file(path)
        return found["keys"], float(found["seconds"][0])
    items: Items
    if isinstance(labelled.items, np.ndarray):
        items = labelled.items[places]
    else:
        items = [labelled.items[i] for i in places]
    start = time.process_time()
    keys = encoder.encode(items)
    seconds = time.process_time() - start
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"keys": keys, "seconds": np.array([seconds])}, partial)
    os.replace(partial, path)
    return keys, seconds


def distinct(rows: tuple[str, ...], order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Leave out of ``order`` items that came before: no test item is in the support."""
    seen: set[str] = set()
    kept = [i for i in order if not (rows[i] in seen or seen.add(rows[i]))]
    return np.array(kept)
