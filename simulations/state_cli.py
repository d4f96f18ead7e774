# SPDX-License-Identifier: Apache-2.0
"""``fedloom state``: look at saved states, and remove them; needs neither torch nor the model."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedloom import states
from fedloom.errors import Refusal

app = typer.Typer(
    help="Inspect and remove saved states of contexts.", no_args_is_help=True, add_completion=False
)

Place = Annotated[Path, typer.Argument(help="A state file, or a folder of them.")]


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A state file.")]) -> None:
    """Show what a state holds: tokens, age, sizes and the norm of each layer's memory."""
    header, held = states.read_header(file), states.contents(file)
    rows = {
        "tokens": header.tokens,
        "age": _span(states.age(header)),
        "created": header.created,
        "expires": _expiry(header),
        "base": header.owner.base[:16],
        "adapter": header.owner.adapter[:16],
        "layers": held.layers,
        "memory bytes": held.memory_bytes,
        "attention bytes": held.attention_bytes,
        "|S| by layer": " ".join(f"{norm:.3g}" for norm in held.norms),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<16} {value}")


@app.command(name="list")
def listed(place: Place = Path()) -> None:
    """List the states of a folder."""
    table = Table("state", "tokens", "age", "expires", "bytes", box=None, pad_edge=False)
    for path in states.states_in(place):
        header = states.read_header(path)
        size = str(path.stat().st_size)
        table.add_row(
            path.name, str(header.tokens), _span(states.age(header)), _expiry(header), size
        )
    Console().print(table)


@app.command()
def expire(place: Place) -> None:
    """Delete the states whose day has come."""
    for path in states.states_in(place):
        if states.read_header(path).expired():
            states.delete(path)
            typer.echo(f"deleted {path}")


@app.command()
def delete(
    place: Place,
    everything: Annotated[bool, typer.Option("--all", help="All states of a folder.")] = False,
) -> None:
    """Delete a state; with --all, those of a folder."""
    if place.is_dir() and not everything:
        raise Refusal(f"{place} is a folder: expected a state file, or --all for all in it")
    for path in states.states_in(place):
        states.delete(path)
        typer.echo(f"deleted {path}")


def _expiry(header: states.Header) -> str:
    return f"{header.expires or 'never'}{' (expired)' if header.expired() else ''}"


def _span(age: timedelta) -> str:
    """Write a duration by its largest unit.

    >>> _span(timedelta(hours=49)), _span(timedelta(seconds=5))
    ('2 d', '5 s')
    """
    seconds = int(age.total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
