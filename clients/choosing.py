# SPDX-License-Identifier: Apache-2.0
"""Which client answers: the method's, or a user's own that is installed on this node.

Only a node imports it: a client may need torch, and a coordinator has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

from flwr.app import Context
from flwr.client import NumPyClient

from fedloom import border
from fedloom.clients.bridge import AdapterClient, ClientFn
from fedloom.references import named_class


def own_or(method: ClientFn) -> ClientFn:
    """Make the client that a recipe names as ``client``, else the one of a method."""

    def make(context: Context) -> NumPyClient:
        reference = str(context.run_config.get("client", ""))
        if not reference:
            return method(context)
        return cast(Callable[[Context], AdapterClient], client_of(reference))(context)

    return make


@functools.cache
def client_of(reference: str) -> type[AdapterClient]:
    """Import a client's class.

    Raises
    ------
    Refusal
        If it cannot be had, or is no subclass of ``AdapterClient``.
    """
    return named_class("client", reference, AdapterClient, border.pushed_folders())
