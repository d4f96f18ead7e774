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


def check_masks(section: str, threshold: float, bits: int) -> None:
    """Refuse a threshold or a fixed point that masked sums cannot work with."""
    if not 0.5 < threshold < 1:
        raise Refusal(
            f"{section}.threshold = {threshold}: expected above 0.5 and below 1, or two halves of"
            " the clients could be told two stories"
        )
    if not 24 <= bits <= 52:
        raise Refusal(f"{section}.bits = {bits}: expected 24 to 52; 40 is right for most")
