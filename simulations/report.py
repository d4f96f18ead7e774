# SPDX-License-Identifier: Apache-2.0
"""Turn the folder that a run leaves into one page: ``report.html``, and ``summary.json`` beside it.

``findings`` reads and counts, ``report.jinja`` words it, ``figures`` draws it.  The page asks for
nothing from a network and runs no script, and the same folder gives the same bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from fedloom.errors import Refusal
from fedloom.intervals import Interval
from fedloom.simulations.findings import PHASES, Client, ReportData, report_data
from fedloom.simulations.scores import MEASURES

__all__ = ["ReportData", "report_data", "summary", "write_report"]

MISSING = "not measured"


def write_report(folder: Path) -> Path:
    """Write ``report.html`` and ``summary.json`` into a run's folder; return the page's path.

    Raises
    ------
    Refusal
        If the folder cannot be read or the ``report`` extra is not installed.
    """
    data = report_data(folder)
    page = _page(data)
    told = json.dumps(summary(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _replace(folder / "summary.json", told)
    return _replace(folder / "report.html", page)


def summary(data: ReportData) -> dict[str, Any]:
    """Return the headline numbers as plain JSON; what is not known or not finite is null."""
    config, manifest, traffic = data.config, data.manifest, data.traffic
    tree = {
        "name": data.name,
        "status": data.status,
        "reason": data.reason,
        "method": config.method if config else None,
        "model": _frozen(data),
        "base-sha256": manifest.base if manifest else None,
        "seed": config.seed if config else None,
        "rounds": config.rounds if config else None,
        "rounds-done": data.rounds_done,
        "clients": len(data.clients),
        "lower-than-frozen": {key: asdict(value) for key, value in data.lowered.items()},
        "letter-ce-below-chance": asdict(data.below_chance),
        "chance": data.chance,
        "worst-decile": {
            how: {m: worst[0] for m in MEASURES if (worst := data.worst(how, m))} for how in PHASES
        },
        "macro": {
            how: {"clients": data.macro_clients[how], **{k: asdict(v) for k, v in means.items()}}
            for how, means in data.macros.items()
        },
        "aggregation-drop": {
            key.replace("_", "-"): dict(zip(("mean", "clients"), found, strict=True))
            for key in ("points", "gold_ce", "letter_ce")
            if (found := data.mean_drop(key))
        },
        "parameters": data.parameters,
        "payload-bytes": {
            "claimed": manifest.nbytes() if manifest else None,
            "measured": list(traffic.payloads),
        },
        "bytes": {
            "down": traffic.share("down"),
            "up": traffic.share("up"),
            "framing": traffic.share(framing=True),
            "total": traffic.share(),
        },
        "failures": len(data.failures),
        "per-client": [_client_summary(client) for client in data.clients],
    }
    if data.privacy:
        tree["privacy"] = {k: v for k, v in data.privacy.items() if k not in ("event", "time")}
    if data.fast is not None:
        tree["fast-weights"] = data.fast.to_tree()
    if data.refined is not None:
        tree["refined"] = data.refined.to_tree()
    return dict(_finite(tree))


def _frozen(data: ReportData) -> str | None:
    if data.config is None:
        return None
    if data.refined is not None:
        return data.config.refine.models
    if data.fast is not None:
        return ", ".join(g.encoder for g in data.fast.groups) or data.config.faast.listed[0]
    return data.config.model.source


def _client_summary(client: Client) -> dict[str, Any]:
    scores = {
        how: {
            "round": s.round,
            "examples": s.examples,
            **{k: asdict(v) for k, v in s.measured.items()},
            **({"depths": {d: asdict(at) for d, at in s.depths.items()}} if s.depths else {}),
        }
        for how, s in client.scores.items()
    }
    drop = asdict(client.drop) if client.drop else None
    head = {"partition": client.partition, "name": client.name, "chance": client.chance}
    return {**head, **scores, "aggregation-drop": drop}


def _finite(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _replace(path: Path, text: str) -> Path:
    """Write a file whole or not at all: a reader never meets half a page."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def _page(data: ReportData) -> str:
    try:
        from jinja2 import (
            Environment,
            FunctionLoader,
            StrictUndefined,
        )  # only a report needs these two
        from markupsafe import Markup

        from fedloom.simulations import figures  # matplotlib
    except ImportError as error:
        raise Refusal(f"a report needs {error.name}: pip install 'fedloom[report]'") from error
    engine = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_words),
    )
    engine.filters.update(nats=_nats, percent=_percent, signed=_signed, count=_count)
    engine.filters.update(size=_size, duration=_duration, share=_share)
    page = "faast.jinja" if data.fast is not None else "report.jinja"
    page = page if data.refined is None else "refine.jinja"
    drawn = {name: Markup(svg) for name, svg in _figures(data, figures).items()}
    told = engine.get_template(page).render(data=data, figures=drawn, missing=MISSING)
    return told.rstrip() + "\n"


def _words(name: str) -> str:
    return resources.files("fedloom.simulations").joinpath(name).read_text("utf-8")


def _figures(data: ReportData, draw: Any) -> dict[str, str]:
    made: dict[str, str] = {}
    for measure, title, chance in (
        ("gold-ce", "Gold-letter CE per round (0 = frozen backbone)", None),
        ("letter-ce", "Letter CE per round (0 = frozen backbone)", data.chance["letter-ce"]),
    ):
        if data.fast is not None:
            continue  # it has one round
        series = [(c.name, c.curves[measure]) for c in data.clients if measure in c.curves]
        if series:
            label = f"{title.split(' CE')[0].lower()} CE (nats per row)"
            mean = data.mean_curve(measure)
            made[measure] = draw.curves(series, mean, title=title, ylabel=label, chance=chance)
    losses = [(c.name, curve) for c in data.clients if (curve := _losses(c))]
    if losses:
        title = "Training loss per round, mean over the round's steps"
        made["loss"] = draw.curves(losses, {}, title=title, ylabel="training loss (nats)")
    if data.traffic.per_round:
        made["traffic"] = draw.traffic(data.traffic.per_round)
    return made | _range_figures(data, draw)


def _range_figures(data: ReportData, draw: Any) -> dict[str, str]:
    made: dict[str, str] = {}
    names = [client.name for client in data.clients]
    gold = "Gold-letter CE" if data.fast is None else "CE of the right class"
    for measure, title, label, scale in (
        ("gold-ce", f"{gold} with 95 % t intervals", "CE (nats per row)", 1),
        ("letter-ce", "Letter CE with 95 % t intervals", "CE (nats per row)", 1),
        ("accuracy", "Accuracy with 95 % Wilson intervals", "accuracy (%)", 100),
    ):
        columns = {how: _column(data, how, measure, scale) for how in PHASES}
        columns = {how: column for how, column in columns.items() if any(column)}
        chance = [scale * c.chance[measure] for c in data.clients if measure in c.chance]
        if columns:
            drawn = draw.ranges(names, columns, title=title, xlabel=label, chance=chance)
            made[f"{measure}-ranges"] = drawn
    return made


def _column(data: ReportData, how: str, measure: str, scale: float) -> list[Interval | None]:
    found = [c.scores[how].measured.get(measure) if how in c.scores else None for c in data.clients]
    return [at and Interval(scale * at.value, scale * at.low, scale * at.high) for at in found]


def _losses(client: Client) -> dict[int, float]:
    return {r: float(row["loss"]) for r, row in client.training.items() if "loss" in row}


def _nats(at: Interval | None) -> str:
    return _interval(at, 1, 3)


def _percent(at: Interval | None) -> str:
    return _interval(at, 100, 1)


def _interval(at: Interval | None, scale: float, digits: int) -> str:
    if at is None:
        return MISSING
    value = f"{scale * at.value:.{digits}f}"
    if not (math.isfinite(at.low) and math.isfinite(at.high)):
        return f"{value} [no interval]"
    return f"{value} [{scale * at.low:.{digits}f}, {scale * at.high:.{digits}f}]"


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f}"


def _signed(value: float | None, digits: int = 3) -> str:
    """Write a difference with its sign, as a typographic minus where it is negative."""
    if value is None:
        return MISSING
    told = f"{value:+.{digits}f}"
    return told.replace("-", "\N{MINUS SIGN}") if float(told) else told[1:]


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _size(count: float | None) -> str:
    """Write bytes in decimal units: 1 MB is a million bytes."""
    if count is None:
        return MISSING
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _duration(seconds: float | str | None) -> str:
    if seconds is None:
        return MISSING
    whole = float(seconds)
    if whole < 120:
        return f"{whole:.1f} s"
    minutes = round(whole / 60)
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
