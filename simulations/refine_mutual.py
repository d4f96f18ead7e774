# SPDX-License-Identifier: Apache-2.0
"""``fedloom refine --mutual``: every model answers among the caches of all others (Co-C2C)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedloom.cards import FuserCard
from fedloom.errors import Refusal
from fedloom.simulations.needs import needs_node
from fedloom.simulations.refine_words import receipt_lines

if TYPE_CHECKING:
    from fedloom.adapters.fuser import CacheFuser
    from fedloom.models.base import Base


def check_mutual(
    terms: Mapping[str, Any], others: Mapping[str, object | None], rephrase: bool
) -> None:
    """Refuse what does not go with ``--mutual``: all read one text and exchange whole caches."""
    given = [f"--{name}" for name, told in others.items() if told is not None]
    given += ["--rephrase"] if rephrase else []
    given += ["--keep-tokens"] if terms["share"] != 1 else []
    given += ["--keep-bytes"] if terms["part"] else []
    if given:
        raise Refusal(
            f"--mutual with {given[0]}: all models read the question and exchange whole caches of"
            f" it; leave {given[0]} out"
        )


def answer_together(
    sources: Sequence[str],
    cards: Mapping[Path, FuserCard],
    question: str,
    rounds: int,
    terms: Mapping[str, Any],
    max_new_tokens: int,
    where: tuple[str, str],
) -> dict[str, Any]:
    """Load the models, let them refine each other, and return all answers.

    Parameters
    ----------
    where
        Precision and device.

    Raises
    ------
    Refusal
        If a model has no other beside it, a pair has two fusers, or no pair has one.
    """
    with needs_node("refine"):
        from fedloom import refining
        from fedloom.models.base import load_base, pick_device
        from fedloom.models.sources import locate, parse_source
    if len(sources) < 2:
        raise Refusal("--mutual needs two models or more: give --receiver and --sender")
    if twice := [source for source in sources if sources.count(source) > 1]:
        raise Refusal(f"{twice[0]} is there twice: name each model once")
    hashes = [locate(parse_source(source)).base_hash for source in sources]
    files = _files(sources, hashes, cards)
    precision, device = where
    bases = [load_base(source, precision, pick_device(device)) for source in sources]
    fusers = {pair: _loaded(path, bases, pair) for pair, path in files.items()}
    how: dict[str, Any] = {"terms": refining.Terms(**terms), "max_new_tokens": max_new_tokens}
    made = refining.together(bases, fusers, question, rounds=rounds, **how)
    told = []
    for place, (base, answer) in enumerate(zip(bases, made, strict=True)):
        alone = refining.refine(base, question, [], max_new_tokens=max_new_tokens)
        said = {"answer": answer.text, "standalone": alone.text}
        who = {"partition": place, "model": sources[place]}
        told.append({**said, **who, "receipt": answer.receipt.to_dict()})
    return {"answers": told}


def _files(
    sources: Sequence[str], hashes: Sequence[str], cards: Mapping[Path, FuserCard]
) -> dict[tuple[int, int], Path]:
    """Find the fuser of each ordered pair by the hashes on the cards."""
    found: dict[tuple[int, int], Path] = {}
    for of, into in itertools.permutations(range(len(sources)), 2):
        pair = (hashes[of], hashes[into])
        fits = [p for p, c in cards.items() if (c.sender_model, c.receiver_model) == pair]
        if len(fits) > 1:
            raise Refusal(
                f"{fits[0]} and {fits[1]} are both of {sources[of]} -> {sources[into]}: name one of"
                " them by --fuser FILE, or keep them apart"
            )
        if fits:
            found[of, into] = fits[0]
    if not found and len(set(hashes)) == len(hashes):
        raise Refusal(
            f"no fuser of two of {', '.join(sources)}: give --fuser FILE, or make one with fedloom"
            f" fuser train --sender {sources[1]} --receiver {sources[0]}"
        )
    return found


def _loaded(path: Path, bases: Sequence[Base], pair: tuple[int, int]) -> CacheFuser:
    from fedloom import refining
    from fedloom.adapters.fuser_files import load_fuser

    sender, receiver = (refining.measured(bases[place]) for place in pair)
    return load_fuser(path, sender, receiver)[0]


def say_together(told: Mapping[str, Any], *, compare: bool, as_json: bool) -> None:
    """Print each model's answer under its name; receipts go to stderr."""
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    for each in told["answers"]:
        who = f"{each['partition']} {each['model']}"
        typer.echo(f"{who}: {each['answer'].strip()}")
        if compare:
            typer.echo(f"{who} alone: {each['standalone'].strip()}")
        for line in receipt_lines(each["receipt"]):
            typer.echo(f"{who} | {line}", err=True)
