# SPDX-License-Identifier: Apache-2.0
"""What a run is doing, read from the ``events.jsonl`` that its server writes.

In a terminal it is a live display, elsewhere one plain line an event, without control codes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedloom.simulations.amounts import adapter_line, duration, size
from fedloom.simulations.group_words import call_line, group_lines

Event = Mapping[str, Any]

NODES_SHOWN = 12
ROUNDS_SHOWN = 10


def follow(
    path: Path, stopped: Callable[[], bool], *, poll_seconds: float = 0.2, start: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the events of a file that may not exist yet and whose last line may be half written.

    The first ``start`` bytes are passed over.

    Ends when ``stopped()`` is true and everything that was written before has been read.
    """
    rest, read = b"", start
    while True:
        last = stopped()  # asked first: what was written before the answer is still read
        chunk = b""
        if path.exists():
            with path.open("rb") as handle:
                handle.seek(read)
                chunk = handle.read()
        read += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if event := _parsed(line):
                yield event
        if last:
            return
        if not chunk:
            time.sleep(poll_seconds)


def _parsed(line: bytes) -> dict[str, Any] | None:
    # A display must not end a run because of one bad line.
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


@dataclass
class Picture:
    """All that is known of a run so far; fold events into it with ``take``."""

    start: Event = field(default_factory=dict)
    nodes: list[Event] = field(default_factory=list)
    rounds: list[Event] = field(default_factory=list)
    failures: list[Event] = field(default_factory=list)
    phase: Event = field(default_factory=dict)
    answered: int = 0
    refusal: str = ""
    traceback_shown: bool = False
    status: str = ""
    """``completed`` or ``failed`` once the server has said so."""
    reason: str = ""
    began: float = field(default_factory=time.time)
    turned: float = 0.0
    """When the last round ended, or the first began; Unix time, like ``began``."""
    round_seconds: list[float] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Fold one event in."""
        match event["event"]:
            case "start":
                self.start = event
            case "nodes":
                self.nodes = list(event.get("nodes", []))
            case "roll-call":
                self.nodes += event.get("nodes", [])
            case "phase":
                if not self.turned and event.get("round"):
                    self.turned = _when(event)
                if not self._joins(event):
                    self.phase, self.answered = event, 0
            case "reply":
                self.answered += 1
            case "client-failed":
                self.failures.append(event)
                self.answered += 1
            case "round":
                self._take_round(event)
            case "resumed":
                self.start, self.turned = {**self.start, **event, "event": "start"}, _when(event)
            case "refused":
                self.refusal = str(event.get("reason", ""))
            case "end":
                self.status = str(event.get("status", ""))
                self.reason = str(event.get("reason", ""))

    def _joins(self, event: Event) -> bool:
        """Add a group's phase to that of the groups before it: they go on together."""
        same = [event.get(k) == self.phase.get(k) for k in ("round", "phase")]
        if "group" not in event or not all(same):
            return False
        self.phase = {**event, "clients": self.phase.get("clients", 0) + event.get("clients", 0)}
        return True

    def _take_round(self, event: Event) -> None:
        now = _when(event)
        if event.get("round"):  # round 0 is the untouched model
            taken = float(event["seconds"]) if _has(event) else now - (self.turned or now)
            self.round_seconds.append(taken)
            self.turned = now
            event = {**event, "seconds": taken}
        self.rounds.append(event)

    @property
    def total_rounds(self) -> int:
        """How many rounds the run will have."""
        return int(self.start.get("rounds", 0))

    def seconds_left(self) -> float | None:
        """Estimate from the rounds done; none before the first."""
        if not self.round_seconds or not self.total_rounds:
            return None
        mean = sum(self.round_seconds) / len(self.round_seconds)
        left = self.total_rounds - int(self.rounds[-1]["round"])
        return max(0.0, mean * left - min(time.time() - self.turned, mean))

    def client(self, partition: object) -> str:
        """Name a client by its partition, and by its data if that is known."""
        names = {node.get("partition"): str(node.get("name", "")) for node in self.nodes}
        return " ".join(filter(None, [f"client {partition}", names.get(partition, "")]))


def show(
    path: Path, console: Console, stopped: Callable[[], bool], picture: Picture, start: int = 0
) -> None:
    """Show the events of ``path`` until ``stopped()``, keeping ``picture`` up to date.

    Of the first ``start`` bytes ``picture`` knows already.
    """
    if not console.is_terminal:
        for event in follow(path, stopped, start=start):
            _take_and_say(event, picture, console, plain=True)
        return
    with Live(console=console, get_renderable=lambda: render(picture), refresh_per_second=4):
        for event in follow(path, stopped, start=start):
            _take_and_say(event, picture, console, plain=False)


def _take_and_say(event: Event, picture: Picture, console: Console, *, plain: bool) -> None:
    picture.take(event)
    failed = event["event"] == "client-failed"
    for line in plain_lines(event, picture) if plain or failed else ():
        say(console, line)
    if failed and event.get("traceback") and not picture.traceback_shown:
        picture.traceback_shown = True
        say(console, str(event["traceback"]).rstrip())


def say(console: Console, line: str) -> None:
    """Print a line as it is: no markup, no highlighting, no wrapping.

    A reader that has gone away silences the console; it must not decide how the run ends.
    """
    try:
        console.print(Text(line), soft_wrap=True)
    except (OSError, ValueError, SystemExit):  # rich leaves the thread on a broken pipe
        console.quiet = True


def plain_lines(event: Event, picture: Picture) -> list[str]:
    """Say one event in words. What ends a run is left to whoever started it."""
    where = f"round {event.get('round', 0)}/{picture.total_rounds or '?'}"
    if "group" in event:
        where += f", group {event['group']}"
    match event["event"]:
        case "start":
            facts = [f"{event.get('method')}: {event.get('rounds')} rounds"]
            facts += [f"{event.get('clients')} clients", f"seed {event.get('seed')}"]
            return [", ".join(facts)]
        case "resumed":
            return [_resumed_line(event)]
        case "roll-call":
            return [f"{where}: {call_line(event, picture.client)}"]
        case "nodes":
            return [_node_line(node, picture) for node in picture.nodes]
        case "registry":
            return [f"fusers: {len(event.get('fusers', []))} of these models' pairs"]
        case "pair":
            return [f"{where}: {_pair(event)}"]
        case "groups":
            return group_lines(event.get("groups", []))
        case "group-round":
            return [f"{where}: {', '.join(round_facts(event))}"]
        case "adapter":
            return [adapter_line(event)]
        case "choice":
            return [f"{where}: {_choice(event)}"]
        case "shares":
            return [f"{where}: the server saw {event.get('seen')}{_spent(event)}"]
        case "privacy" if event.get("round") == 1:
            return [f"{where}: the server sees {event.get('seen')} (rule {event.get('rule')})"]
        case "phase":
            return [f"{where}: {event.get('phase')}, {event.get('clients')} clients"]
        case "reply":
            return [f"{where}: {picture.client(event.get('partition'))} {_reply(event)}"]
        case "client-failed":
            who, what = picture.client(event.get("partition")), event.get("phase")
            reason = " ".join(str(event.get("reason", "")).split())
            return [f"{where}: {who} failed in {what}: {reason}"]
        case "rested":
            who = ", ".join(picture.client(p) for p in event.get("partitions", []))
            return [f"{where}: {who} kept failing and is not asked"]
        case "late-reply":
            return [f"{where}: {picture.client(event.get('partition'))} answered too late"]
        case "round":
            event = picture.rounds[-1] if picture.rounds else event
            left = picture.seconds_left()
            tail = "" if left is None else f", {duration(left)} left"
            return [f"{where}: {', '.join(round_facts(event))}{tail}"]
    return []


def _resumed_line(event: Event) -> str:
    line = f"goes on after round {event.get('after')} of {event.get('rounds')}"
    line += f" ({event['note']})" if event.get("note") else ""
    absent = ", ".join(map(str, event.get("absent", ())))
    line += f"; not there: clients {absent}" if absent else ""
    left_out = "; ".join(map(str, event.get("left-out", ())))
    return line + (f"; left out: {left_out}" if left_out else "")


def _spent(event: Event) -> str:
    lost = f", {len(event['lost'])} clients lost" if event.get("lost") else ""
    if "epsilon-spent" not in event:
        return lost
    return f"{lost}; epsilon {event['epsilon-spent']:.3g} spent at delta {event.get('delta'):.3g}"


def round_facts(row: Event) -> list[str]:
    """Say what a round brought, leaving out what was not measured."""
    facts = [f"train loss {row['train-loss']:.3f}"] if _has(row, "train-loss") else []
    facts += [f"gold CE {row['gold-ce']:.3f}"] if _has(row, "gold-ce") else []
    facts += [f"accuracy {row['accuracy']:.1%}"] if _has(row, "accuracy") else []
    facts += [f"{row['row-accuracy']:.1%} of all rows"] if _has(row, "row-accuracy") else []
    facts += [f"alpha {row['alpha']:g}"] if _has(row, "alpha") else []
    facts += [f"rank {row['rank']:.0f}"] if _has(row, "rank") else []
    facts += [f"{row['rows']:.0f} rows summed"] if _has(row, "rows") else []
    facts += [f"{size(row['bytes-down'])} down"] if _has(row, "bytes-down") else []
    facts += [f"{size(row['bytes-up'])} up"] if _has(row, "bytes-up") else []
    facts += [f"agg error {row['agg-error']:.2g}"] if _has(row, "agg-error") else []
    facts += [f"mask rounding {row['mask-error']:.1g}"] if _has(row, "mask-error") else []
    facts += [f"epsilon {row['epsilon-spent']:.3g}"] if _has(row, "epsilon-spent") else []
    facts += [f"cut off {row['truncation-error']:.2g}"] if _has(row, "truncation-error") else []
    facts += [duration(row["seconds"])] if _has(row) else []
    facts += [f"{row['failed']} failed"] if row.get("failed") else []
    return facts + ([f"{row['late']} came too late"] if row.get("late") else [])


def render(picture: Picture) -> RenderableType:
    """Draw the live display."""
    start = picture.start
    title = "starting Flower and Ray"
    if start:
        title = (
            f"{start.get('method')}   {start.get('rounds')} rounds   {start.get('clients')} clients"
            f"   seed {start.get('seed')}"
        )
    parts: list[RenderableType] = [Text(title, style="bold")]
    parts += [_node_table(picture)] if picture.nodes else []
    parts += [_round_table(picture)] if picture.rounds else []
    return Group(*parts, Text(_status_line(picture)))


def _status_line(picture: Picture) -> str:
    facts = []
    if phase := picture.phase:
        facts = [f"round {phase.get('round')}/{picture.total_rounds}", str(phase.get("phase"))]
        facts += [f"{picture.answered}/{phase.get('clients')} answered"]
    facts += [f"{len(picture.failures)} failures"] if picture.failures else []
    facts += [f"elapsed {duration(time.time() - picture.began)}"]
    left = picture.seconds_left()
    return "   ".join(facts + ([] if left is None else [f"left {duration(left)}"]))


def _node_table(picture: Picture) -> Table:
    table = Table("client", "train rows", "test rows", "placement", box=None, pad_edge=False)
    for node in picture.nodes[:NODES_SHOWN]:
        who = Text(picture.client(node.get("partition")))
        table.add_row(who, str(node.get("train")), str(node.get("test")), Text(_placement(node)))
    if (hidden := len(picture.nodes) - NODES_SHOWN) > 0:
        table.add_row(f"and {hidden} more")
    return table


def _round_table(picture: Picture) -> Table:
    heads = ("round", "train loss", "gold CE", "accuracy", "agg error", "down", "up", "time")
    table = Table(*heads, "failed", box=None, pad_edge=False)
    for row in picture.rounds[-ROUNDS_SHOWN:]:
        table.add_row(
            str(row.get("round")),
            f"{row['train-loss']:.3f}" if _has(row, "train-loss") else "",
            f"{row['gold-ce']:.3f}" if _has(row, "gold-ce") else "",
            f"{row['accuracy']:.1%}" if _has(row, "accuracy") else "",
            f"{row['agg-error']:.2g}" if _has(row, "agg-error") else "",
            size(row["bytes-down"]) if _has(row, "bytes-down") else "",
            size(row["bytes-up"]) if _has(row, "bytes-up") else "",
            duration(row["seconds"]) if _has(row) else "",
            str(row.get("failed", "")),
        )
    return table


def _node_line(node: Event, picture: Picture) -> str:
    rows = f"{node.get('train')} train rows, {node.get('test')} test rows"
    return f"{picture.client(node.get('partition'))}: {rows}, {_placement(node)}"


def _placement(node: Event) -> str:
    device, visible = str(node.get("device", "?")), str(node.get("visible-gpus", ""))
    return f"{device} (GPUs {visible})" if visible else device


def _reply(event: Event) -> str:
    facts = [f"answered {event.get('phase')}"]
    facts += [f"in {duration(event['seconds'])}"] if _has(event) else []
    return " ".join(facts) + (f", loss {event['loss']:.3f}" if _has(event, "loss") else "")


def _choice(event: Event) -> str:
    taken = event.get("taken", {})
    prior = f", N0 {taken['prior']:g}" if taken.get("prior") else ""
    told = f"alpha {taken.get('alpha')}{prior} of {len(event.get('solutions', ()))} solutions"
    scored = f", {taken['accuracy']:.1%} right" if _has(taken, "accuracy") else ""
    return f"{told} taken on {event.get('rows', 0):.0f} validation rows{scored}"


def _pair(event: Event) -> str:
    names = f"{event.get('receiver-model')} hearing"
    lost = f", {event['lost']} fell away" if event.get("lost") else ""
    if _has(event, "recovered"):
        lost += f"; {event['recovered']:.1%} of {event['attacked-tokens']} tokens read back"
    return (
        f"{names} {event.get('sender-model')} alone: {event['refined']:.1%} right,"
        f" {event['alone']:.1%} without, of {event['rows']:.0f} rows"
        f" ({event.get('gained')} gained, {event.get('spoilt')} spoilt){lost}"
    )


def _when(event: Event) -> float:
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:  # not said: then it is now
        return time.time()


def _has(row: Event, key: str = "seconds") -> bool:
    return isinstance(row.get(key), int | float)
