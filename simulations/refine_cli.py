# SPDX-License-Identifier: Apache-2.0
"""``fedloom refine``: one question to a receiver that hears other models' caches.

The answer goes to stdout, what it was made of to stderr.  In one process by default; with ``--on``
on a running federation, see ``refine_remote``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cards import FuserCard, read_card
from fedloom.errors import Refusal
from fedloom.simulations.needs import needs_node

if TYPE_CHECKING:
    from fedloom.refining import Answer, Sender


def refine(
    question: Annotated[str, typer.Argument(help="What the receiver reads, as it stands.")],
    receiver: Annotated[
        str | None, typer.Option(help="Model that answers; with --on, its partition.")
    ] = None,
    sender: Annotated[
        list[str] | None, typer.Option(help="Model whose cache is heard; repeatable.")
    ] = None,
    fuser: Annotated[
        list[Path] | None, typer.Option(help="File or folder of fusers; repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="How caches travel: bf16, int8, int4.")] = "bf16",
    keep_tokens: Annotated[
        float, typer.Option(help="Share of a sender's tokens that travels, the last ones.")
    ] = 1.0,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds to wait for senders: 60, or 300 with --on.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    max_kl: Annotated[
        float, typer.Option(help="Drop senders until the next token is so near, in nats; 0: never.")
    ] = 0.0,
    shown: Annotated[
        str | None, typer.Option(help="What senders read in place of the question.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Of the models' weights.")] = "float32",
    compare: Annotated[bool, typer.Option(help="Show the receiver's own answer, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    on: Annotated[
        str | None, typer.Option(help="Flower connection, or HOST:PORT, of a running federation.")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="With --on HOST:PORT: PEM file; without it, no TLS.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --on: a key of the recipe."),
    ] = None,
) -> None:
    """Answer a question with the help of other models' caches; the receipt says whose."""
    patience = deadline if deadline is not None else 60.0 if on is None else 300.0
    terms = {"scheme": dtype, "share": keep_tokens, "deadline": patience, "max_kl": max_kl}
    if on is not None:
        from fedloom.simulations.refine_remote import ask_federation

        if sender or fuser or shown is not None:
            raise Refusal("--on asks the federation's own senders: leave --sender, --fuser out")
        told = ask_federation(
            on, question, receiver or "0", terms, max_new_tokens, root_certificates, settings or []
        )
        _say(told, compare=compare, as_json=as_json)
        return
    receiver = receiver or "embedded:smollm2-135m"
    senders = _senders(receiver, sender or [], fuser or [], precision)
    answer, alone = _ask(
        receiver, question, senders, terms, max_new_tokens, precision, shown, compare
    )
    told = {"answer": answer.text, "receipt": answer.receipt.to_dict()}
    if alone is not None:
        told["standalone"] = alone.text
    _say(told, compare=compare, as_json=as_json)


def _ask(
    receiver: str,
    question: str,
    senders: Sequence[Sender],
    terms: dict[str, Any],
    tokens: int,
    precision: str,
    shown: str | None,
    compare: bool,
) -> tuple[Answer, Answer | None]:
    from fedloom import refining
    from fedloom.models.base import load_base

    base = load_base(receiver, precision)
    chosen = refining.Terms(**terms)
    answer = refining.refine(
        base, question, senders, shown=shown, terms=chosen, max_new_tokens=tokens
    )
    alone = refining.refine(base, question, [], max_new_tokens=tokens) if compare else None
    return answer, alone


def _senders(
    receiver: str, sources: Sequence[str], files: Sequence[Path], precision: str
) -> list[Sender]:
    """Pair senders with fusers by the hashes on the cards, before any model is loaded."""
    with needs_node("refine"):
        from fedloom.models.sources import locate, parse_source
    cards = _cards(files)
    into = locate(parse_source(receiver)).base_hash
    found: list[tuple[str, Path | None]] = []
    for source in sources:
        of = locate(parse_source(source)).base_hash
        fits = [p for p, c in cards.items() if (c.sender_model, c.receiver_model) == (of, into)]
        found.append((source, fits[0] if fits else None))
    taken = {path for _, path in found}
    if idle := [path for path in files if path.is_file() and path not in taken]:
        card = cards[idle[0]]
        raise Refusal(
            f"--fuser {idle[0]} is of {card.sender_name} -> {card.receiver_name}, by the models'"
            " hashes not a pair of --sender and --receiver here: use those models"
        )
    own = [locate(parse_source(source)).base_hash == into for source in sources]
    if sources and not any(taken - {None}) and not any(own):
        raise Refusal(
            f"no fuser for {sources[0]} -> {receiver}: give --fuser FILE, or make one with"
            f" fedloom fuser train --sender {sources[0]} --receiver {receiver}"
        )
    return [_sender(source, path, receiver, precision) for source, path in found]


def _cards(files: Sequence[Path]) -> dict[Path, FuserCard]:
    listed: list[Path] = []
    for path in files:
        listed += sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {path: read_card(path) for path in listed}


def _sender(source: str, path: Path | None, receiver: str, precision: str) -> Sender:
    from fedloom import refining
    from fedloom.adapters.fuser_files import load_fuser
    from fedloom.models.base import load_base

    base, into = load_base(source, precision), load_base(receiver, precision)
    geometry = refining.measured(base)
    fuser = None if path is None else load_fuser(path, geometry, refining.measured(into))[0]
    return refining.local(base, geometry, fuser, source)


def _say(told: dict[str, Any], *, compare: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    typer.echo(told["answer"].strip("\n"))
    if compare and "standalone" in told:
        typer.echo(f"\nalone: {told['standalone'].strip()}")
    for line in receipt_lines(told["receipt"]):
        typer.echo(line, err=True)


def receipt_lines(receipt: dict[str, Any]) -> list[str]:
    """Word a receipt, a line a sender."""
    from fedloom.simulations.progress import duration, size

    lines = []
    for source in receipt["sources"]:
        who = f"{source['name'] or source['model'][:12]}:"
        if source["status"] == "used":
            heard = f"used, {source['gates_open']} of {source['gates']} gates open"
            facts = [heard] if source["gates"] else ["used, its own cache"]
            facts += [f"{source['tokens']} tokens, {size(source['bytes'])}"]
            lines.append(f"{who} {', '.join(facts)}, {duration(source['seconds'])}")
        elif source["status"] == "shut":
            lines.append(f"{who} not asked, all gates are shut")
        else:
            lines.append(f"{who} FALLBACK ({source['cause']}): {source['reason']}")
    if receipt["fallback"]:
        kinds = {"fewer": "fewer senders", "t2t": "a sender's words", "standalone": "none: alone"}
        lines.append(f"fallback: {kinds[receipt['fallback']]}")
    spent = receipt["seconds"]
    parts = [f"{k} {duration(v)}" for k, v in spent.items() if k != "total" and v >= 0.05]
    split = f" ({', '.join(parts)})" if parts else ""
    total = duration(spent.get("total", 0.0))
    lines.append(f"{receipt['mode']}, {size(receipt['bytes'])} on the wire, {total}{split}")
    return lines
