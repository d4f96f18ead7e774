# SPDX-License-Identifier: Apache-2.0
"""The ClientApp: Flower routes each message by its action to the method's client.

Each method's client is imported when its first message comes: a node that only sums keys of a light
encoder loads neither peft nor a language model's code.
"""

from collections.abc import Callable

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from fedloom.clients import warm
from fedloom.clients.bridge import serve, serve_questions
from fedloom.clients.choosing import own_or
from fedloom.clients.secure import serve_sums
from fedloom.errors import Refusal
from fedloom.secure import channel


def _fednl(context: Context) -> NumPyClient:
    from fedloom.clients.fednl import FedNLClient

    return FedNLClient(context)


def _faast(context: Context) -> NumPyClient:
    from fedloom.clients.faast import FAASTClient

    return FAASTClient(context)


def _fedrefine(context: Context) -> NumPyClient:
    if context.run_config.get("refine.solve"):
        from fedloom.clients.fuser_sums import FuserSumsClient

        return FuserSumsClient(context)
    from fedloom.clients.refine import FedRefineClient

    return FedRefineClient(context)


CLIENTS: dict[str, Callable[[Context], NumPyClient]] = {
    "fednl": _fednl,
    "faast": _faast,
    "fedrefine": _fedrefine,
}


def _named(context: Context) -> NumPyClient:
    """Return the client of the recipe's method: for questions that are no method's own."""
    method = str(context.run_config.get("method", "fednl"))
    if method not in CLIENTS:
        raise Refusal(f'method = "{method}": expected one of {", ".join(CLIENTS)}')
    return CLIENTS[method](context)


app = ClientApp(mods=[warm.forward])  # a plain assignment: Flower looks for it by syntax
for _action, _client in CLIENTS.items():
    serve(app, own_or(_client), action=_action, queries=False)
serve(app, own_or(_named))
serve_sums(app)
serve_questions(app, own_or(_fedrefine), channel.ACTIONS)
