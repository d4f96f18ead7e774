# SPDX-License-Identifier: Apache-2.0
"""Wikipedia's two spellings as plain text: its own markup, and WikiText-103's spaced-out tokens."""

from __future__ import annotations

import bz2
import html
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_PAGE = re.compile(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_GONE = re.compile(
    r"<!--.*?-->|<ref\b[^<>]*/>|<ref\b.*?</ref\s*>|<(math|gallery|table|pre|code|source|timeline)\b"
    r".*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_OUTSIDE = re.compile(r"\[(?:https?|ftp)://[^\s\]]*\s*([^\]]*)\]")
_ASIDE = ("file:", "image:", "category:", "media:")


def articles(wheel: Path) -> Iterator[tuple[str, str]]:
    """Yield (title, markup) of the articles that gensim's wheel carries; redirects are left out."""
    with zipfile.ZipFile(wheel) as packed:
        pages = bz2.decompress(packed.read(_DUMP)).decode()
    for title, text in _PAGE.findall(pages):
        markup = html.unescape(text)
        if not markup.lstrip().upper().startswith("#REDIRECT"):
            yield html.unescape(title), markup


def plain(markup: str) -> str:
    """Strip wiki markup; what cannot be said in plain text leaves a hole of two spaces.

    >>> plain("'''Mercury''' is a [[planet|small planet]].<ref>x</ref>")
    'Mercury is a small planet.'
    """
    text = html.unescape(_GONE.sub("", markup)).replace("\xa0", " ")
    text = _innermost(_TEMPLATE, _said_by_template, text)
    text = _innermost(_TABLE, lambda found: "", text)
    text = _innermost(_LINK, _said_by_link, text)
    text = _OUTSIDE.sub(r"\1", text)
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r"</?[a-zA-Z][^<>]*>", "", text)
    lines = [line for line in text.split("\n") if not re.match(r"[=*#:;|!{}]", line)]
    return "\n\n".join(lines).strip()  # in markup, each line is a paragraph


def released(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of WikiText-103's lines with the spacing of ordinary English."""
    title, kept = "", list[str]()
    for line in lines:
        if heading := re.fullmatch(r" = ([^=].*?[^=]) = \n?", line):
            if kept:
                yield title, "\n\n".join(kept)
            title, kept = heading[1], []
        elif line.strip() and not line.startswith(" = "):
            kept.append(_closed_up(line.strip()))
    if kept:
        yield title, "\n\n".join(kept)


def _closed_up(line: str) -> str:
    """Undo tokenisation: `` @-@ `` is a hyphen, and punctuation goes back to its word.

    >>> _closed_up('It had 1 @,@ 200 men , " well @-@ fed " ( mostly ) .')
    'It had 1,200 men, "well-fed" (mostly).'
    """
    line = re.sub(r" @([-,.])@ ", r"\1", line)
    line = re.sub(r'" ([^"]*) "', r'"\1"', line)
    line = re.sub(r" ([,.;:?!)\]])", r"\1", line)
    line = re.sub(r" ('(?:s|t|re|ve|ll|d|m)?)(?=[\s,.;:?!)]|$)", r"\1", line)
    return re.sub(r"([(\[]) ", r"\1", line)


def _innermost(pattern: re.Pattern[str], say: Callable[[re.Match[str]], str], text: str) -> str:
    """Replace from the inside out until nothing of the kind is left."""
    while True:
        changed = pattern.sub(say, text)
        if changed == text:
            return text
        text = changed


def _said_by_template(found: re.Match[str]) -> str:
    name, *parts = (part.strip() for part in found[1].split("|"))
    plainly = [part for part in parts if "=" not in part]
    if name.casefold() == "convert" and len(plainly) >= 2:
        return f"{plainly[0]} {plainly[1]}"
    if name.casefold() in ("lang", "nowrap", "nobold") and plainly:
        return plainly[-1]
    return ""


def _said_by_link(found: re.Match[str]) -> str:
    inside = found[1]
    if inside.casefold().lstrip(": ").startswith(_ASIDE) or re.match(r"[a-z-]{2,12}:", inside):
        return ""  # pictures, categories, other languages
    return inside.rsplit("|", 1)[-1]
