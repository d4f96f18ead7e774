# SPDX-License-Identifier: Apache-2.0
"""The one exception that a user is meant to see: a sentence, no traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Refusal(ValueError):
    """Input that cannot be used, said in one line: what came, what was expected, what to do.

    Commands print it and leave with exit code 2; anything else that is raised is a fault of ours
    and keeps its traceback.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(" ".join(sentence.split()))


def nearest(name: str, known: Iterable[str]) -> str:
    """Say "did you mean" for a misspelt name, or nothing if no known name is close.

    >>> nearest("lora.rnak", ["lora.rank", "rounds"])
    ' (did you mean lora.rank?)'
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
