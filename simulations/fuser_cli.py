# SPDX-License-Identifier: Apache-2.0
"""``fedloom fuser``: teach a fuser, solve one without a gradient, show what a file says of itself.

Results go to stdout as one JSON object; progress goes to stderr.  ``--out`` becomes a folder with
``fuser.safetensors``, the same facts in ``card.md``, and while it is taught a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cards import CHECKPOINT, read_card
from fedloom.errors import Refusal, nearest
from fedloom.simulations.needs import needs_node

if TYPE_CHECKING:
    from fedloom.adapters.fuser import CacheFuser, FuserConfig
    from fedloom.refining.classroom import Classroom

app = typer.Typer(
    help="Fusers: from one model's cache into another's (FedRefine).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

FILE, CARD = "fuser.safetensors", "card.md"
STARTS = ("random", "closed-form")
Sender = Annotated[str, typer.Option(help="Model that is asked, such as embedded:smollm2-135m.")]
Receiver = Annotated[str, typer.Option(help="Model that answers.")]
Data = Annotated[
    str,
    typer.Option(
        help="packaged:bigbench, packaged:mmlu-dev, hub:... or path:FILE; a table without choices"
        " has question, answer and maybe context."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the fuser and its card.")]
Rows = Annotated[int, typer.Option(min=0, help="Lessons to learn from at most; 0 for all.")]
HeldOut = Annotated[float, typer.Option(min=0.01, max=0.9, help="Share of rows held out.")]
Tests = Annotated[int, typer.Option(min=1, help="Held-out lessons to score at most.")]
Longest = Annotated[int, typer.Option(min=0, help="Leave longer texts out, in tokens; 0: none.")]
Width = Annotated[int, typer.Option(min=0, help="Rank; 0 for the widest within --share.")]
Share = Annotated[float, typer.Option(help="Of the receiver's parameters, for a rank of 0.")]
Taps = Annotated[int, typer.Option(min=1, help="Sender layers that each layer looks at.")]
LayerMap = Annotated[str, typer.Option(help="depth, terminal or bottom_up.")]
Tail = Annotated[
    int,
    typer.Option(help="Last tokens of the prompt that see the sender: 1 is quick, 0 is all."),
]
Seed = Annotated[int, typer.Option(min=0)]
Dtype = Annotated[str, typer.Option(help="Of the models: float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda:0.")]


@app.command()
def train(
    sender: Sender,
    receiver: Receiver,
    data: Data,
    out: Out,
    setting: Annotated[
        str, typer.Option(help="same, or context: the sender alone reads the passage.")
    ] = "same",
    mode: Annotated[str, typer.Option(help="prefix (FedRefine) or residual (C2C).")] = "prefix",
    size: Annotated[str, typer.Option(help="small or c2c.")] = "small",
    init: Annotated[str, typer.Option(help="random or closed-form.")] = "random",
    steps: Annotated[int, typer.Option(min=1)] = 300,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    decay: Annotated[str, typer.Option(help="cosine or linear.")] = "cosine",
    keep: Annotated[int, typer.Option(min=0, help="Last tokens handed over; 0: all.")] = 0,
    rows: Rows = 0,
    held_out: HeldOut = 0.2,
    tests: Tests = 200,
    longest: Longest = 256,
    width: Width = 0,
    share: Share = 0.05,
    taps: Taps = 3,
    layer_map: LayerMap = "depth",
    tail: Tail = 1,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")
    ] = False,
    dtype: Dtype = "float32",
    device: Device = "auto",
) -> None:
    """Teach a fuser on questions, and score it on questions held out."""
    asked = _digest(locals())
    _one_of("--init", init, STARTS)
    if (found := _finished(out, asked, resume=resume)) is not None:
        typer.echo(f"fuser: {out / FILE}, taught to its end before", err=True)
        typer.echo(_scores_line(found))
        return
    with needs_node("fuser"):
        from fedloom.refining.teaching import TeachConfig, calibrate, teach
    how = TeachConfig(steps=steps, batch=batch, learning_rate=lr, decay=decay, keep=keep)
    about = {"mode": mode, "size": size, "width": width, "share": share, "taps": taps}
    config = _build(tail, layer_map=layer_map, **about)
    ends = mode == "residual" or init == "closed-form"
    where = (dtype, device)
    room = _classroom(sender, receiver, data, setting, where, ends, rows, held_out, longest, seed)
    if init == "closed-form":
        fuser, _ = room.solved(config, ridge=1e-2, seed=seed)
    else:
        fuser = room.fresh(config, seed=seed)
        calibrate(fuser, room.sender, room.receiver, room.learnt, seed=seed)
    taught: dict[str, Any] = {"seed": seed, "folder": out, "progress": _progress(steps)}
    try:
        report = teach(fuser, room.sender, room.receiver, room.learnt, how, **taught)
    except FloatingPointError as error:
        raise Refusal(f"{error}, or take a wider --dtype than {dtype}") from error
    told = {"loss_first": report.loss_first, "loss_last": report.loss_last}
    told |= room.scores(fuser, tests, keep=keep, seed=seed) | {"seconds": report.seconds}
    facts: dict[str, Any] = {"keep": keep, "init": init, "asked": asked}
    _finish(out, room, fuser, told, data, setting, steps=steps, seed=seed, **facts)
    (out / CHECKPOINT).unlink(missing_ok=True)  # what it led to is written


@app.command(name="solve")
def solve_command(
    sender: Sender,
    receiver: Receiver,
    data: Data,
    out: Out,
    clients: Annotated[
        int, typer.Option(min=1, help="Deal the texts to so many here, and add their sums.")
    ] = 1,
    ridge: Annotated[float, typer.Option(min=0.0, help="A token, on unit variance.")] = 1e-2,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Cut the rank by what attention sees.")
    ] = False,
    rows: Rows = 0,
    held_out: HeldOut = 0.2,
    tests: Tests = 200,
    longest: Longest = 256,
    width: Width = 0,
    share: Share = 0.05,
    taps: Taps = 3,
    layer_map: LayerMap = "depth",
    tail: Tail = 1,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
) -> None:
    """Solve a fuser in closed form from sums over aligned tokens, without training."""
    with needs_node("fuser"):
        from fedloom.refining.closed_form import solvable
    config = solvable(_build(tail, layer_map=layer_map, width=width, share=share, taps=taps))
    where = (dtype, device)
    room = _classroom(sender, receiver, data, "same", where, True, rows, held_out, longest, seed)
    began = time.perf_counter()
    fuser, about = room.solved(config, ridge=ridge, weighted=weighted, clients=clients, seed=seed)
    seconds = time.perf_counter() - began
    told = about | room.scores(fuser, tests, seed=seed) | {"seconds": seconds}
    # However many hands the texts were dealt to: all of it is done here, and not by a federation.
    facts: dict[str, Any] = {"hands": clients, "ridge": ridge, "weighted": weighted}
    _finish(out, room, fuser, told, data, "same", seed=seed, origin="closed-form", **facts)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="fuser.safetensors of train or solve.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show whose a fuser is, how it was made and how well it did."""
    from dataclasses import asdict

    card = read_card(file / FILE if file.is_dir() else file)
    if as_json:
        typer.echo(json.dumps(asdict(card)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in card.facts():
        table.add_row(name, value)
    Console().print(table)


def _build(tail: int, **told: Any) -> FuserConfig:
    """Return the build; a prefix stands behind the receiver's own sink where that is possible."""
    with needs_node("fuser"):
        from fedloom.adapters.fuser import FuserConfig
    if told.get("mode") == "residual":
        return FuserConfig(**told)
    return FuserConfig(**told, tail=tail, sink="receiver" if tail else "sender")


def _classroom(
    sender: str,
    receiver: str,
    data: str,
    setting: str,
    where: tuple[str, str],
    ends: bool,
    rows: int,
    held_out: float,
    longest: int,
    seed: int,
) -> Classroom:
    """Load lessons, then models: a misspelt source is told before minutes of loading.

    ``where`` is the dtype and the device of both models.
    """
    from fedloom.models.base import load_base, pick_device
    from fedloom.models.sources import parse_source
    from fedloom.refining.classroom import Classroom
    from fedloom.refining.hearing import Party, Shelf
    from fedloom.refining.lessons import load_lessons, split_lessons

    for name in (sender, receiver):
        parse_source(name)
    dtype, device = where[0], pick_device(where[1])
    parts = split_lessons(load_lessons(data, setting), held_out, seed=seed, most=rows)
    typer.echo(f"{len(parts[0])} lessons to learn from, {len(parts[1])} held out", err=True)
    shelves = [Shelf(Party.of(load_base(name, dtype, device))) for name in (sender, receiver)]
    return Classroom.of(shelves[0], shelves[1], *parts, longest=longest, ends=ends)


def _finish(
    out: Path,
    room: Classroom,
    fuser: CacheFuser,
    scores: dict[str, float],
    data: str,
    setting: str,
    *,
    steps: int = 0,
    seed: int,
    origin: str = "trained",
    **facts: Any,
) -> None:
    """Write file and card, and say the scores."""
    from fedloom.adapters.fuser_files import card_of, save_fuser

    told = {"source": data, "setting": setting, **room.facts(), **facts}
    names = (str(x.party.base.source) for x in (room.sender, room.receiver))
    card = card_of(fuser, *names, data=told, scores=scores, steps=steps, seed=seed, origin=origin)
    save_fuser(out / FILE, fuser, card)
    (out / CARD).write_text(card.to_text(), encoding="utf-8")
    typer.echo(f"fuser: {out / FILE}", err=True)
    typer.echo(_scores_line(scores))


def _scores_line(scores: Mapping[str, float]) -> str:
    return json.dumps({name: round(float(x), 6) for name, x in scores.items()})


def _digest(told: Mapping[str, Any]) -> str:
    """Name what a training was asked for: 16 hex digits; not where it writes, runs or goes on."""
    kept = {k: x for k, x in told.items() if k not in ("out", "resume", "device")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _finished(out: Path, asked: str, *, resume: bool) -> Mapping[str, float] | None:
    """Return the scores of the same training if it has come to its end here.

    Raises
    ------
    Refusal
        If something is there that this training must neither go on from nor replace.
    """
    if (out / CHECKPOINT).exists():
        if resume:
            return None
        raise Refusal(
            f"{out / CHECKPOINT} is there: go on from it with --resume, or name another --out"
        )
    if not (out / FILE).exists():
        return None
    card = read_card(out / FILE)
    if not resume or card.data.get("asked") != asked:
        what = "of another training or of other settings" if resume else "made to its end"
        raise Refusal(f"{out / FILE} is there, {what}: name another --out, or remove it first")
    return card.scores


def _progress(steps: int) -> Any:
    """Tell the loss some twenty times."""
    every, began = max(steps // 20, 1), time.perf_counter()

    def tell(step: int, loss: float) -> None:
        if step % every == 0 or step == steps:
            seconds = time.perf_counter() - began
            typer.echo(f"step {step} of {steps}: loss {loss:.3f}, {seconds:.0f} s", err=True)

    return tell


def _one_of(option: str, told: str, known: Sequence[str]) -> None:
    if told not in known:
        hint = nearest(told, known)
        raise Refusal(f'{option} "{told}"{hint}: expected one of {", ".join(known)}')
