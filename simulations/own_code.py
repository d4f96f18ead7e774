# SPDX-License-Identifier: Apache-2.0
"""Look at a recipe's own strategy and client before any process starts."""

from __future__ import annotations

from fedloom.config import RunConfig
from fedloom.simulations.server_app import STRATEGIES
from fedloom.strategies.choosing import strategy_of


def check_own_code(config: RunConfig, *, clients_here: bool) -> None:
    """Refuse classes that cannot be had, and keys of ``[custom]`` that neither of them reads.

    Parameters
    ----------
    clients_here
        Whether the clients will run on this machine; elsewhere their nodes look at their class.
    """
    strategy = strategy_of(config, STRATEGIES)
    if not clients_here:
        return
    read, who = dict(strategy.own_keys), strategy.__name__
    if config.client:
        from fedloom.clients.choosing import client_of

        client = client_of(config.client)
        config.custom.over(client.own_keys)
        read |= client.own_keys
        who += f" or {client.__name__}"
    config.custom.check_known(read, who)
