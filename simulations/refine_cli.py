# SPDX-License-Identifier: Apache-2.0
"""``fedloom refine``: one question to a receiver that hears other models' caches.

The answer goes to stdout, what it was made of to stderr.  In one process by default; with ``--on``
on a running federation, see ``refine_remote``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cards import FuserCard, fuser_files, read_card
from fedloom.errors import Refusal
from fedloom.gains import ANY, Gains, read_gains
from fedloom.simulations.needs import needs_node
from fedloom.simulations.refine_mutual import answer_together, check_mutual, say_together
from fedloom.simulations.refine_words import receipt_lines

if TYPE_CHECKING:
    from fedloom.models.base import Base
    from fedloom.refining import Answer, Sender, Terms
    from fedloom.refining.offers import Log

_Pair = tuple[str, Path | None]
"""A sender's source, and the file of its fuser."""

Receiver = Annotated[str | None, typer.Option(help="Model that answers; with --on, its partition.")]
Senders = Annotated[
    list[str] | None, typer.Option("--sender", help="Model whose cache is heard; repeatable.")
]
Fusers = Annotated[
    list[Path] | None,
    typer.Option("--fuser", help="File, or folder of fusers at any depth; repeatable."),
]
Dtype = Annotated[
    str | None, typer.Option(help="How caches travel: bf16 (by default), int8, int4.")
]
KeepTokens = Annotated[
    float, typer.Option(help="Share of a sender's tokens that travels, the last ones.")
]
KeepBytes = Annotated[
    float, typer.Option(help="Keep what fits in this part of the 16-bit bytes; 0: all.")
]
Select = Annotated[Path | None, typer.Option(help="Measured gains: choose whom to ask, and how.")]
Task = Annotated[str | None, typer.Option(help="With --select: class of the question.")]
Privacy = Annotated[int | None, typer.Option(min=0, help="With --select: its level.")]
Deadline = Annotated[
    float | None, typer.Option(help="Seconds to wait for senders: 60, or 300 with --on.")
]
MaxKl = Annotated[
    float, typer.Option(help="Drop senders until the next token is so near, in nats; 0: never.")
]
MaxNorm = Annotated[
    float, typer.Option(help="Drop a cache larger than so many deviations of its fuser; 0: never.")
]
Vote = Annotated[
    bool, typer.Option("--vote", help="Drop who alone decides the next token, of three or more.")
]
Words = Annotated[
    int | None,
    typer.Option(min=0, help="Tokens of a message in words where no cache is left: 80; 0: none."),
]
Shown = Annotated[str | None, typer.Option(help="What senders read in place of the question.")]
Mutual = Annotated[
    int | None,
    typer.Option(min=1, help="Exchanges of Co-C2C: all models answer among each other's caches."),
]
Device = Annotated[
    str | None, typer.Option(help="auto (by default; a GPU if there is one), cpu, cuda:0.")
]
On = Annotated[
    str | None, typer.Option(help="Flower connection, or HOST:PORT, of a running federation.")
]
Certificates = Annotated[
    Path | None, typer.Option(help="With --on HOST:PORT: PEM file; without it, no TLS.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="With --on: a key of the recipe."),
]


_TRIES = 4  # rewordings, of which one must pass
Rephrase = Annotated[
    bool,
    typer.Option("--rephrase", help="Senders read the receiver's rewording, or nobody is asked."),
]


def refine(
    question: Annotated[str, typer.Argument(help="What the receiver reads, as it stands.")],
    receiver: Receiver = None,
    sender: Senders = None,
    fuser: Fusers = None,
    dtype: Dtype = None,
    keep_tokens: KeepTokens = 1.0,
    keep_bytes: KeepBytes = 0.0,
    select: Select = None,
    task: Task = None,
    privacy: Privacy = None,
    deadline: Deadline = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    max_kl: MaxKl = 0.0,
    max_norm: MaxNorm = 0.0,
    vote: Vote = False,
    words: Words = None,
    shown: Shown = None,
    rephrase: Rephrase = False,
    mutual: Mutual = None,
    precision: Annotated[str, typer.Option(help="Of the models' weights.")] = "float32",
    device: Device = None,
    compare: Annotated[bool, typer.Option(help="Show the receiver's own answer, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    on: On = None,
    root_certificates: Certificates = None,
    settings: Settings = None,
) -> None:
    """Answer a question with the help of other models' caches; the receipt says whose."""
    patience = deadline if deadline is not None else 60.0 if on is None else 300.0
    terms: dict[str, Any] = {"scheme": dtype or "bf16", "share": keep_tokens, "part": keep_bytes}
    terms |= {"deadline": patience, "max_kl": max_kl, "max_norm": max_norm, "vote": vote}
    choice = _choice(select, task, privacy, dtype)
    private = _Shown.of(shown, rephrase, on)
    if mutual is not None:
        check_mutual(terms, {"select": select, "shown": shown, "words": words}, rephrase)
    if on is not None:
        from fedloom.simulations.refine_remote import ask_federation

        own = (sender, fuser, shown, words, device)
        if any(told is not None and told != [] for told in own):
            raise Refusal(
                "--on asks the federation's own senders, on its devices and for caches: leave"
                " --sender, --fuser, --shown, --words and --device out"
            )
        terms |= choice.remote() if choice else {}
        terms |= {"mutual": mutual} if mutual is not None else {}
        given = (max_new_tokens, root_certificates, settings or [])
        told = ask_federation(on, question, receiver or "0", terms, *given)
        say = _say if mutual is None else say_together
        say(told, compare=compare, as_json=as_json)
        return
    if choice is not None and words is not None:
        raise Refusal("--words with --select: the file says who is asked for words; leave it out")
    receiver = receiver or "embedded:smollm2-135m"
    if mutual is not None:
        cards, sources = _cards(fuser or []), [receiver, *(sender or [])]
        where = (precision, device or "auto")
        told = answer_together(sources, cards, question, mutual, terms, max_new_tokens, where)
        say_together(told, compare=compare, as_json=as_json)
        return
    kept = _pairs(receiver, sender or [], fuser or [], alone=choice is None)
    models = _Models.of(receiver, kept, precision, device or "auto")
    answer = models.ask(question, terms, choice, words, private, max_new_tokens)
    told = {"answer": answer.text, "receipt": answer.receipt.to_dict()}
    if compare:
        told["standalone"] = models.alone(question, max_new_tokens).text
    _say(told, compare=compare, as_json=as_json)


@dataclass(frozen=True)
class _Shown:
    """What senders read: a text of the user's, a rewording, or the question."""

    text: str | None
    rephrase: bool

    @classmethod
    def of(cls, text: str | None, rephrase: bool, on: str | None) -> _Shown:
        if rephrase and (text is not None or on is not None):
            raise Refusal(
                "--rephrase makes what senders read, of a question that nobody else has read: leave"
                " --shown and --on out"
            )
        return cls(text, rephrase)

    def read(
        self, base: Base, question: str, senders: Sequence[Sender]
    ) -> tuple[str | None, Sequence[Sender], dict[str, Any] | None]:
        """Return what is read, by whom, and what a receipt says of a rewording."""
        from fedloom import refining

        if not self.rephrase:
            return self.text, senders, None
        refining.check_private(senders)
        made = refining.reworded_text(base, question, seed=0, tries=_TRIES)
        if made.question is None:
            return None, [], made.facts()
        return made.question.question, senders, made.facts()


@dataclass(frozen=True)
class _Choice:
    """What a choice of senders goes by."""

    gains: Gains
    task: str
    privacy: int

    def remote(self) -> dict[str, Any]:
        """Write it for a federation's recipe."""
        return {"select": self.gains.to_json(), "task": self.task, "privacy": self.privacy}

    def made(self, base: Base, text: str, senders: Sequence[Sender], terms: Terms) -> Log:
        """Choose."""
        from fedloom import refining

        tokens = len(base.tokenizer.encode(text))
        return refining.decide(
            self.gains,
            base,
            senders,
            tokens=tokens,
            terms=terms,
            task=self.task,
            privacy=self.privacy,
        )


def _choice(
    select: Path | None, task: str | None, privacy: int | None, dtype: str | None
) -> _Choice | None:
    if select is None:
        if task is not None or privacy is not None:
            raise Refusal("--task and --privacy go with --select FILE: give it, or leave both out")
        return None
    if dtype is not None:
        raise Refusal(f"--dtype {dtype} with --select: the way is chosen; leave --dtype out")
    return _Choice(read_gains(str(select)), task or ANY, privacy or 0)


@dataclass(frozen=True)
class _Models:
    """A receiver and its senders, loaded."""

    receiver: Base
    senders: Sequence[Sender]

    @classmethod
    def of(cls, receiver: str, pairs: Sequence[_Pair], precision: str, device: str) -> _Models:
        """Load them on one device."""
        from fedloom import refining
        from fedloom.adapters.fuser_files import load_fuser
        from fedloom.models.base import load_base, pick_device

        where = (precision, pick_device(device))
        base = load_base(receiver, *where)
        senders = []
        for source, path in pairs:
            other = load_base(source, *where)
            geometry = refining.measured(other)
            into = refining.measured(base)
            fuser = load_fuser(path, geometry, into)[0] if path is not None else None
            senders.append(refining.local(other, geometry, fuser, source))
        return cls(base, senders)

    def ask(
        self,
        question: str,
        terms: Mapping[str, Any],
        choice: _Choice | None,
        words: int | None,
        private: _Shown,
        max_new_tokens: int,
    ) -> Answer:
        """Answer among those who are chosen, or among all, by their words if no cache is left."""
        from fedloom import refining

        base, chosen = self.receiver, refining.Terms(**terms)
        shown, senders, facts = private.read(base, question, self.senders)
        how: dict[str, Any] = {"shown": shown, "terms": chosen, "max_new_tokens": max_new_tokens}
        if choice is not None:
            log = choice.made(base, question if shown is None else shown, senders, chosen)
            answer = refining.refine_selected(base, question, senders, log, **how)
        elif words == 0:
            answer = refining.refine(base, question, senders, **how)
        else:
            how |= {} if words is None else {"tokens": words}
            answer = refining.refine_or_ask(base, question, senders, **how)
        return refining.marked(answer, facts)

    def alone(self, question: str, max_new_tokens: int) -> Answer:
        """Answer as the receiver does by itself."""
        from fedloom import refining

        return refining.refine(self.receiver, question, [], max_new_tokens=max_new_tokens)


def _pairs(
    receiver: str, sources: Sequence[str], files: Sequence[Path], *, alone: bool
) -> list[_Pair]:
    """Pair senders with fusers by the hashes on the cards, before any model is loaded.

    ``alone`` says that nothing but caches is asked for, so that no fuser at all is a mistake.
    """
    with needs_node("refine"):
        from fedloom.models.sources import locate, parse_source
    cards = _cards(files)
    into = locate(parse_source(receiver)).base_hash
    found: list[_Pair] = []
    for source in sources:
        of = locate(parse_source(source)).base_hash
        fits = [p for p, c in cards.items() if (c.sender_model, c.receiver_model) == (of, into)]
        if len(fits) > 1:
            raise Refusal(
                f"{fits[0]} and {fits[1]} are both of {source} -> {receiver}: name one of them by"
                " --fuser FILE, or keep them apart"
            )
        found.append((source, fits[0] if fits else None))
    taken = {path for _, path in found}
    if idle := [path for path in files if path.is_file() and path not in taken]:
        card = cards[idle[0]]
        raise Refusal(
            f"--fuser {idle[0]} is of {card.sender_name} -> {card.receiver_name}, by the models'"
            " hashes not a pair of --sender and --receiver here: use those models"
        )
    own = [locate(parse_source(source)).base_hash == into for source in sources]
    if alone and sources and not any(taken - {None}) and not any(own):
        raise Refusal(
            f"no fuser for {sources[0]} -> {receiver}: give --fuser FILE, or make one with"
            f" fedloom fuser train --sender {sources[0]} --receiver {receiver}"
        )
    return found


def _cards(files: Sequence[Path]) -> dict[Path, FuserCard]:
    listed: list[Path] = []
    for path in files:
        listed += fuser_files(path) if path.is_dir() else [path]
    return {path: read_card(path) for path in listed}


def _say(told: dict[str, Any], *, compare: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    typer.echo(told["answer"].strip("\n"))
    if compare and "standalone" in told:
        typer.echo(f"\nalone: {told['standalone'].strip()}")
    for line in receipt_lines(told["receipt"]):
        typer.echo(line, err=True)
