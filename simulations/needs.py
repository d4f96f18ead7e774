# SPDX-License-Identifier: Apache-2.0
"""What a command needs that a coordinator's installation has not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedloom.errors import Refusal


@contextmanager
def needs_node(command: str) -> Iterator[None]:
    """Say in one line what is missing where a coordinator is asked for a node's work."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).startswith("fedloom"):
            raise
        raise Refusal(
            f"{command} needs {error.name}, which a coordinator has not: pip install"
            " 'fedloom[node]'"
        ) from error
