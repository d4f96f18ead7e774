# SPDX-License-Identifier: Apache-2.0
"""``[custom]``: the recipe keys of a user's own strategy and client, which fedloom cannot know."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from fedloom.errors import Refusal, nearest
from fedloom.flat import Scalar

_KEY = re.compile(r"[a-z0-9][a-z0-9-]*(\.[a-z0-9][a-z0-9-]*)*")


class CustomConfig(Mapping[str, Scalar]):
    """Keys of your own strategy and client: any names, each with a bool, a number or a text.

    >>> CustomConfig({"trim": 2}).over({"trim": 1, "floor": 0.0})
    {'trim': 2, 'floor': 0.0}
    """

    def __init__(self, values: Mapping[str, Scalar] | None = None) -> None:
        self._values = dict(values or {})
        for key, value in self._values.items():
            _check(key, value)

    def __getitem__(self, key: str) -> Scalar:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"CustomConfig({self._values})"

    def over(self, defaults: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the recipe's values of some keys, each with the type of its default.

        Raises
        ------
        Refusal
            If the recipe gives one another type.
        """
        return {key: self._typed(key, default) for key, default in defaults.items()}

    def check_known(self, names: Mapping[str, Scalar], who: str) -> None:
        """Refuse keys that nobody reads: a misspelt one would be left at its default unsaid."""
        for key in self:
            if key not in names:
                raise Refusal(
                    f"custom.{key}: {who} has no such key{nearest(key, names)}; its own_keys are"
                    f" {', '.join(sorted(names)) or 'none'}"
                )

    def _typed(self, key: str, default: Scalar) -> Scalar:
        value = self._values.get(key, default)
        if type(default) is float and type(value) is int:
            return float(value)
        if type(value) is not type(default):
            raise Refusal(
                f"custom.{key} = {value!r} is {type(value).__name__}: expected"
                f" {type(default).__name__}, for example {default!r}"
            )
        return value


def _check(key: str, value: object) -> None:
    if not _KEY.fullmatch(key):
        raise Refusal(
            f"custom.{key}: expected lower-case letters, digits and hyphens, with dots between"
        )
    if type(value) not in (bool, int, float, str):
        raise Refusal(
            f"custom.{key} = {str(value)[:40]!r} is {type(value).__name__}: expected a bool, a"
            " number or a text"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise Refusal(f"custom.{key} = {value}: expected a finite number")
