"""One run, one frozen model: a node of another is named and left out, and a tie is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.clientapp import ClientApp

from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.errors import Refusal
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on

from runs import adapter_of, equal, rows


def other(*partitions: int) -> ClientApp:
    """Some nodes have another model."""

    class OtherModel(FedNLClient):
        def get_properties(self, config):
            said = super().get_properties(config)
            odd = self.partition_id in partitions and "base" in said
            return {**said, "base": "f" * 64} if odd else said

    app = ClientApp()
    serve(app, OtherModel)
    serve(app, OtherModel, action="fednl", queries=False)
    return app


def test_fednl_refuses_two_nodes_of_two_bases_and_names_one(recipe):
    """Nobody can tell which of two is right; nothing was trained or scored."""
    config = recipe(rounds=1, clients__count=2)
    with pytest.raises(Refusal, match=r"partition 1 \(Humanities\) differs in base: ffff"):
        run_in_process(config, other(1))
    events = rows(Path(config.output) / config.name, "events")
    assert [e["event"] for e in events] == ["start", "refused"]


def test_fednl_refuses_where_as_many_have_one_base_as_the_other(recipe):
    with pytest.raises(Refusal, match="differs in base"):
        run_in_process(recipe(rounds=1, clients__count=4), other(0, 3))


@pytest.mark.parametrize("who", [0, 2])
def test_one_node_of_another_base_is_named_and_the_others_go_on(recipe, who):
    """Also if it is the lowest partition, which was once taken for the truth."""
    config = recipe(rounds=1, clients__count=3)
    run_in_process(config, other(who))
    folder = Path(config.output) / config.name
    (failed,) = [e for e in rows(folder, "events") if e["event"] == "client-failed"]
    assert (failed["partition"], failed["phase"]) == (who, "properties")
    assert "differs in base: ffffffffffffffff came" in failed["reason"]
    trained = [r["partition"] for r in rows(folder, "metrics") if r["phase"] == "train"]
    assert trained == [p for p in range(3) if p != who]


def test_whoever_is_left_out_leaves_no_trace_in_the_adapter(recipe):
    odd, plain = (recipe(rounds=1, clients__count=n, name=str(n)) for n in (3, 2))
    run_in_process(odd, other(2))
    run_in_process(plain)
    assert equal(adapter_of(odd), adapter_of(plain))


def test_faast_refuses_sums_of_two_encoders(digits):
    config = digits(clients__count=2)

    class TwoEncoders(InProcessGrid):
        def __init__(self) -> None:
            super().__init__(client_app.app, 2, config.flat())
            other = config.replaced(faast__encoder="relu:32:pixels").flat()
            self._contexts[1001].run_config = dict(other)

    with pytest.raises(Refusal, match=r"partition 1 .* differs in recipe"):
        serve_on(TwoEncoders(), server_app.app, config)
