"""Any NumPyClient behind Flower's own message-API strategies."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy

from fedloom import border
from fedloom.clients.bridge import serve
from fedloom.errors import Refusal
from fedloom.simulations.inprocess import InProcessGrid


class Shift(NumPyClient):
    """Adds its partition number to every array."""

    def __init__(self, context: Context) -> None:
        self.number = context.node_config["partition-id"]

    def get_parameters(self, config):
        return [np.zeros(2)]

    def fit(self, parameters, config):
        if self.number == 3:
            raise RuntimeError("out of order")
        return [array + self.number for array in parameters], 1 + self.number, {"rate": 0.5}

    def evaluate(self, parameters, config):
        return float(parameters[0].sum()), 1, {}


@pytest.fixture
def grid():
    app = ClientApp()
    serve(app, Shift)
    return InProcessGrid(app, 4, {})


@pytest.mark.parametrize("kind", [strategy.FedAvg, strategy.FedAdam, strategy.FedMedian])
def test_stock_strategies_keep_names_and_go_on_without_the_one_that_raises(grid, kind):
    start = ArrayRecord({"b": Array(np.ones((2, 2))), "a": Array(np.zeros(3))})
    result = kind(min_train_nodes=1, fraction_evaluate=1.0).start(grid, start, num_rounds=2)
    assert set(result.arrays) == {"a", "b"}
    assert result.train_metrics_clientapp[1]["rate"] == pytest.approx(0.5)
    assert np.isfinite(result.evaluate_metrics_clientapp[2]["loss"])
    if kind is strategy.FedAvg:
        step = (0 * 1 + 1 * 2 + 2 * 3) / (1 + 2 + 3)
        np.testing.assert_allclose(result.arrays["a"].numpy(), np.full(3, 2 * step))


def test_initial_arrays_and_properties_are_queries(grid):
    ask = Message(RecordDict(), 1000, "query.initial_adapter")
    (reply,) = grid.send_and_receive([ask])
    (arrays,) = reply.content.array_records.values()
    assert list(arrays) == ["0"]


ROW = "patient 17, Quillfeather, 4 March 1961"


class Quoting(Shift):
    """Fails as code that handles rows does: its words, and those of what caused it, quote one."""

    def fit(self, parameters, config):
        if self.number == 1:
            raise Refusal("column 3 of row 7: expected a number")
        try:
            row = {"text": ROW}
            int(row["text"])
        except ValueError as error:
            error.add_note(f"while reading {ROW}")
            raise KeyError(ROW) from error
        return super().fit(parameters, config)


@pytest.mark.parametrize("partition", [0, 1])
def test_an_exception_that_quotes_a_row_says_where_and_not_what(partition, caplog):
    app = ClientApp()
    serve(app, Quoting)
    grid = InProcessGrid(app, 2, {})
    asked = Message(border.content({}, {"round": 1}), 1000 + partition, "train.default")
    asked.content["arrays"] = ArrayRecord({"a": Array(np.zeros(2))})
    (reply,) = grid.send_and_receive([asked])
    said = reply.error.reason
    for part in (ROW, "Quillfeather", "1961", "invalid literal"):
        assert part not in said
    line, trace, refused = border.failure_reason(reply)
    if partition == 1:
        assert (line, trace, refused) == ("column 3 of row 7: expected a number", "", True)
        return
    assert re.match(r"KeyError at test_bridge\.py:\d+ \(its words are in the node's log\)$", line)
    assert "ValueError" in trace
    assert re.search(r"clients/test_bridge\.py:\d+ in fit", trace)
    assert "/home" not in trace
    assert str(Path(__file__).parents[2]) not in trace
    assert ROW in caplog.text  # the node's own log has all of it
