# SPDX-License-Identifier: Apache-2.0
"""``rephrase``: other words for a question before others see it, checked, or nothing.

In FedRefine (arXiv 2603.28772) the receiver's own model rephrases the query; the original stays.
Here identifiers are taken out first by rules, the model then rewords, and the result is believed
only if nothing identifying is left, the options are there letter by letter, it is a question where
the original is one, shares some of its words, has a sane length, and the receiver's own answer is
the same.  Otherwise another seed, and in the end ``Standalone``:
the receiver asks nobody.

This is obfuscation at best effort, not a guarantee.  The rules know names by their capitals (so
not in lower case, not in scripts without case, and not a lone name that opens a sentence), e-mail
and web addresses, dates, and numbers that look like identifiers (five digits or more, or digits
and letters in one word).  Who knows the facts of a case may know the case.  No rule here knows what
a sentence means, and the receiver's own answer is only as good as the receiver: small models reword
badly, and some of what they write passes though it asks something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from fedloom import seeds
from fedloom.data.questions import LETTERS, Question
from fedloom.models.base import Base
from fedloom.refining.writing import decoded, instructed, own_choice, write

ASK = (
    "Rewrite the following question in different words. Keep its meaning. Do not answer it.\n\n"
    "Question: {question}\n\nRewritten question:"
)
LONGEST, SHORTEST = 1.5, 0.4
"""Bounds on the words of a rephrasing, as a share of the original's."""
RUN = 6
"""So many words in a row as in the original are a copy; shorter questions may keep half."""

SHARED = 0.25
"""Share of the original's content words that must be there: less is about something else."""

_MONTHS = (
    "January|February|March|April|May|June|July|August|September|October|November|December|"
    "Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec"
)
_KINDS: tuple[tuple[str, str], ...] = (
    ("email", r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    ("address", r"(?:https?://|www\.)\S+"),
    (
        "date",
        (
            r"\b\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}\b"
            rf"|\b(?:{_MONTHS})\.?\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b"
            rf"|\b(?:{_MONTHS})\.?,?\s+\d{{4}}\b"
            rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\s+(?:{_MONTHS})\b\.?(?:\s+\d{{4}})?"
        ),
    ),
    ("number", r"\+?\d[\d ().-]{5,}\d|\b\d{5,}\b|\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{4,}\b"),
)
_WORD = re.compile(r"[^\W\d_][\w'\u2019-]*")
_LABEL = re.compile(r"^(?:\w+ ?){0,2}(?:question|sentence|rewrite|rewritten)\s*:\s*", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\[(?:name|email|address|date|number) \d+\]")
_SENTENCE = re.compile(r"(?:^|[.!?:\n\"“(\]])\s*$")
_OPENERS = """
a all an and another any are as at because before both but by can compare consider could
decide describe did do does during each either every everyone explain few find first for from
had has have he her here his how i i'm i'll if in is it its let many most my next no not now of
on once one only or other our over people please question read same several she should since so
some someone such suppose that the their then there these they this those though to today two
under until us use was we were what what's when where whether which while who whom whose why
will with would yes you your"""
_COMMON = frozenset(_OPENERS.split())
"""Words that stand at the head of a sentence, where a capital says nothing."""


@dataclass(frozen=True)
class Entity:
    """Something that may tell who is meant."""

    kind: str
    text: str


@dataclass(frozen=True)
class Attempt:
    """A text that was tried, and why it was turned down; no reason if it was not."""

    text: str
    reason: str


@dataclass(frozen=True)
class Rephrased:
    """A question in other words; options and gold are the original's."""

    question: Question
    removed: tuple[Entity, ...]
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True)
class Standalone:
    """No rephrasing passed: the question stays at home and the receiver answers alone."""

    removed: tuple[Entity, ...]
    attempts: tuple[Attempt, ...]


def entities(text: str) -> list[Entity]:
    """Return what the rules know to identify, once each, in the order of their kinds.

    >>> [e.text for e in entities("Why did Anna Bell (a.bell@x.org) call 555-0199 on May 3?")]
    ['a.bell@x.org', 'May 3', '555-0199', 'Anna Bell']
    """
    found: dict[str, Entity] = {}
    rest = _PLACEHOLDER.sub(lambda m: " " * len(m[0]), text)
    for kind, pattern in _KINDS:
        for match in re.finditer(pattern, rest):
            found.setdefault(match[0], Entity(kind, match[0]))
        rest = re.sub(pattern, lambda m: " " * len(m[0]), rest)
    for name in _names(rest):
        found.setdefault(name, Entity("name", name))
    return list(found.values())


def _names(text: str) -> Iterator[str]:
    """Find runs of capitalised words; one that opens a sentence needs a second one."""
    run: list[re.Match[str]] = []
    for match in [*_WORD.finditer(text), None]:
        if match is not None and match[0][0].isupper() and (not run or _joined(text, run, match)):
            run.append(match)
            continue
        if run:
            opens = bool(_SENTENCE.search(text[: run[0].start()]))
            while run and run[0][0].lower() in _COMMON:
                run, opens = run[1:], False
            if run and not (opens and len(run) == 1):
                yield text[run[0].start() : run[-1].end()]
        run = [match] if match is not None and match[0][0].isupper() else []


def _joined(text: str, run: Sequence[re.Match[str]], word: re.Match[str]) -> bool:
    """Tell whether a word goes on a name: after a blank, or the stop of an abbreviation."""
    gap, last = text[run[-1].end() : word.start()], run[-1][0]
    return gap == " " or (gap in (". ", ".") and len(last) <= 3)


def scrub(text: str, keep: Collection[str] = ()) -> tuple[str, tuple[Entity, ...]]:
    """Put a placeholder for each entity that need not be kept; return what was taken out.

    >>> scrub("Can Mr Lee see Ann Poe today?", keep=["Mr Lee"])[0]
    'Can Mr Lee see [name 1] today?'
    """
    removed = [e for e in entities(text) if not _kept(e, keep)]
    numbers: dict[str, int] = {}
    for entity in sorted(removed, key=lambda e: -len(e.text)):
        numbers[entity.kind] = numbers.get(entity.kind, 0) + 1
        token = f"[{entity.kind} {numbers[entity.kind]}]"
        text = re.sub(rf"(?<!\w){re.escape(entity.text)}(?!\w)", token, text)
    return text, tuple(removed)


def _kept(entity: Entity, keep: Collection[str]) -> bool:
    """Tell whether the task itself names it: an entity or each of its words."""
    told = {word.lower() for text in keep for word in re.findall(r"[\w'\u2019@.+-]+", text)}
    return all(word.lower() in told for word in entity.text.split())


def leaked(text: str, removed: Collection[Entity]) -> list[str]:
    """Return which of the entities are still in a text, in whatever case; a name by any word.

    >>> leaked("what did anna do?", [Entity("name", "Anna Bell")])
    ['Anna Bell']
    """
    words = {w.strip(".'\u2019-").lower() for w in re.findall(r"[\w'\u2019-]+", text)}

    def there(entity: Entity) -> bool:
        if entity.text.lower() in text.lower():
            return True
        parts = [w.strip(".'\u2019-").lower() for w in entity.text.split()]
        return entity.kind == "name" and any(len(p) > 2 and p in words for p in parts)

    return [entity.text for entity in removed if there(entity)]


def checked(
    original: Question,
    rephrased: str,
    *,
    removed: Collection[Entity],
    keep: Collection[str] = (),
    choose: Callable[[Question], int] | None = None,
) -> str:
    """Say why a rephrasing of a question's text is not to be used, or nothing if it is.

    Parameters
    ----------
    rephrased
        A question, or a question and its options in lettered lines as ``data.prompts`` writes it.
    removed, keep
        What had to go, and what the task may name.
    choose
        The receiver's own choice; without it answers are not compared.
    """
    text, lines = _split(rephrased)
    if lines and lines != _lettered(original):
        return "options changed"
    if not text:
        return "empty"
    if gone := leaked(text, removed):
        return f"{len(gone)} of {len(removed)} entities left"
    if fresh := [e for e in entities(text) if not _kept(e, [*keep, original.question])]:
        return f"{len(fresh)} entities that the original has not"
    before, after = original.question.split(), text.split()
    if not SHORTEST <= len(after) / max(1, len(before)) <= LONGEST:
        return f"{len(after)} words for {len(before)}"
    if "?" in original.question and "?" not in text:
        return "no question"
    if _shared(original.question, text, removed) < SHARED:
        return "about something else"
    if _longest_run(before, after) > max(3, min(RUN, len(before) // 2)):
        return "copied"
    if choose is not None and choose(_with(original, text)) != choose(original):
        return "the receiver answers it otherwise"
    return ""


def _split(text: str) -> tuple[str, list[str]]:
    """Cut a text into the question and its lettered lines."""
    rows = [row.strip() for row in text.strip().splitlines()]
    lines = [row for row in rows if re.match(rf"[{LETTERS}]\. ", row)]
    kept = [row for row in rows if row and row not in lines and not row.startswith("Answer:")]
    return " ".join(kept), lines


def _lettered(question: Question) -> list[str]:
    return [f"{x}. {text}" for x, text in zip(LETTERS, question.choices, strict=False)]


def _with(original: Question, text: str) -> Question:
    return Question(original.subject, text, original.choices, original.gold)


def _shared(original: str, text: str, removed: Collection[Entity]) -> float:
    """Return the share of the original's content words of which a text has the first letters."""
    gone = {word.lower() for entity in removed for word in _WORD.findall(entity.text)}
    words = {w.lower() for w in _WORD.findall(original) if len(w) > 3} - _COMMON - gone
    there = {w.lower()[:5] for w in _WORD.findall(text)}
    return sum(word[:5] in there for word in words) / len(words) if words else 1.0


def _longest_run(before: Sequence[str], after: Sequence[str]) -> int:
    """Return the length of the longest run of words that both have, case aside."""
    one, two = ([w.strip(".,;:?!\"'").lower() for w in words] for words in (before, after))
    longest, row = 0, [0] * (len(two) + 1)
    for word in one:
        fresh = [0] * (len(two) + 1)
        for j, other in enumerate(two):
            fresh[j + 1] = row[j] + 1 if word == other else 0
        longest, row = max(longest, *fresh), fresh
    return longest


def rephrase(
    base: Base,
    question: Question,
    *,
    seed: int,
    tries: int = 4,
    temperature: float = 0.7,
    keep: Collection[str] = (),
    choose: Callable[[Question], int] | None = None,
) -> Rephrased | Standalone:
    """Let the receiver's own model put a question in other words until a rephrasing passes.

    Options are not the model's to touch: they are put back as they were, so an entity that an
    option names is kept in the question too.

    Parameters
    ----------
    keep
        Entities that the task needs: "Newton" in a question on his laws.
    choose
        By default the model's own choice between the options.
    """
    needed = [*keep, *question.choices]
    text, removed = scrub(question.question, needed)
    same = choose or (lambda asked: own_choice(base, asked))
    ids, stop = instructed(base, ASK.format(question=text))
    # A model's tokens are shorter than words, so this never cuts what the length bound allows.
    room = max(16, int(LONGEST * len(base.tokenizer.encode(text))))
    attempts = []
    for turn in range(tries):
        drawn = seeds.split(seed, question.row(), turn, "rephrase")
        made = write(base, ids, room, temperature=temperature, seed=drawn, stop=stop)
        said = _LABEL.sub("", " ".join(decoded(base, made).split()))
        reason = checked(question, said, removed=removed, keep=needed, choose=same)
        attempts.append(Attempt(said, reason))
        if not reason:
            return Rephrased(_with(question, said), removed, tuple(attempts))
    return Standalone(removed, tuple(attempts))


def entity_recall(original: str, text: str, keep: Collection[str] = ()) -> float | None:
    """Return the share of a question's entities that a text still tells; none if it had none."""
    found = [e for e in entities(original) if not _kept(e, keep)]
    return len(leaked(text, found)) / len(found) if found else None
