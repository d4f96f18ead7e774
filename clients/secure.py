# SPDX-License-Identifier: Apache-2.0
"""A node's side of secure sums: three queries that any method can do without, and ``masked``.

A client lives for one message, so its session lies in Flower's ``Context.state``: a SuperNode holds
that in its memory, hands it to the process that answers a message and takes it back with the reply;
it is never in a message and is gone when the node stops.  A file would outlive the round: whoever
recorded a round's messages and later gets hold of a disk could take the masks off.  And a state
that comes back from a file can be an older one, which would answer a step twice.  What has to be
known after a stop is a number: the last sum that was opened (``fedloom.local.opened``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedloom import border, ciphers
from fedloom.ciphers import Source
from fedloom.errors import Refusal
from fedloom.local.opened import check_unopened, enter_opened
from fedloom.secure import Session, advertise, messages
from fedloom.secure.masks import Words
from fedloom.wire import Arrays

_STATE, _SESSION = "fedloom-secure-sum", "session"


def serve_sums(app: ClientApp, source: Source = ciphers.system) -> None:
    """Register what a secure sum asks of a node besides the method's own message.

    Parameters
    ----------
    source
        Of secret random bytes.
    """

    @app.query(messages.KEYS)
    def keys(message: Message, context: Context) -> Message:
        return _answer(message, context, lambda config: _keys(context, config, source))

    @app.query(messages.SHARES)
    def shares(message: Message, context: Context) -> Message:
        return _answer(message, context, lambda config: _shares(context, config, source))

    @app.query(messages.UNMASK)
    def unmask(message: Message, context: Context) -> Message:
        return _answer(message, context, lambda config: _unmask(context, config))


def masked(context: Context, config: Mapping[str, Any], arrays: Arrays) -> Words:
    """Mask what is to be summed: all that a method's client does otherwise than without.

    Parameters
    ----------
    config
        What came with the message.
    arrays
        Sums of this client's rows. Counts are numbers, too: put them here and not in metrics.
    """
    session = _session(context, config)
    letters, bits = messages.letters_of(config)
    following, words = session.mask(letters, arrays, bits)
    _store(context, following)
    return words


def finishers(context: Context, config: Mapping[str, Any]) -> int:
    """Return how many clients will be in the sum, at least: what this client was told of it.

    A client shares no secret below a threshold of more than half of those who gave keys.
    """
    return _session(context, config).threshold


def _keys(context: Context, config: dict[str, Any], source: Source) -> Arrays:
    if "partition-id" not in context.node_config:
        raise Refusal(
            "this node's config has no partition-id: start it with --node-config"
            ' "partition-id=0 num-partitions=5"'
        )
    me = int(context.node_config["partition-id"])
    summation = messages.summation_of(config)
    session, keys = advertise(summation, me, _stored(context), source)
    check_unopened(summation.run, me, summation.round)  # sooner than after a round's training
    _store(context, session)
    return messages.give_keys(keys)


def _shares(context: Context, config: dict[str, Any], source: Source) -> Arrays:
    peers, threshold = messages.peers_of(config)
    session, letters, digest = _session(context, config).share(peers, threshold, source)
    _store(context, session)
    return messages.give_letters(letters, digest)


def _unmask(context: Context, config: dict[str, Any]) -> Arrays:
    session, shares = _session(context, config).unmask(messages.survivors_of(config))
    enter_opened(session.summation.run, session.me, session.summation.round)
    _store(context, session)  # without its secrets, before the answer is on its way
    return messages.give_shares(shares)


def _answer(
    message: Message, context: Context, work: Callable[[dict[str, Any]], Arrays]
) -> Message:
    try:
        arrays = work(border.config_of(message.content))
        return Message(border.content(arrays), reply_to=message)
    except Exception as error:  # an error is data here: the server names the client and goes on
        return border.failure(message, error)


def _session(context: Context, config: Mapping[str, Any]) -> Session:
    session = _stored(context)
    if session is None:
        raise Refusal(
            "this node is in no secure summation: it was started anew, or was never asked for keys;"
            " it can take part in the next one"
        )
    session.check(messages.summation_of(config))
    return session


def _stored(context: Context) -> Session | None:
    record = context.state.config_records.get(_STATE)
    return Session.from_bytes(record[_SESSION]) if record else None  # type: ignore[arg-type]


def _store(context: Context, session: Session) -> None:
    context.state[_STATE] = ConfigRecord({_SESSION: session.to_bytes()})
