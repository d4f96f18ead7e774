# SPDX-License-Identifier: Apache-2.0
"""Labelled pictures out of packaged archives: Fashion-MNIST and CIFAR-10's test set."""

from __future__ import annotations

import base64
import gzip
import io
import json
import lzma
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from fedloom import archives
from fedloom.data import files, novels
from fedloom.errors import Refusal

CLOTHES = (
    *("T-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_CIFAR_TASK = "bigbench/benchmark_tasks/cifar10_classification/base64/task.json"
_CIFAR_SIDE = 32

Pictures = NDArray[np.uint8]
Labels = NDArray[np.int64]


def fashion_mnist(package: Path) -> tuple[Pictures, Labels, NDArray[np.bool_]]:
    """Return pictures ``[70000, 28, 28]``, labels, and which are for testing.

    Raises
    ------
    Refusal
        If the Debian package is not laid out as expected.
    """
    try:
        pictures, labels = zip(*(_idx_pair(package, p) for p in ("train", "t10k")), strict=True)
    except (KeyError, ValueError, OSError, struct.error, lzma.LZMAError) as error:
        raise Refusal(
            f"{package.name} does not hold Fashion-MNIST as expected ({error}): delete it, to have"
            " it fetched again"
        ) from error
    test = np.repeat([False, True], [len(part) for part in labels])
    return np.concatenate(pictures), np.concatenate(labels).astype(np.int64), test


def cifar10() -> tuple[Pictures, Labels]:
    """Return pictures ``[10000, 32, 32, 3]`` and labels, from the cache or from BIG-bench.

    Raises
    ------
    Refusal
        If the archive is not in the cache and cannot be downloaded, or does not hold them.
    """
    path = archives.cache_dir() / "data" / f"cifar10-{archives.BIGBENCH.sha256[:12]}.safetensors"
    if not path.exists():
        with archives.locked(path.with_name(path.name + ".lock")):
            if not path.exists():  # another process was quicker
                _unpack_cifar(archives.fetch(archives.BIGBENCH), path)
    found = load_file(path)
    return found["pictures"], found["labels"]


def decode_task(examples: list[dict[str, Any]]) -> tuple[Pictures, Labels]:
    """Decode examples of BIG-bench: a PNG in base64, and a score of one for the right class."""
    pillow = files.extra("PIL.Image")
    pictures, labels = [], []
    for example in examples:
        picture = pillow.open(io.BytesIO(base64.b64decode(example["input"])))
        pictures.append(np.asarray(picture.convert("RGB"), np.uint8))
        scores = example["target_scores"]
        labels.append(CIFAR10.index(max(scores, key=scores.__getitem__)))
    return np.stack(pictures), np.array(labels, np.int64)


def _unpack_cifar(archive: Path, path: Path) -> None:
    with tarfile.open(archive, "r|gz") as members:  # a stream: nothing is unpacked to disk
        for member in members:
            stream = members.extractfile(member) if member.name.endswith(_CIFAR_TASK) else None
            if stream is not None:
                pictures, labels = decode_task(json.load(stream)["examples"])
                break
        else:
            raise Refusal(f"{archive.name} holds no CIFAR-10: delete it, to have it fetched again")
    if pictures.shape[1:] != (_CIFAR_SIDE, _CIFAR_SIDE, 3):
        raise Refusal(f"{archive.name} holds pictures of {pictures.shape[1:]}: expected 32 x 32")
    partial = path.with_name(path.name + ".partial")
    save_file({"pictures": pictures, "labels": labels}, partial)
    os.replace(partial, path)


def _idx_pair(package: Path, part: str) -> tuple[Pictures, NDArray[np.uint8]]:
    folder = "./usr/share/datasets/fashion-mnist/"
    with tarfile.open(fileobj=io.BytesIO(novels.ar_member(package, "data.tar"))) as tree:
        pictures, labels = (
            read_idx(gzip.decompress(novels.member(tree, f"{folder}{part}-{kind}-ubyte.gz")))
            for kind in ("images-idx3", "labels-idx1")
        )
    return pictures, labels


def read_idx(data: bytes) -> NDArray[np.uint8]:
    """Read MNIST's format: two zeros, 8 for bytes, the number of axes, their sizes, the bytes."""
    zeros, kind, axes = struct.unpack(">HBB", data[:4])
    if zeros or kind != 8:
        raise ValueError("no IDX file of bytes")
    shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
