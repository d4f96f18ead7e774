# SPDX-License-Identifier: Apache-2.0
"""Checks that the parts of a recipe share: one sentence with what came and what was expected."""

from __future__ import annotations

from fedloom.errors import Refusal, nearest


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not among ``allowed``, with the nearest one."""
    if value not in allowed:
        hint = nearest(value, allowed)
        raise Refusal(f'{key} = "{value}": expected one of {", ".join(allowed)}{hint}')


def at_least(key: str, value: float, least: float) -> None:
    """Refuse a number below ``least``, and nan."""
    if not value >= least:  # also refuses nan
        raise Refusal(f"{key} = {value}: expected at least {least}")
