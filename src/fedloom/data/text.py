# SPDX-License-Identifier: Apache-2.0
"""Running text for haystacks: documents of whole sentences, from wherever they lie.

Whatever the source, only sentences of plain prose are kept, cut by the same rules, so that a text
is the same on every machine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedloom import archives
from fedloom.data import novels, wikitext
from fedloom.data.files import extra
from fedloom.errors import Refusal, nearest

SOURCES = (
    "packaged:wikipedia",
    "packaged:austen",
    "hub:Salesforce/wikitext",
    "path:FILE-OR-DIR",
)
PASSAGE = 150
"""Longer documents are cut into passages of so many sentences, which training and testing share
out between them."""
ENDINGS = (".txt", ".md")
_HUB_LINES = 120_000  # of WikiText-103's 1.8 million: more than any run here reads

_ABBREVIATIONS = (
    "Mr Mrs Ms Dr St Prof Rev Gen Col Capt Lt Sgt Jr Sr Hon Esq vs etc cf al ca fl no nos vol pp"
    " ed eds Inc Ltd Co Corp approx Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec U.S e.g i.e"
)
_KNOWN = frozenset(word.casefold() for word in _ABBREVIATIONS.split())
_GAP = re.compile(r"([.?!][\"'\u201d\u2019)]*)\s+(?=[\"'\u201c\u2018(]?[A-Z0-9])")
_PROSE = re.compile(r"[\"'\u201c\u2018(]?[A-Z0-9][^\[\]{}|<>=*_\\#~^]*[.?!][\"'\u201d\u2019)]*")
_HOLES = re.compile(r"\(\s*[,;.)]|\s[,;.](?:\s|$)|[,;]\s*[,;.]|\s{2}|\.\.")


@dataclass(frozen=True)
class Document:
    """Sentences that stood together."""

    work: str
    """The article, novel or file that they are from."""
    part: int
    """Which passage of it."""
    sentences: tuple[str, ...]
    side: str = ""
    """``train`` or ``test`` where the source has such splits; else empty."""


@functools.lru_cache(maxsize=4)
def load_text(source: str) -> tuple[Document, ...]:
    """Load the documents of a source in a fixed order, long ones cut into passages.

    Parameters
    ----------
    source
        ``packaged:wikipedia`` (the articles among gensim's test data), ``packaged:austen`` (six
        novels, from a Debian package), ``hub:Salesforce/wikitext`` or ``path:FILE-OR-DIR`` (.txt
        and .md).

    Raises
    ------
    Refusal
        If there is no such source, it cannot be had, or it holds no sentence of prose.
    """
    kind, _, name = source.partition(":")
    readers: dict[str, Callable[[], Iterable[tuple[str, str, str]]]] = {
        "packaged:wikipedia": _wikipedia,
        "packaged:austen": _austen,
    }
    if source in readers:
        texts = readers[source]()
    elif kind == "hub" and name:
        texts = _hub(name)
    elif kind == "path" and name:
        texts = _local(Path(name).expanduser())
    else:
        hint = nearest(source, SOURCES)
        raise Refusal(f'text source "{source}"{hint}: expected {", ".join(SOURCES)}')
    documents = tuple(part for each in texts for part in passages(*each))
    if not documents:
        raise Refusal(
            f"{source} holds no sentence of 20 to 400 characters that starts with a capital and"
            " ends with a full stop: expected running prose"
        )
    return documents


def passages(name: str, text: str, side: str = "") -> Iterator[Document]:
    """Cut a text into documents of at most ``PASSAGE`` sentences of prose."""
    kept = [sentence for sentence in sentences(text) if is_prose(sentence)]
    for start in range(0, len(kept), PASSAGE):
        yield Document(name, start // PASSAGE, tuple(kept[start : start + PASSAGE]), side)


def sentences(text: str) -> Iterator[str]:
    """Cut a text at full stops that end a sentence; paragraphs end one too.

    >>> list(sentences("Mr. J. Doe left. He came back!"))
    ['Mr. J. Doe left.', 'He came back!']
    """
    for paragraph in re.split(r"\n\s*\n", text):
        line = re.sub(r"[ \t]*\n[ \t]*", " ", paragraph.strip())
        start = 0
        for gap in _GAP.finditer(line):
            if not _is_abbreviation(line[start : gap.start()]):
                yield line[start : gap.end(1)]
                start = gap.end()
        if line[start:]:
            yield line[start:]


def is_prose(sentence: str) -> bool:
    """Tell a whole sentence from headings, lists, and what stripped markup left with holes."""
    fits = 20 <= len(sentence) <= 400 and bool(_PROSE.fullmatch(sentence))
    return fits and sentence.count(" ") >= 3 and not _HOLES.search(sentence)


def _is_abbreviation(before: str) -> bool:
    """Tell whether the full stop after ``before`` ends a word rather than a sentence."""
    word = re.split(r"[\s(\"'\u201c\u2018]", before)[-1]
    return word.casefold() in _KNOWN or bool(re.fullmatch(r"(?:[A-Z]\.)*[A-Z]", word))


def _wikipedia() -> Iterator[tuple[str, str, str]]:
    for title, markup in wikitext.articles(archives.fetch(archives.GENSIM)):
        yield title, wikitext.plain(markup), ""


def _austen() -> Iterator[tuple[str, str, str]]:
    for name, text in novels.austen(archives.fetch(archives.AUSTEN)):
        yield name, text, ""


def _hub(name: str) -> Iterator[tuple[str, str, str]]:
    datasets = extra("datasets")
    for side in ("train", "test"):
        try:
            table = datasets.load_dataset(name, "wikitext-103-raw-v1", split=side)
        except (
            Exception
        ) as error:  # datasets and the hub raise by way of httpx, OSError, ValueError
            raise Refusal(
                f"cannot get hub:{name}, configuration wikitext-103-raw-v1, split {side}"
                f" ({type(error).__name__}); expected a data set like Salesforce/wikitext that this"
                f" machine can reach: use {SOURCES[0]} or path:FILE-OR-DIR"
            ) from error
        lines = table[: min(len(table), _HUB_LINES)]["text"]
        for title, text in wikitext.released(lines):
            yield title, text, side


def _local(path: Path) -> Iterator[tuple[str, str, str]]:
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in ENDINGS)
    else:
        found = [path] if path.suffix in ENDINGS else []
    if not found:
        came = "holds no text" if path.exists() else "does not exist"
        raise Refusal(f"path:{path} {came}: expected a file or folder of {', '.join(ENDINGS)}")
    for file in found:
        try:
            yield file.stem, file.read_text(encoding="utf-8"), ""
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(f"{file} cannot be read as UTF-8 text: {error}") from error
