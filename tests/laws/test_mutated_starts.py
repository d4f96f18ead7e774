"""Thousands of changed apps, roll-call replies and adapters' starts: refused, or still true."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from google.protobuf.message import DecodeError
from mutations import EVIL, HOW_MANY, attempt, flipped

from fedloom import __version__, border
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.simulations import admission
from fedloom.simulations.starting import read_start
from fedloom.simulations.superlink import write_app
from fedloom.strategies import Journal, Roster
from fedloom.strategies.agreement import agree, check_properties, partition_told
from fedloom.wire import Manifest

CONFIG = RunConfig()
RECIPE = CONFIG.digest()
ODD = (
    None,
    -1,
    1.5,
    "",
    "x" * 5000,
    b"\xff",
    True,
    [1],
    ["a"],
    [],
    "a\nb",
    "\x1b[2J",
    2**62,
    *EVIL,
)


def through(records: RecordDict, random: np.random.Generator) -> RecordDict:
    """Change the serialised message."""
    data = recorddict_to_proto(records).SerializeToString()
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(flipped(data, random)))
    except (DecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refusal("Flower reads no such message") from error


def changed(told: dict, random: np.random.Generator) -> dict:
    """Say something else under one key, or nothing."""
    key, odd = str(random.choice(list(told))), ODD[random.integers(len(ODD))]
    rest = {k: x for k, x in told.items() if k != key}
    return rest if odd is None else {**rest, key: odd}


# ---- apps --------------------------------------------------------------------------------------


def fab(*entries: tuple[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries:
            archive.writestr(name, text)
    return data.getvalue()


@HOW_MANY
def test_changed_apps_are_refused_or_choose_what_is_installed(count, tmp_path):
    text = (write_app(tmp_path, CONFIG) / "pyproject.toml").read_text()
    whole, random, refused = fab(("pyproject.toml", text)), np.random.default_rng(21), 0
    admission.check_app(whole)
    for _ in range(count // 4):
        _, said = attempt(admission.check_app, flipped(whole, random))
        if said is not None:
            refused += 1
            assert "\n" not in said
            assert len(said) < 500
    assert refused > count / 16


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000,
        "x = " + "{a=" * 5000,
        "[tool.flwr.app]\ncomponents = [[1, 2], ['a', 3]]",
        "[tool.flwr.app]\ncomponents = 7",
        "[tool.flwr.app.components]\nclientapp = '\\u001b[2J'",
    ],
    ids=["lists", "tables", "pairs", "number", "escape"],
)
def test_odd_toml_is_refused_in_one_line(text):
    with pytest.raises(Refusal) as refused:
        admission.check_app(fab(("pyproject.toml", text)))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["a\x1b[2J.py", "\n.toml", "x" * 3000 + ".so"])
def test_odd_names_are_shown_as_one_line(name):
    with pytest.raises(Refusal, match="brings") as refused:
        admission.check_app(fab((name, "")))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


# ---- roll call ---------------------------------------------------------------------------------


def said(partition: int) -> dict:
    return {
        "partition": partition, "name": f"client {partition}", "train": 40, "test": 7,
        "data": "d" * 64, "partition-json": "", "version": __version__, "recipe": RECIPE,
        "base": "b" * 64, "tokenizer": "t" * 64, "device": "cpu", "visible-gpus": "", "pid": 4,
    }  # fmt: skip


@HOW_MANY
@pytest.mark.parametrize("how", ["words", "bytes"])
def test_changed_roll_call_replies_leave_their_node_out_or_change_nothing(how, count):
    random, refused, left_out = np.random.default_rng(22), 0, 0
    for _ in range(count // 4):
        records, why = border.content(config=said(0)), None
        if how == "words":
            try:
                records = border.content(config=changed(said(0), random))
            except (TypeError, ValueError):  # no record holds that
                continue
        else:
            records, why = attempt(through, records, random)
        told = {} if records is None else border.config_of(records)
        partition, why = (None, why) if why else attempt(check_properties, told)
        if why is not None:
            refused += 1
            assert why.isprintable()
            assert len(why) < 400
            continue
        others = partition + 1, partition + 2
        held = {partition: told, **{p: said(p) for p in others}}
        found = agree(CONFIG, Roster({p: 1000 + p for p in held}, held), [], Journal())
        left = found.roster.partitions
        assert set(others) <= set(left)
        assert found.common["base"] == "b" * 64
        assert partition_told(found.roster, found.common) == ""
        left_out += partition not in left
        if partition in left:
            assert {k: told.get(k) for k in found.common} == {k: said(1)[k] for k in found.common}
    assert refused > count / 40
    assert left_out > count / 60


# ---- the start ---------------------------------------------------------------------------------

ARRAYS = {
    "layer.q.lora_A.weight": np.arange(12, dtype=np.float32).reshape(2, 6),
    "layer.q.lora_B.weight": np.zeros((5, 2), np.float32),
}
KEPT = {"layer.memory.gate": np.full(70, 0.25, np.float32)}
MANIFEST = Manifest.of(
    ARRAYS, method="fednl", version=__version__, base="b" * 64, tokenizer="t" * 64, kept=KEPT
)
COMMON = {"base": "b" * 64, "tokenizer": "t" * 64}


def start(**words: str) -> RecordDict:
    told = {"manifest": MANIFEST.to_json(), "peft": json.dumps({"r": 2}), **words}
    return border.content({**ARRAYS, **KEPT}, config=told)


def of_words(random: np.random.Generator) -> RecordDict:
    told = changed({"manifest": MANIFEST.to_json(), "peft": "{}"}, random)
    if random.integers(2):
        tree = changed(json.loads(MANIFEST.to_json()), random)
        told = {"peft": "{}", "manifest": json.dumps(tree, default=str)}
    return border.content({**ARRAYS, **KEPT}, config=told)


def of_arrays(random: np.random.Generator) -> RecordDict:
    arrays = {name: array.copy() for name, array in {**ARRAYS, **KEPT}.items()}
    name = str(random.choice(list(arrays)))
    match random.integers(4):
        case 0:
            del arrays[name]
        case 1:
            arrays[name] = arrays[name].astype("float64")
        case 2:
            arrays[name].flat[0] = random.choice([np.nan, np.inf, -np.inf])
        case _:
            arrays[str(random.choice(EVIL))] = arrays.pop(name)
    records = start()
    records["arrays"] = border.pack_arrays(arrays)
    return records


@HOW_MANY
def test_changed_starts_are_refused_or_of_what_was_agreed_on(count):
    makers: dict[str, Callable[[np.random.Generator], RecordDict]] = {
        "words": of_words, "arrays": of_arrays, "bytes": lambda random: through(start(), random),
    }  # fmt: skip
    random, refused = np.random.default_rng(23), dict.fromkeys(makers, 0)
    read_start(CONFIG, start(), COMMON)
    for i in range(count // 4):
        kind = list(makers)[i % 3]
        try:
            records, why = attempt(makers[kind], random)
        except (TypeError, ValueError):  # no record holds that
            continue
        found, why = (None, why) if why else attempt(read_start, CONFIG, records, COMMON)
        if why is not None:
            refused[kind] += 1
            assert "\n" not in why
            assert len(why) < 2500
            continue
        arrays, manifest, _ = found
        assert (manifest.method, manifest.base, manifest.tokenizer) == ("fednl", "b" * 64, "t" * 64)
        assert arrays.keys() == {**manifest.arrays, **manifest.kept}.keys()
        assert all(np.isfinite(array).all() for array in arrays.values())
        assert not any(".." in name or name.startswith("/") for name in arrays)
    assert refused["arrays"] > count / 14
    assert min(refused.values()) > count / 40
