"""Arrays end to end with one list: nothing is lost, nothing foreign is taken, little is added."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.common.serde import recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedloom import border
from fedloom.errors import Refusal
from fedloom.parcels import Parcel, pack, unpack

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint64, np.bool_, ">f4"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    elements=st.integers(0, 1),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=9), ARRAYS, max_size=5))
def test_arrays_come_back_to_the_bit_in_their_order(arrays):
    records = border.content(border.pack_parcel(arrays), {"round": 1})
    back = border.arrays_of(records)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype.newbyteorder("="), array.shape)
        np.testing.assert_array_equal(back[name], array)
    counts = border.wire_bytes(records)
    assert sum(counts.values()) == len(recorddict_to_proto(records).SerializeToString())
    assert counts.pop("framing") > 0
    assert sum(counts.values()) == sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("code", ["float32", "bfloat16", "int8", "int4"])
def test_only_single_precision_is_written_in_fewer_bits(code):
    last = 127 if code == "int8" else 7  # then all of them are levels of the code
    arrays = {"w": np.float32([[1, 2], [3, last]]), "n": np.arange(3), "d": np.float64([1 / 3])}
    back = unpack(pack(arrays, code))
    np.testing.assert_array_equal(back["w"], arrays["w"])
    np.testing.assert_array_equal(back["n"], arrays["n"])
    assert back["d"] == arrays["d"]


def test_messages_to_many_nodes_share_a_parcel():
    state = border.pack_arrays({"w": np.zeros(3), "v": np.zeros(2)})
    parcels = border.Parcels()
    one, two = (parcels.of(ArrayRecord(dict(state))) for _ in range(2))
    assert one is two
    assert list(border.unpack_arrays(parcels.of(ArrayRecord({"w": state["w"]})))) == ["w"]


def listed(*arrays, **changes) -> bytes:
    named = [[0, *array] for array in arrays]
    tree = list({"format": 1, "code": "float32", "arrays": named, **changes}.values())
    return zlib.compress(json.dumps(tree).encode())


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (b"", "not a list"),
        (zlib.compress(b"[]"), "not a list"),
        (zlib.compress(b"[" * 100_000), "not a list"),
        (zlib.compress(b"0" * 2**23), "cut short, or too long"),  # 8 MB of 8 kB
        (listed(["w", "float32", 2], format=2), "format 2"),
        (listed(["w", "float32", 2], code="int3"), "int3"),
        (listed(["w", "float32", 1], ["w", "float32", 1]), "twice"),
        (listed(["w", "object", 2]), "object"),
        (listed([7, "float32", 2]), "not a list"),
        (listed(["w" * 1001, "float32", 2]), "www"),
        (listed(arrays=[[0, "", "float32", 0]] * 70_000), "70000 arrays"),
        (listed(["w", "float32", -2]), "shape"),
        (listed(["w", "float32", 2.0]), "shape"),
        (listed(["w", "float32", 2**50]), "shape"),
        (listed(["w", "float32", *[1] * 9]), "shape"),
        (listed(arrays=[[1, "w", "float32", 2]]), "1 letters"),
        (listed(arrays=[["0", "w", "float32", 2]]), "'0' letters"),
        (listed(["w", "float32", 3]), "8 bytes came, expected 12"),
        (listed(["w", "float32", 1]), "8 bytes of float32 came, the list of arrays has 4"),
        (listed(["w", "float64", 1]), "0 bytes came"),
        (listed(["w", "float32", 2], code="int8"), "0 bytes of codes"),
    ],
)
def test_lists_and_buffers_that_do_not_fit_are_refused(layout, said):
    with pytest.raises(Refusal, match=said):
        unpack(Parcel(layout, {"float32": bytes(8)}))


def test_a_parcel_holds_nothing_beside_its_buffers():
    record = border.pack_parcel({"w": np.zeros(2, np.float32)})
    record["loose"] = Array(np.zeros(2))
    with pytest.raises(Refusal, match="1 loose"):
        border.unpack_arrays(record)


def test_framing_of_tiny_gates_is_below_two_percent():
    """SmolLM2-135M's memory: thirty gates of 576 numbers; as single arrays it is a tenth."""
    name = "base_model.model.model.layers.{}.self_attn.memory.gate"
    gates = {name.format(i): np.ones(576, np.float32) for i in range(30)}
    told = {"round": 3, "manifest": "0" * 64, "run": "0" * 32, "base": "0" * 64, "last": False}
    share = {}
    for how, pack_them in (("single", border.pack_arrays), ("parcel", border.pack_parcel)):
        counts = border.wire_bytes(border.content(pack_them(gates), {**told, "version": "0.1.0"}))
        share[how] = counts["framing"] / counts["float32"]
    assert share["single"] > 0.08
    assert share["parcel"] < 0.02
