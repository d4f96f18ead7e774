# SPDX-License-Identifier: Apache-2.0
"""The only file under ``src`` that imports Flower: records to and from our own types.

Everything that crosses the network is made here and read here, so what may leave a node can be
seen on one page: named arrays of the manifest, a flat config, and numbers.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_to_proto
from numpy.typing import NDArray

from fedloom.errors import Refusal
from fedloom.wire import Arrays, Manifest, Update

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
WEIGHT = "num-examples"
FRAMING = "framing"
"""Ledger entry for all bytes that are not array values: names, headers, config, metrics."""

_REFUSED = "Refusal: "


def pack_arrays(arrays: Arrays) -> ArrayRecord:
    """Put named numpy arrays into a record, in the order given."""
    return ArrayRecord({n: Array(np.ascontiguousarray(a)) for n, a in arrays.items()})


def unpack_arrays(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Take named numpy arrays out of a record; the copies are the caller's."""
    return {name: array.numpy() for name, array in record.items()}


def content(
    arrays: Arrays | ArrayRecord | None = None,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> RecordDict:
    """Build a message's content; metrics are plain numbers and nothing else leaves as one."""
    records = RecordDict()
    if arrays is not None:
        # A packed array is immutable: messages to many nodes share its bytes, not the record.
        packed = arrays if isinstance(arrays, ArrayRecord) else pack_arrays(arrays)
        records[ARRAYS] = ArrayRecord(dict(packed))
    if config is not None:
        records[CONFIG] = ConfigRecord(dict(config))
    if metrics is not None:
        records[METRICS] = numbers(metrics)
    return records


def numbers(metrics: Mapping[str, Any]) -> MetricRecord:
    """Put plain numbers into a record.

    Raises
    ------
    TypeError
        If a value is no int or float.
    """
    odd = {k: type(v).__name__ for k, v in metrics.items() if type(v) not in (int, float)}
    if odd:
        raise TypeError(f"metrics must be int or float, got {odd}")
    return MetricRecord(dict(metrics))


def arrays_of(records: RecordDict) -> dict[str, NDArray[Any]]:
    """Return the named arrays of a message; exactly one array record is expected."""
    found = list(records.array_records.values())
    if len(found) != 1:
        raise Refusal(f"{len(found)} array records came, expected one")
    return unpack_arrays(found[0])


def config_of(records: RecordDict) -> dict[str, Any]:
    """Return the flat config of a message, empty if it carries none."""
    return dict(next(iter(records.config_records.values()), {}))


def metrics_of(records: RecordDict) -> dict[str, Any]:
    """Return the metrics of a message; exactly one metric record is expected."""
    found = list(records.metric_records.values())
    if len(found) != 1:
        raise Refusal(f"{len(found)} metric records came, expected one")
    return dict(found[0])


def checked_metrics(records: RecordDict, needed: Iterable[str] = ()) -> dict[str, int | float]:
    """Return the metrics of a reply after looking at each.

    Raises
    ------
    Refusal
        If one of ``needed`` is missing, a value is no finite number, or the count of examples is
        not positive.
    """
    metrics = metrics_of(records)
    if missing := sorted({WEIGHT, *needed} - metrics.keys()):
        raise Refusal(f"the reply has no metric named {missing[0]}")
    for name, value in metrics.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise Refusal(f"metric {name} = {str(value)[:40]}: expected a finite number")
    if not metrics[WEIGHT] > 0:
        raise Refusal(f"{WEIGHT} = {metrics[WEIGHT]}: expected a positive number of examples")
    return metrics


def update_of(records: RecordDict, manifest: Manifest, origin: int = -1) -> Update:
    """Read a training reply as an update, after the manifest has been held against it.

    Raises
    ------
    Refusal
        If names, shapes or dtypes differ, a value is not finite, or the weight is not positive.
    """
    arrays = arrays_of(records)
    manifest.check_arrays(arrays)
    return Update.of(arrays, checked_metrics(records)[WEIGHT], origin)


def wire_bytes(records: RecordDict) -> dict[str, int]:
    """Count the bytes of a message's content as it is serialised, by dtype of the array values.

    The entries add up to the serialised size: what is not an array value is ``framing``.
    """
    counts: Counter[str] = Counter()
    for record in records.array_records.values():
        for array in record.values():
            counts[array.dtype] += _value_bytes(array)
    # count_bytes() of flwr 1.42 raises on empty lists, and is not what protobuf writes.
    counts[FRAMING] = recorddict_to_proto(records).ByteSize() - sum(counts.values())
    return dict(counts)


def _value_bytes(array: Array) -> int:
    """Count an array's values; the data of a foreign or broken array count as they are."""
    try:
        size = int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
    except TypeError:
        size = len(array.data)
    return min(size, len(array.data))


def failure(message: Message, error: Exception) -> Message:
    """Answer a message with what went wrong: one line, and below it the traceback of a fault."""
    if isinstance(error, Refusal):
        reason = _REFUSED + str(error)
    else:
        said = str(error).strip().partition("\n")[0]
        where = "".join(traceback.format_exception(error)).rstrip()
        reason = f"{type(error).__name__}: {said}\n{where}"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def failure_reason(message: Message) -> tuple[str, str, bool]:
    """Read an error reply: one line, the traceback (may be empty), and whether it is a refusal."""
    text = (message.error.reason or f"error code {message.error.code}").strip()
    if text.startswith(_REFUSED):
        return text.removeprefix(_REFUSED), "", True
    line, _, trace = text.partition("\n")
    return line, trace.strip(), False
