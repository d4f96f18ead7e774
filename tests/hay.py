"""Made-up words and prose, packed and laid out as the real ones are."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedloom import archives
from fedloom.archives import Archive, file_sha256

_STARTS = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se")
_ENDS = ("ber", "dle", "fin", "gon", "lop", "mar", "nut", "ril", "sten", "tum")
NOUNS = tuple(a + b for a, b in itertools.product(_STARTS, _ENDS))
ADJECTIVES = tuple(noun + "y" for noun in NOUNS[::2])


def shelve_words(cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Put a word wheel into a cache folder and pin it in place of the real one."""
    wheel = cache / "archives" / "words.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, words in (
            ("noun", [*NOUNS, "ATM", "rude"]),
            ("adjective", ADJECTIVES),
            ("profanity", ["rude"]),
        ):
            packed.writestr(f"wonderwords/assets/{name}list.txt", "\n".join([*words, ""]))
    size = wheel.stat().st_size
    pinned = Archive("words", "1", wheel.name, file_sha256(wheel), size, "none")
    patch.setenv("FEDLOOM_CACHE", str(cache))
    patch.setattr(archives, "WONDERWORDS", pinned)


def write_works(folder: Path, works: int = 8, sentences: int = 90) -> Path:
    """Write text files of sentences that differ."""
    random = np.random.default_rng(3)
    for work in range(works):
        lines = []
        for i in range(sentences):
            picked = [str(w) for w in random.choice(NOUNS, int(random.integers(4, 12)))]
            lines.append(f"Line {work * sentences + i} says {' '.join(picked)}.")
        paragraphs = [" ".join(lines[i : i + 5]) for i in range(0, sentences, 5)]
        (folder / f"work{work}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return folder
