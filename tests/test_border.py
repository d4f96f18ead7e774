from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedloom import border
from fedloom.errors import Refusal
from fedloom.wire import Manifest

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64]),
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=5),
    elements=st.integers(-9, 9),
)


@pytest.fixture(autouse=True)
def _identity():
    """Flower's Message reads these; outside a Flower process nobody sets them."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text("abc.", min_size=1, max_size=9), ARRAYS, max_size=4))
def test_arrays_come_back_to_the_bit_and_bytes_add_up(arrays):
    records = border.content(arrays, {"round": 1}, {"num-examples": 3})
    back = border.arrays_of(records)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)
    counts = border.wire_bytes(records)
    assert sum(counts.values()) == len(recorddict_to_proto(records).SerializeToString())
    assert counts["framing"] > 0
    values = sum(array.nbytes for array in arrays.values())
    assert sum(n for dtype, n in counts.items() if dtype != "framing") == values


def test_bytes_of_an_empty_list_are_counted():
    """RecordDict.count_bytes() of flwr 1.42 raises IndexError here."""
    records = RecordDict({"config": ConfigRecord({"x": []})})
    size = len(recorddict_to_proto(records).SerializeToString())
    assert border.wire_bytes(records) == {"framing": size}


@pytest.mark.parametrize("value", ["text", True, None, [1.0], np.float32(1)])
def test_metrics_are_plain_numbers(value):
    with pytest.raises(TypeError, match="int or float"):
        border.content(metrics={"m": value})


def reply(arrays, **metrics) -> RecordDict:
    return border.content(arrays, metrics=metrics)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_weight_that_is_no_count_is_refused(weight):
    arrays = {"w": np.zeros(2, np.float32)}
    manifest = Manifest.of(arrays, method="m", version="v", base="b", tokenizer="t")
    assert border.update_of(reply(arrays, **{"num-examples": 3}), manifest).weight == 3
    with pytest.raises(Refusal, match=r"(positive|finite) number"):
        border.update_of(reply(arrays, **{"num-examples": weight}), manifest)
    with pytest.raises(Refusal, match="expected one"):
        border.update_of(RecordDict(), manifest)


def test_failure_carries_a_sentence_or_a_traceback():
    message = Message(RecordDict(), 7, "train.x")
    message.metadata.__dict__["_message_id"] = "id"
    refused = border.failure(message, Refusal("use another\n  model"))
    assert border.failure_reason(refused) == ("use another model", "", True)
    try:
        raise KeyError("gone")
    except KeyError as error:
        failed = border.failure(message, error)
    line, trace, is_refusal = border.failure_reason(failed)
    assert line.startswith("KeyError at test_border.py:")
    assert not is_refusal
    assert trace.startswith("Traceback (most recent call last")
    assert "tests/test_border.py:" in trace


@pytest.mark.parametrize("head", ["Refusal: ", "", "ValueError at x.py:1\n"])
def test_what_a_node_says_of_its_failure_is_one_line_and_bounded(head):
    message = Message(RecordDict(), 7, "train.x")
    message.metadata.__dict__["_message_id"] = "id"
    said = head + "use\x1b[2J another\x00 \u202emodel\r\n" + "a b\n\x07" * 100_000
    failed = Message(Error(1, said), reply_to=message)
    line, trace, refused = border.failure_reason(failed)
    assert line.isprintable()
    assert len(line) <= border.REASON
    assert refused == (head == "Refusal: ")
    assert all(part.isprintable() for part in trace.split("\n"))
    assert len(trace) <= border.TRACE
    assert border.error_bytes(failed) > 400_000  # what travelled is counted, not what is kept
    for empty in ("", None, "Refusal: ", "Refusal: \n\x00"):
        line, _, _ = border.failure_reason(Message(Error(7, empty), reply_to=message))
        assert line
