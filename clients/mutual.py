# SPDX-License-Identifier: Apache-2.0
"""A node's turns in Co-C2C: its cache to everyone who asked, then what has become of it.

A turn brings the others' caches of the turn before and takes this node's own: at first of the
question alone, then as the question reads among theirs.  Nothing of it is kept here in between but
the nonce and the number of the turn; a turn that comes twice, or out of order, is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.adapters.fuser import CacheFuser
from fedloom.errors import Refusal
from fedloom.refining.together import handed, opening, turned, unfit
from fedloom.secure.channel import Channel
from fedloom.slices.slice import CacheSlice

if TYPE_CHECKING:
    from fedloom.clients.refine import FedRefineClient

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
LETTER = "letter-"
"""Before the partition whose sealed letter an array is."""


def usable(fuser: CacheFuser | None, rounds: int) -> CacheFuser | None:
    """Return a fuser if it can take part in so many exchanges, any if there are none."""
    if fuser is None or not rounds or not (why := unfit(fuser, rounds)):
        return fuser
    log.warning("a fuser is left out: %s", why)
    return None


def hand_over(client: FedRefineClient, arrays: Arrays, config: Mapping[str, Any]) -> Arrays:
    """Take a turn: return this node's cache, sealed for each asker by its partition."""
    exchange, number = str(config["exchange"]), int(config["turn"])
    nonce = _begin(client, exchange, number)
    given, peers = client.config.refine, client._peers(config)
    if number:
        senders = [client._sender(p, config, dict(arrays), nonce, number - 1) for p in peers]
        piece = turned(client.base, given.question, senders, client._terms())
    else:
        piece = opening(client.base, given.question, given.max_tokens)
    found: Arrays = {}
    for peer in peers:
        if (letter := arrays.get(f"{LETTER}{peer.partition}")) is None:
            continue
        channel = client._channel(peer.public, exchange, peer.partition, client.partition_id)
        try:
            sealed = _sealed(letter.tobytes(), piece, channel, number)
        except (ValueError, KeyError, TypeError, IndexError) as error:  # a Refusal is a ValueError
            log.warning("partition %d is given no cache: %s", peer.partition, error)
            continue
        found[f"{peer.partition}"] = np.frombuffer(sealed, np.uint8)
    return found


def _sealed(letter: bytes, piece: CacheSlice, channel: Channel, number: int) -> bytes:
    """Do what one asker's letter says, for the exchange of this turn."""
    body = json.loads(channel.open("question", letter, 0))
    layers, session = {int(n) for n in body["layers"]}, bytes.fromhex(body["sessions"][number])
    frames = handed(piece, layers, str(body["scheme"]), channel.frame_key, session)
    return channel.seal("cache", b"".join(frames), number)


def _begin(client: FedRefineClient, exchange: str, number: int) -> bytes:
    """Return an open exchange's nonce if it is this turn's time; no turn is taken twice."""
    state, rounds = client._state(), client.config.refine.mutual
    nonce, expected = state.get(f"nonce-{exchange}"), int(state.get(f"turn-{exchange}", b"0"))
    if not nonce or number != expected or number >= rounds:
        raise Refusal(
            f"turn {number} of exchange {exchange[:16]}: expected turn {expected} of {rounds} in an"
            " exchange that is open here; ask again"
        )
    client._store(f"turn-{exchange}", str(number + 1).encode())
    return bytes(nonce)
