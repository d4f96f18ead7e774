# SPDX-License-Identifier: Apache-2.0
"""What was measured of each sender's help, as a file says it: what a choice of senders looks at.

A file has the device's budget, the links, and one ``[[help]]`` for each sender in each form (a
cache in some precision, or text).  Gains are accuracies with this help less those without, on
held-out questions, with their intervals: nothing here makes them up, and what is not in the file is
not known.  A server reads it without torch; it goes to the receiver, who decides.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.errors import Refusal, nearest
from fedloom.intervals import Interval

WAYS = ("bf16", "int8", "int4", "text")
ANY = "any"
LIMIT = 1 << 18
"""Bytes of a file at most: it travels in a message."""
_BUDGET = ("own-seconds", "memory-bytes", "senders", "cautious", "message-tokens")
_LINK = ("mbit", "rtt-seconds")
_HELP = (
    "sender",
    "receiver",
    "way",
    "gains",
    "prefill",
    "fuse",
    "decode-seconds",
    "bytes",
    "memory-bytes",
    "trust",
)


@dataclass(frozen=True, kw_only=True)
class Help:
    """One sender in one form.

    Attributes
    ----------
    sender, receiver : str
        Model sources, or the first eight digits or more of the weights' SHA-256; an empty receiver
        stands for any.
    way : str
        ``bf16``, ``int8``, ``int4`` or ``text``.
    gains : mapping
        Task class, or ``any`` -> accuracy gained.
    prefill, fuse : float
        Tokens a second: the sender's reading, the receiver's fusing (of text: its reading).
    decode_seconds, nbytes : float
        Of text: until it is written, and what it weighs.
    memory : float or None
        Bytes at the receiver; none to count the fuser and its slots.
    trust : int
        Highest privacy level of a question that it may be shown.
    """

    sender: str
    receiver: str = ""
    way: str
    gains: Mapping[str, Interval]
    prefill: float
    fuse: float
    decode_seconds: float = 0.0
    nbytes: float = 0.0
    memory: float | None = None
    trust: int = 0


@dataclass(frozen=True, kw_only=True)
class Gains:
    """All of a file.

    Attributes
    ----------
    mbit, rtt : mapping
        Sender, or ``any`` -> Mbit/s and seconds of its link.
    own_seconds : float
        What the receiver's own prompt takes.
    memory : float
        Bytes that are free at the receiver.
    senders : int
        At most so many are asked.
    cautious : bool
        Count gains at their intervals' lower ends.
    message_tokens : int
        Length of a message in words, at most: what gains by text were measured at.
    tree : mapping
        The file itself, to be passed on.
    """

    helps: tuple[Help, ...]
    mbit: Mapping[str, float]
    rtt: Mapping[str, float]
    own_seconds: float = 0.0
    memory: float = math.inf
    senders: int = 8
    cautious: bool = True
    message_tokens: int = 80
    tree: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        """Write it as it travels; ``read_gains`` reads it again."""
        return json.dumps(self.tree, sort_keys=True, separators=(",", ":"))

    def of(self, receiver: tuple[str, str], sender: tuple[str, str]) -> list[Help]:
        """Return what is known of a pair; models are a source and a hash."""
        return [
            row
            for row in self.helps
            if is_named(row.sender, *sender)
            and (not row.receiver or is_named(row.receiver, *receiver))
        ]


def is_named(name: str, source: str, model: str) -> bool:
    """Tell whether a name in a file is this model's: its source, or how its hash begins.

    >>> is_named("tiny:llama", "tiny:llama", "ab" * 32), is_named("abababab", "x", "ab" * 32)
    (True, True)
    """
    return name == source or (len(name) >= 8 and model.startswith(name))


def read_gains(told: str) -> Gains:
    """Read a TOML file, or the JSON that ``Gains.to_json`` wrote if ``told`` begins with a brace.

    Raises
    ------
    Refusal
        If there is no such file, or something in it is missing, unknown or not a measurement.
    """
    if told.lstrip().startswith("{"):
        return _gains(_parsed(told, "measured gains", json.loads), "measured gains")
    path = Path(told).expanduser()
    try:
        if path.stat().st_size > LIMIT:
            raise Refusal(f"{told}: {path.stat().st_size} bytes of gains, at most {LIMIT} are read")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"{told}: expected measured gains as TOML in UTF-8") from error
    except OSError as error:
        raise Refusal(
            f"{told}: {error.strerror}; expected a TOML file of measured gains (docs/fedrefine.md)"
        ) from error
    return _gains(_parsed(text, told, tomllib.loads), told)


def _parsed(text: str, where: str, parse: Any) -> dict[str, Any]:
    try:
        found = parse(text)
    except (ValueError, RecursionError) as error:  # both formats' errors are ValueErrors
        raise Refusal(f"{where}: {error}") from error
    return _table(found, where, ("budget", "links", "help"))


def _gains(tree: dict[str, Any], where: str) -> Gains:
    budget = _table(tree.get("budget", {}), f"{where}: budget", _BUDGET)
    links = _table(tree.get("links", {}), f"{where}: links")
    if not links:
        raise Refusal(f"{where}: no links: expected [links.{ANY}] with mbit, or one a sender")
    rows = tree.get("help", [])
    if not isinstance(rows, list) or not rows:
        raise Refusal(f"{where}: no [[help]]: expected one for each sender in each form")
    mbit, rtt = {}, {}
    for name, link in links.items():
        at = f"{where}: links.{name}"
        link = _table(link, at, _LINK)
        mbit[name], rtt[name] = _number(link, "mbit", at), _number(link, "rtt-seconds", at, 0.0)
    at = f"{where}: budget"
    cautious = budget.get("cautious", True)
    if not isinstance(cautious, bool):
        raise Refusal(f"{at}: cautious = {cautious!r}: expected true or false")
    helps = tuple(_help(row, f"{where}: help {n}") for n, row in enumerate(rows, 1))
    named = [(row.sender, row.receiver, row.way) for row in helps]
    if twice := [name for name in named if named.count(name) > 1]:
        raise Refusal(f"{where}: {twice[0][0]} comes twice by {twice[0][2]}: expected once")
    return Gains(
        helps=helps,
        mbit=mbit,
        rtt=rtt,
        own_seconds=_number(budget, "own-seconds", at, 0.0),
        memory=_number(budget, "memory-bytes", at, math.inf),
        senders=_whole(budget, "senders", at, 8),
        cautious=cautious,
        message_tokens=_whole(budget, "message-tokens", at, 80, least=1),
        tree=tree,
    )


def _help(told: Any, where: str) -> Help:
    row = _table(told, where, _HELP)
    sender, receiver, way = (row.get(k, "") for k in ("sender", "receiver", "way"))
    if not isinstance(sender, str) or not sender or not isinstance(receiver, str):
        raise Refusal(f"{where}: expected sender = a model source or how its hash begins")
    if way not in WAYS:
        raise Refusal(f"{where}: way = {way!r}: expected one of {', '.join(WAYS)}")
    if way != "text" and (odd := [k for k in ("decode-seconds", "bytes") if k in row]):
        raise Refusal(f'{where}: {odd[0]} belongs to way = "text", not to {way}')
    gains = _table(row.get("gains", {}), f"{where}: gains")
    if not gains:
        raise Refusal(f"{where}: no gains: expected gains.{ANY} = [value, low, high], or by task")
    return Help(
        sender=sender,
        receiver=receiver,
        way=way,
        gains={task: _gain(x, f"{where}: gains.{task}") for task, x in gains.items()},
        prefill=_number(row, "prefill", where, above=True),
        fuse=_number(row, "fuse", where, above=True),
        decode_seconds=_number(row, "decode-seconds", where) if way == "text" else 0.0,
        nbytes=_number(row, "bytes", where) if way == "text" else 0.0,
        memory=_number(row, "memory-bytes", where) if "memory-bytes" in row else None,
        trust=_whole(row, "trust", where, 0),
    )


def _gain(told: Any, where: str) -> Interval:
    numbers = isinstance(told, list) and len(told) == 3 and all(map(_is_number, told))
    if not numbers or not -1 <= told[1] <= told[0] <= told[2] <= 1:
        raise Refusal(
            f"{where} = {told!r}: expected [value, low, high] of the accuracy gained, from -1 to 1"
        )
    return Interval(*map(float, told))


def _table(told: Any, where: str, known: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise Refusal(f"{where}: expected a table, {type(told).__name__} came")
    if known and (odd := sorted(told.keys() - set(known))):
        hint = nearest(odd[0], known)
        raise Refusal(f"{where}: unknown {odd[0]}{hint}: expected some of {', '.join(known)}")
    return told


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _number(
    table: Mapping[str, Any],
    key: str,
    where: str,
    default: float | None = None,
    *,
    above: bool = False,
) -> float:
    """Read a finite number of 0 or more, or above 0; one without a default must be there."""
    if key not in table and default is not None:
        return default
    what = "a measured number above 0" if above else "a number of 0 or more"
    if key not in table:
        raise Refusal(f"{where}: no {key}: expected {what}")
    if not _is_number(x := table[key]) or x < 0 or (above and not x):
        raise Refusal(f"{where}: {key} = {x!r}: expected {what}")
    return float(x)


def _whole(table: Mapping[str, Any], key: str, where: str, default: int, least: int = 0) -> int:
    x = table.get(key, default)
    if type(x) is not int or x < least:
        raise Refusal(f"{where}: {key} = {x!r}: expected a whole number of {least} or more")
    return x
