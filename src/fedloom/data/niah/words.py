# SPDX-License-Identifier: Apache-2.0
"""Keys and values that needles are made of, each on one side only: for training or for testing.

A word, number or code belongs to the side that its hash says, so the two pools are disjoint for
every seed and every client, and nobody has to keep lists of what was used.
"""

from __future__ import annotations

import functools
import hashlib
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedloom import archives

TEST_SHARE = 0.25
"""Of all words, numbers and codes, the share that only testing sees."""

_GIVEN = (
    "Ada Alma Anton Arlo Basil Bruno Cara Celia Clara Conrad Cora Cyril Dora Edgar Edith Elsa"
    " Enid Ernest Esther Felix Flora Frida Gerda Gilda Greta Gustav Hanna Harold Hector Helga"
    " Hilda Hugo Ida Irma Ivor Jonas Julius Karin Kurt Lena Leona Lionel Lydia Magda Marcus"
    " Mavis Milo Mona Nadia Nils Nora Olaf Oscar Otto Paula Petra Quentin Ralph Rhoda Roland"
    " Rufus Selma Sigrid Silas Stella Sylvia Tessa Thea Tobias Ursula Vera Victor Vilma Walter"
    " Wanda Wilma Xenia Yvonne"
)
_FAMILY = (
    "Abbott Alder Archer Ashby Barlow Barton Becker Birch Blake Bolton Brandt Brook Calder"
    " Carver Chandler Colby Cooper Corbett Dalton Decker Draper Drummond Ellis Farrow Fenton"
    " Fisher Fletcher Fowler Garner Gibson Glover Granger Hale Harper Hawkins Holt Hooper"
    " Hunter Ingram Irving Jarvis Keller Kemp Kessler Lambert Larkin Lindgren Lowell Mercer"
    " Miller Moss Nash Norris Ogden Osborn Palmer Parker Pratt Quill Ramsey Reeves Ritter Rowe"
    " Sadler Sawyer Sheldon Slater Sutton Tanner Thorne Tucker Turner Vance Vogel Wagner"
    " Walden Webster Weller Winter Yates"
)
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)


@dataclass(frozen=True)
class WordLists:
    """English words in alphabetical order, as packaged; kebab and capitalised entries too."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]


@functools.cache
def load_words() -> WordLists:
    """Read the nouns and adjectives out of wonderwords' wheel (MIT), fetched once."""
    with zipfile.ZipFile(archives.fetch(archives.WONDERWORDS, quiet=True)) as wheel:
        lists = {
            name: wheel.read(f"wonderwords/assets/{name}list.txt").decode().split("\n")
            for name in ("noun", "adjective", "profanity")
        }
    rude = set(lists["profanity"])
    nouns, adjectives = (
        tuple(sorted({word for word in lists[name] if word and word not in rude}))
        for name in ("noun", "adjective")
    )
    return WordLists(nouns, adjectives)


def side_of(text: str) -> str:
    """Say whether a word, number or code is for ``train`` or for ``test``.

    >>> side_of("amber"), side_of("4817362")
    ('train', 'train')
    """
    digest = hashlib.sha256(text.encode()).digest()
    return "test" if digest[0] < 256 * TEST_SHARE else "train"


@dataclass(frozen=True)
class Pools:
    """Draws of one side."""

    side: str
    random: np.random.Generator

    def number(self, digits: int) -> str:
        """Draw a number of so many digits."""
        low, high = 10 ** (digits - 1), 10**digits
        return self._on_side(lambda: str(self.random.integers(low, high)))

    def code(self) -> str:
        """Draw a three-part code, such as ``7f3-91b-e04``."""

        def draw() -> str:
            return "-".join(f"{n:03x}" for n in self.random.integers(0, 16**3, size=3))

        return self._on_side(draw)

    def device(self) -> str:
        """Draw a device's id, such as ``QX-482``."""

        def draw() -> str:
            letters = "".join(chr(n) for n in self.random.integers(ord("A"), ord("Z") + 1, size=2))
            return f"{letters}-{self.random.integers(100, 1000)}"

        return self._on_side(draw)

    def date(self) -> str:
        """Draw a date, such as ``14 March 1974``."""

        def draw() -> str:
            day, month, year = self.random.integers([1, 0, 1900], [29, 12, 2030])
            return f"{day} {MONTHS[month]} {year}"

        return self._on_side(draw)

    def person(self) -> str:
        """Draw a name; both its parts are of this side."""
        return f"{self._word(_people(_GIVEN, self.side))} {self._word(_people(_FAMILY, self.side))}"

    def phrase(self) -> str:
        """Draw an adjective and a noun, such as ``amber-falcon``; both are of this side."""
        adjectives, nouns = _plain_words(self.side)
        return f"{self._word(adjectives)}-{self._word(nouns)}"

    def _word(self, words: tuple[str, ...]) -> str:
        return words[int(self.random.integers(len(words)))]

    def _on_side(self, draw: Callable[[], str]) -> str:
        while True:
            if side_of(drawn := draw()) == self.side:
                return drawn


@functools.cache
def _people(names: str, side: str) -> tuple[str, ...]:
    return tuple(name for name in names.split() if side_of(name) == side)


@functools.cache
def _plain_words(side: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Adjectives and nouns of one side that are short and plain."""
    lists = load_words()
    adjectives, nouns = (
        tuple(w for w in words if re.fullmatch("[a-z]{3,8}", w) and side_of(w) == side)
        for words in (lists.adjectives, lists.nouns)
    )
    return adjectives, nouns
