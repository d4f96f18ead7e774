# SPDX-License-Identifier: Apache-2.0
"""Flat recipes: dotted kebab-case keys to and from trees, and as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Scalar = bool | int | float | str
"""What Flower's run config can hold."""


def kebab(name: str) -> str:
    """Spell a Python name as recipes and messages do."""
    return name.replace("_", "-")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Scalar]]:
    """List a tree's leaves under dotted keys.

    >>> flatten({"rounds": 3, "lora": {"last_layers": 2}})
    [('rounds', 3), ('lora.last-layers', 2)]
    """
    rows: list[tuple[str, Scalar]] = []
    for name, value in tree.items():
        key = prefix + kebab(name)
        rows += flatten(value, key + ".") if isinstance(value, Mapping) else [(key, value)]
    return rows


def toml_lines(values: Mapping[str, Scalar]) -> str:
    """Write dotted keys as TOML, a blank line between groups; reads back to the same scalars.

    >>> print(toml_lines({"rounds": 3, "lora.dropout": 0.5, "lora.targets": "q,k"}), end="")
    rounds = 3
    <BLANKLINE>
    lora.dropout = 0.5
    lora.targets = "q,k"
    """
    lines: list[str] = []
    group = ""
    for key, value in values.items():
        head = key.rpartition(".")[0]
        lines += [""] if lines and head != group else []
        lines.append(f"{key} = {_toml(value)}")
        group = head
    return "".join(line + "\n" for line in lines)


def _toml(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON escapes are TOML's, but for DEL and surrogate pairs
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
