# SPDX-License-Identifier: Apache-2.0
"""The report's plots: pure functions from numbers to SVG text, the same bytes each time.

They use matplotlib's object-oriented interface (no pyplot, no display, no style file of the
machine), and leave text as text, so that the page's font applies and a search finds it.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.intervals import Interval

Curve = Mapping[int, float]
"""Round -> value; rounds may be missing."""

# Okabe & Ito's palette without its yellow, which is too pale on white.  Marks differ as well, so
# that a grey print can be read.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
MANY = 12  # clients; a legend with more names hides more than it tells
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))

_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.color": "#e3e3e3",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedloom",
    "text.parse_math": False,  # a client may be called "$5"
}


def curves(
    series: Sequence[tuple[str, Curve]],
    mean: Curve,
    *,
    title: str,
    ylabel: str,
    chance: float | None = None,
) -> str:
    """Draw one line a client over the rounds, and their macro mean in black.

    Parameters
    ----------
    series
        Client names with their curves; names may repeat.
    mean
        The macro mean; an empty curve is left out.
    title, ylabel
        Texts, the second with its unit.
    chance
        Where to draw the line of guessing, in the unit of the curves.
    """
    with _drawing():
        figure = Figure(figsize=(6.4, 4.0))
        axes = figure.add_subplot(xlabel="round", ylabel=ylabel, title=title)
        for index, (name, curve) in enumerate(series):
            axes.plot(*_points(curve), **_line(index, len(series)), label=_label(name))
        if mean:
            axes.plot(*_points(mean), color="black", lw=2.4, label="macro mean")
        if chance is not None:
            axes.axhline(chance, color="#666666", ls="--", lw=1, label=f"chance, {chance:.4g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, axes, ncols=3, skip=len(series) if len(series) > MANY else 0)
        return _svg(figure, title)


def ranges(
    names: Sequence[str],
    columns: Mapping[str, Sequence[Interval | None]],
    *,
    title: str,
    xlabel: str,
    chance: Sequence[float] = (),
) -> str:
    """Draw a dot with its interval for each client (a row) and each adapter (a colour).

    Parameters
    ----------
    names
        Clients, top to bottom.
    columns
        What is compared -> one interval a client; None leaves a gap.
    title, xlabel
        Texts, the second with its unit.
    chance
        Where guessing is for each client, in the unit of the intervals; empty for no line.
    """
    with _drawing():
        figure = Figure(figsize=(6.4, 1.5 + 0.45 * len(names)))
        axes = figure.add_subplot(xlabel=xlabel, title=title)
        for index, (label, column) in enumerate(columns.items()):
            _range_column(axes, column, index, (index + 1) / (len(columns) + 1) - 0.5, label)
        _chance_lines(axes, chance)
        axes.set_yticks(range(len(names)), labels=[_label(name) for name in names])
        axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        _legend(figure, axes, ncols=4)
        return _svg(figure, title)


def traffic(per_round: Mapping[int, Mapping[str, tuple[int, int]]]) -> str:
    """Draw the bytes of each round: a bar down, a bar up, framing hatched on top.

    Parameters
    ----------
    per_round
        Round -> ``"down"`` or ``"up"`` -> (bytes of arrays, bytes of framing).
    """
    title = "Bytes on the wire per round, all clients together"
    largest = max((sum(pair) for r in per_round.values() for pair in r.values()), default=0)
    size, unit = next((size, unit) for size, unit in UNITS if largest >= size or unit == "B")
    with _drawing():
        figure = Figure(figsize=(6.4, 3.4))
        axes = figure.add_subplot(xlabel="round", ylabel=f"sent ({unit})", title=title)
        for index, way in enumerate(("down", "up")):
            arrays = [per_round[r].get(way, (0, 0))[0] / size for r in per_round]
            framing = [per_round[r].get(way, (0, 0))[1] / size for r in per_round]
            at = [r + 0.36 * (index - 0.5) for r in per_round]
            hue = COLOURS[index]
            axes.bar(at, arrays, 0.34, color=hue, label=f"{way}, arrays")
            hatched: dict[str, Any] = {"color": "white", "edgecolor": hue, "hatch": "////"}
            axes.bar(at, framing, 0.34, arrays, **hatched, label=f"{way}, framing")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        _legend(figure, axes, ncols=4)
        return _svg(figure, title)


def _range_column(
    axes: Any, column: Sequence[Interval | None], index: int, shift: float, label: str
) -> None:
    known = [(row + shift, at) for row, at in enumerate(column) if at is not None]
    arms = [
        [_arm(at.value - at.low) for _, at in known],
        [_arm(at.high - at.value) for _, at in known],
    ]
    axes.errorbar(
        [at.value for _, at in known],
        [row for row, _ in known],
        xerr=arms if known else None,
        fmt=MARKS[index % len(MARKS)],
        color=COLOURS[index % len(COLOURS)],
        ms=5,
        capsize=2.5,
        label=label,
    )


def _chance_lines(axes: Any, chance: Sequence[float]) -> None:
    """Draw one line, or one for each client if their rows have other numbers of options."""
    look: dict[str, Any] = {"color": "#666666", "ls": "--", "lw": 1}
    if len({f"{at:.6g}" for at in chance}) == 1:
        axes.axvline(chance[0], **look, label=f"chance, {chance[0]:.4g}")
    elif chance:
        rows = range(len(chance))
        low, high = [row - 0.42 for row in rows], [row + 0.42 for row in rows]
        axes.vlines(chance, low, high, **look, label="chance, by client")


def _arm(length: float) -> float:
    """Draw no whisker for an interval that is not known or, from one row, not bounded."""
    return length if math.isfinite(length) else 0.0


@contextmanager
def _drawing() -> Iterator[None]:
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # The browser draws the text with its own fonts; matplotlib's lack most scripts.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font", module=r".*")
        yield


def _legend(figure: Figure, axes: Any, *, ncols: int, skip: int = 0) -> None:
    handles, labels = (found[skip:] for found in axes.get_legend_handles_labels())
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=ncols)


def _line(index: int, count: int) -> dict[str, Any]:
    if count > MANY:
        return {"color": "#9aa7b1", "lw": 0.8}
    colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
    return {"color": colour, "marker": mark, "ms": 4.5, "lw": 1.3}


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    rounds = sorted(curve)
    return rounds, [curve[r] for r in rounds]


def _label(name: str) -> str:
    """Shorten long names; matplotlib drops labels that start with an underscore."""
    name = name if len(name) <= 28 else name[:27] + "…"
    return f" {name}" if name.startswith("_") else name


def _svg(figure: Figure, title: str) -> str:
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=no_metadata)
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg ") :]  # HTML wants neither XML declaration nor doctype
    # Several drawings share a page, and an id may occur once in it.
    prefix = re.sub(r"[^a-z]+", "-", title.lower())
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", drawn)
    told = f'<svg role="img" aria-label="{html.escape(title)}" '
    return told + drawn.removeprefix("<svg ").rstrip()
