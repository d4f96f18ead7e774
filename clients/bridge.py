# SPDX-License-Identifier: Apache-2.0
"""Serve a ``NumPyClient`` to today's message-API strategies, under named arrays.

Flower 1.42's strategies speak in messages; its ``NumPyClient`` in lists of arrays.  Any
``NumPyClient`` can be served; an ``AdapterClient`` also knows its arrays' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedloom import border
from fedloom.clients import gate, riding
from fedloom.config import RunConfig
from fedloom.data import by_file
from fedloom.data.partition import Client, Partition
from fedloom.errors import Refusal
from fedloom.flat import Scalar
from fedloom.wire import Arrays

ClientFn = Callable[[Context], NumPyClient]


class AdapterClient(NumPyClient):
    """A ``NumPyClient`` whose list of arrays has names.

    Attributes
    ----------
    array_names : list of str
        Names of the arrays that came with a message, in the list's order; after
        ``get_parameters`` and ``fit``, the names of what these returned.
    code : str
        What the arrays that ``fit`` returned are to be written in: see ``fedloom.rounding``.
    config : RunConfig
        The recipe.
    """

    code = "float32"
    config: RunConfig
    own_keys: Mapping[str, Scalar] = {}
    """Recipe keys of ``[custom]`` that a client reads, with their defaults."""

    @property
    def custom(self) -> dict[str, Scalar]:
        """The recipe's values of ``own_keys``."""
        return self.config.custom.over(self.own_keys)

    def __init__(self) -> None:
        self.array_names: list[str] = []


def partition_of(context: Context) -> int:
    """Return which share of the data a node was started for."""
    if "partition-id" not in context.node_config:
        raise Refusal(
            "this node's config has no partition-id: start it with --node-config"
            ' "partition-id=0 num-partitions=5"'
        )
    return int(context.node_config["partition-id"])


def client_at(partition: Partition, number: int) -> Client:
    """Return one client of the data.

    Raises
    ------
    Refusal
        If the data have no such share.
    """
    if not 0 <= number < len(partition.clients):
        raise Refusal(
            f"partition-id {number}: the data divide into {len(partition.clients)} clients,"
            f" 0 to {len(partition.clients) - 1}"
        )
    return partition.clients[number]


def with_own_rows(config: RunConfig, context: Context) -> RunConfig:
    """Put a node's own rows in the place of what the recipe names, if it was started with some.

    Raises
    ------
    Refusal
        If the recipe deals rows out: own rows are not taken, nor left aside, without a word.
    """
    data = str(context.node_config.get("data", ""))
    if by_file.is_own(config.data.source):
        raise Refusal(f'data.source = "{config.data.source}": only a node itself may say that')
    if not data:
        return config
    if config.data.split != "files":
        raise Refusal(
            f"partition {partition_of(context)} has rows of its own and data.split is"
            f' "{config.data.split}": set data.split = "files", or start the node without data'
        )
    return config.replaced(data__source=by_file.own(partition_of(context), data))


def serve(
    app: ClientApp, client_fn: ClientFn, *, action: str = "default", queries: bool = True
) -> None:
    """Register a client's work on ``app``.

    ``train.<action>`` is ``fit`` and ``evaluate.<action>`` is ``evaluate``; with ``queries``,
    ``query.properties`` is ``get_properties`` and ``query.initial_adapter`` is ``get_parameters``
    with the properties that belong to it: one client of an app answers these.  An exception becomes
    an error reply that says its type and place; its words stay on the node.

    Examples
    --------
    >>> app = ClientApp()
    >>> serve(app, lambda context: NumPyClient(), action="mine")
    """

    @app.train(action)
    def train(message: Message, context: Context) -> Message:
        return _answer(message, context, client_fn, _fit)

    @app.evaluate(action)
    def evaluate(message: Message, context: Context) -> Message:
        return _answer(message, context, client_fn, _evaluate)

    if queries:
        _serve_queries(app, client_fn)


def serve_questions(app: ClientApp, client_fn: ClientFn, actions: Iterable[str]) -> None:
    """Register questions of a method's own: ``query.<action>`` is the client's method of that name.

    It is given the arrays and the config that came, and returns those to answer with.
    """

    def register(action: str) -> None:
        def work(client: NumPyClient, records: RecordDict, context: Context) -> RecordDict:
            arrays, config = border.arrays_of(records), border.config_of(records)
            return border.content(*getattr(client, action)(arrays, config))

        @app.query(action)
        def question(message: Message, context: Context) -> Message:
            return _answer(message, context, client_fn, work)

    for action in actions:
        register(action)


def _serve_queries(app: ClientApp, client_fn: ClientFn) -> None:
    @app.query("properties")
    def properties(message: Message, context: Context) -> Message:
        return _answer(message, context, client_fn, _properties)

    @app.query("initial_adapter")
    def initial_adapter(message: Message, context: Context) -> Message:
        return _answer(message, context, client_fn, _initial)


def _answer(
    message: Message,
    context: Context,
    client_fn: ClientFn,
    work: Callable[[NumPyClient, RecordDict, Context], RecordDict],
) -> Message:
    try:
        return Message(work(client_fn(context), message.content, context), reply_to=message)
    except Exception as error:  # an error is data here: the strategy names the client and goes on
        return border.failure(message, error)


def _unpack(
    client: NumPyClient, records: RecordDict, context: Context
) -> tuple[list[str], list[NDArray[Any]]]:
    arrays = border.arrays_of(records)
    gate.admit(border.config_of(records), arrays, context)
    names = list(arrays)
    _name(client, names)
    return names, list(arrays.values())


def _name(client: NumPyClient, names: list[str]) -> None:
    """Tell a client that wants to know it what the arrays that follow are called."""
    if isinstance(client, AdapterClient):
        client.array_names = names


def _fit(client: NumPyClient, records: RecordDict, context: Context) -> RecordDict:
    names, arrays = _unpack(client, records, context)
    config, scoring = riding.apart(border.config_of(records))
    before: dict[str, Any] = {}
    if scoring:
        sent = dict(zip(names, arrays, strict=True))
        before = riding.scores(lambda held: _score(client, held, scoring), sent, scoring)
        _name(client, names)
    trained, examples, metrics = client.fit(arrays, config)
    names = client.array_names if isinstance(client, AdapterClient) else names
    named = dict(zip(names, trained, strict=True))
    gate.check_sent(named, context)
    told = {border.WEIGHT: examples, **metrics, **before}
    told |= gate.ticket_for(config, "train", context)
    if not border.came_in_parcels(records):  # somebody else's strategy
        return border.content(named, metrics=told)
    code = client.code if isinstance(client, AdapterClient) else "float32"
    return border.content(border.pack_parcel(named, code), metrics=told)


def _evaluate(client: NumPyClient, records: RecordDict, context: Context) -> RecordDict:
    names, arrays = _unpack(client, records, context)
    config = border.config_of(records)
    told = _score(client, dict(zip(names, arrays, strict=True)), config)
    return border.content(metrics={**told, **gate.ticket_for(config, "evaluate", context)})


def _score(client: NumPyClient, arrays: Arrays, config: dict[str, Any]) -> dict[str, Any]:
    _name(client, list(arrays))
    loss, examples, metrics = client.evaluate(list(arrays.values()), config)
    return {border.WEIGHT: examples, "loss": float(loss), **metrics}


def _properties(client: NumPyClient, records: RecordDict, context: Context) -> RecordDict:
    return border.content(config=client.get_properties(border.config_of(records)))


def _initial(client: NumPyClient, records: RecordDict, context: Context) -> RecordDict:
    arrays = client.get_parameters(border.config_of(records))
    names = client.array_names if isinstance(client, AdapterClient) else None
    named = dict(zip(names or map(str, range(len(arrays))), arrays, strict=True))
    return border.content(named, config=client.get_properties({"adapter": True}))
