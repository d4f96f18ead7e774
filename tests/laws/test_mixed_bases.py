"""One run, one frozen model: nodes of another base or encoder are named and refused."""

from __future__ import annotations

import pytest
from flwr.clientapp import ClientApp

from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.errors import Refusal
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on


class _OtherModel(FedNLClient):
    def get_properties(self, config):
        said = super().get_properties(config)
        return {**said, "base": "f" * 64} if self.partition_id == 1 and "base" in said else said


def test_fednl_refuses_a_node_of_another_base_by_name(recipe):
    app = ClientApp()
    serve(app, _OtherModel)
    with pytest.raises(Refusal, match=r"partition 1 \(Humanities\) differs in base: ffff"):
        run_in_process(recipe(rounds=1, clients__count=2), app)


def test_faast_refuses_sums_of_two_encoders(digits):
    config = digits(clients__count=2)

    class TwoEncoders(InProcessGrid):
        def __init__(self) -> None:
            super().__init__(client_app.app, 2, config.flat())
            other = config.replaced(faast__encoder="relu:32:pixels").flat()
            self._contexts[1001].run_config = dict(other)

    with pytest.raises(Refusal, match=r"partition 1 .* differs in recipe"):
        serve_on(TwoEncoders(), server_app.app, config)
