# SPDX-License-Identifier: Apache-2.0
"""The only file under ``src`` that imports Flower: records to and from our own types.

Everything that crosses the network is made here and read here, so what may leave a node can be
seen on one page: named arrays of the manifest, a flat config, and numbers.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import APP_DIR, ErrorCode
from flwr.common.serde import recorddict_to_proto
from flwr.common.serde_utils import error_to_proto
from flwr.supercore.utils import get_flwr_home
from numpy.typing import NDArray

from fedloom import parcels
from fedloom.errors import Refusal
from fedloom.parcels import Parcel
from fedloom.rounding import moved
from fedloom.wire import Arrays, Manifest, Update

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
WEIGHT = "num-examples"
TICKET = "ticket"
"""Metric that says which message a reply answers: see ``fedloom.wire.ticket``."""
BEFORE = "before-"
"""Prefix of what a training message says of scoring beforehand, and of the scores in its reply."""
FRAMING = "framing"
"""Ledger entry for all bytes that are not array values: names, headers, config, metrics."""

REASON, TRACE = 500, 20_000
"""Most letters of a failure's one line, and of its traceback."""

_REFUSED = "Refusal: "
_LAYOUT, _BUFFER = "loom.list", "loom.data"  # how Flower names what an array's bytes are
_LOG = logging.getLogger(__name__)


def pack_arrays(arrays: Arrays) -> ArrayRecord:
    """Put named numpy arrays into a record, in the order given."""
    return ArrayRecord({n: Array(np.ascontiguousarray(a)) for n, a in arrays.items()})


def pack_parcel(arrays: Arrays, code: str = "float32") -> ArrayRecord:
    """Put named numpy arrays into a record as a parcel: few headers, the values the same bytes."""
    parcel = parcels.pack(arrays, code)
    record = {"list": Array("", (len(parcel.layout),), _LAYOUT, parcel.layout)}
    for name, data in parcel.buffers.items():
        dtype = _written_as(name, code)
        size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        record[name] = Array(dtype, (len(data) // size,), _BUFFER, data)
    return ArrayRecord(record)


class Parcels:
    """Make a parcel of a record, and the same one again while the arrays are the same objects.

    Messages to many nodes then share its bytes.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, Array]] = []
        self._made = ArrayRecord()

    def of(self, record: ArrayRecord) -> ArrayRecord:
        """Return a record's arrays as a parcel."""
        given = list(record.items())
        # Flower copies what holds an array's bytes, and not the bytes.
        alike = [(n, id(a.data)) for n, a in given] == [(n, id(a.data)) for n, a in self._held]
        if not (alike and given):
            self._held, self._made = given, pack_parcel(unpack_arrays(record))
        return self._made


def _written_as(buffer: str, code: str) -> str:
    """Name a buffer's numbers for the ledger."""
    if buffer == parcels.STEPS:
        return "bfloat16"
    return {"int4": "uint8"}.get(code, code) if buffer == parcels.CODED else buffer


def is_parcel(record: ArrayRecord) -> bool:
    """Whether a record is a parcel."""
    return any(array.stype == _LAYOUT for array in record.values())


def came_in_parcels(records: RecordDict) -> bool:
    """Whether a message's arrays, if it has any, are a parcel: then so should its reply's be."""
    return any(map(is_parcel, records.array_records.values()))


def unpack_arrays(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Take named numpy arrays out of a record, a parcel or not; the copies are the caller's.

    Raises
    ------
    Refusal
        If they cannot be read.
    """
    if is_parcel(record):
        return parcels.unpack(_parcel(record))
    return {name: _read(name, array) for name, array in record.items()}


def code_of(records: RecordDict) -> str:
    """Tell how the numbers of a message's arrays are written."""
    found = [_parcel(r).layout for r in records.array_records.values() if is_parcel(r)]
    return parcels.code_of(found[0]) if found else "float32"


def _parcel(record: ArrayRecord) -> Parcel:
    layouts = [array.data for array in record.values() if array.stype == _LAYOUT]
    odd = [name for name, array in record.items() if array.stype not in (_LAYOUT, _BUFFER)]
    if len(layouts) != 1 or odd:
        raise Refusal(f"a parcel of {len(layouts)} lists and {len(odd)} loose arrays came")
    return Parcel(layouts[0], {n: a.data for n, a in record.items() if a.stype == _BUFFER})


def _read(name: str, array: Array) -> NDArray[Any]:
    try:
        found = array.numpy()
        if found.dtype.hasobject or found.dtype.fields:
            raise TypeError(f"numbers of {found.dtype}")
    except Exception as error:  # numpy's reader raises all kinds for bytes that are no array
        raise Refusal(f"array {name} cannot be read: {type(error).__name__}") from error
    return found


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
    """Return the metrics of a message but its ticket; exactly one metric record is expected."""
    found = list(records.metric_records.values())
    if len(found) != 1:
        raise Refusal(f"{len(found)} metric records came, expected one")
    return {name: value for name, value in found[0].items() if name != TICKET}


def checked_metrics(records: RecordDict, needed: Iterable[str] = ()) -> dict[str, int | float]:
    """Return the metrics of a reply after looking at each.

    Raises
    ------
    Refusal
        If one of ``needed`` is missing, a value is no finite number, or the count of examples is
        not positive.
    """
    return checked_numbers(metrics_of(records), needed)


def checked_numbers(
    metrics: dict[str, int | float], needed: Iterable[str] = ()
) -> dict[str, int | float]:
    """Look at each of a reply's metrics as ``checked_metrics`` does, and return them."""
    if missing := sorted({WEIGHT, *needed} - metrics.keys()):
        raise Refusal(f"the reply has no metric named {missing[0]}")
    for name, value in metrics.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise Refusal(f"metric {name} = {str(value)[:40]}: expected a finite number")
    if not metrics[WEIGHT] > 0:
        raise Refusal(f"{WEIGHT} = {metrics[WEIGHT]}: expected a positive number of examples")
    return metrics


def without_before(records: RecordDict) -> tuple[RecordDict, dict[str, Any]]:
    """Return a training reply without the scores that rode along, and these without their prefix.

    Nothing else is looked at; arrays are shared with what came.
    """
    rest = RecordDict()
    scores: dict[str, Any] = {}
    for key, record in records.items():
        if isinstance(record, MetricRecord):
            kept = {name: x for name, x in record.items() if not name.startswith(BEFORE)}
            scores |= {n.removeprefix(BEFORE): x for n, x in record.items() if n not in kept}
            rest[key] = MetricRecord(kept)
        else:
            rest[key] = record
    return rest, scores


def ticket_of(records: RecordDict) -> int | None:
    """Return the ticket among a reply's metrics, if there is one; -1 is nobody's."""
    for record in records.metric_records.values():
        if TICKET in record:
            ticket = record[TICKET]
            return ticket if type(ticket) is int else -1
    return None


def update_of(
    records: RecordDict,
    manifest: Manifest,
    origin: int = -1,
    code: str = "float32",
    start: Arrays | None = None,
) -> Update:
    """Read a training reply as an update, after the manifest has been held against it.

    Parameters
    ----------
    code
        How its numbers must be written.
    start
        What its sender was sent, where numbers are of how far each moved from there.

    Raises
    ------
    Refusal
        If names, shapes or dtypes differ, a value is not finite, the weight is not positive, or
        numbers are written otherwise.
    """
    if (came := code_of(records)) != code:
        raise Refusal(f"numbers came in {came}, expected {code}")
    arrays = arrays_of(records)
    manifest.check_arrays(arrays)
    if start is not None:
        arrays = {name: moved(start.get(name), change) for name, change in arrays.items()}
        manifest.check_arrays(arrays)
    return Update.of(arrays, checked_metrics(records)[WEIGHT], origin)


def wire_bytes(records: RecordDict) -> dict[str, int]:
    """Count the bytes of a message's content as it is serialised, by dtype of the array values.

    The entries add up to the serialised size: what is not an array value is ``framing``.
    """
    counts: Counter[str] = Counter()
    for record in records.array_records.values():
        for array in record.values():
            if array.stype != _LAYOUT:
                counts[array.dtype] += _value_bytes(array)
    # count_bytes() of flwr 1.42 raises on empty lists, and is not what protobuf writes.
    counts[FRAMING] = recorddict_to_proto(records).ByteSize() - sum(counts.values())
    return dict(counts)


def _value_bytes(array: Array) -> int:
    """Count an array's values; the data of a foreign or broken array count as they are."""
    if array.stype == _BUFFER:
        return len(array.data)
    try:
        size = max(0, math.prod(array.shape)) * np.dtype(array.dtype).itemsize
    except (TypeError, ValueError, SyntaxError):
        size = len(array.data)
    return min(size, len(array.data))


def pushed_folders() -> list[Path]:
    """Return where Flower unpacks the apps that a coordinator sends."""
    return [get_flwr_home() / APP_DIR]


def failure(message: Message, error: Exception) -> Message:
    """Answer a message with what went wrong: a refusal's line, or a fault's kind and place.

    What a fault of ours or of a library says may quote a row: its words stay in the node's log, and
    types, files and lines travel.
    """
    if isinstance(error, Refusal):
        reason = _REFUSED + str(error)
    else:
        _LOG.error("a message could not be answered", exc_info=error)
        reason = redacted(error)
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def redacted(error: BaseException) -> str:
    """Return an exception's type and place in one line and its traceback without any words.

    Neither messages nor source lines nor folders: ``fedloom/training.py:141 in train_locally``.
    """
    lines: list[str] = []
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        lines += [type(cause).__name__]
        for frame in traceback.extract_tb(cause.__traceback__):
            lines += [
                f"  {'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}"
            ]
        hidden = cause.__suppress_context__
        cause = cause.__cause__ or (None if hidden else cause.__context__)
    at = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {Path(at[0].filename).name}:{at[0].lineno}" if at else ""
    told = f"{type(error).__name__}{place} (its words are in the node's log)"
    return "\n".join([told, "Traceback (most recent call last, words left out):", *lines])


def is_gone(message: Message) -> bool:
    """Say whether an error reply is Flower's own word that the node is not there any more."""
    codes = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
    return message.error.code in (*codes, ErrorCode.NODE_UNAVAILABLE)


def failure_reason(message: Message) -> tuple[str, str, bool]:
    """Read an error reply: one line, the traceback (may be empty), and whether it is a refusal.

    It is a node's word: control bytes become blanks, and what is too long is cut.
    """
    text = (message.error.reason or "")[: REASON + TRACE].strip()
    if text.startswith(_REFUSED):
        return one_line(text.removeprefix(_REFUSED)) or "refused without a word", "", True
    line, _, trace = text.partition("\n")
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in trace[:TRACE])
    return one_line(line) or f"error code {message.error.code}", shown.strip(), False


def one_line(text: str, most: int = REASON) -> str:
    r"""Put foreign words on one line that can be printed, cut to ``most`` letters.

    >>> one_line("out of\n\x1b[31mmemory"), one_line("abcdef", most=5)
    ('out of [31mmemory', 'ab...')
    """
    plain = "".join(c if c.isprintable() else " " for c in text[: 8 * most])
    words = " ".join(plain.split())
    return words if len(words) <= most else f"{words[: most - 3]}..."


def error_bytes(message: Message) -> int:
    """Count the bytes of an error reply as they are serialised."""
    return int(error_to_proto(message.error).ByteSize())
