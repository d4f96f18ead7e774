"""Thousands of updates, manifests and files that were changed at random: refused, or still true.

No exception but ``Refusal`` may come out, nothing may be let in that breaks a law, nothing is
unpickled and no file appears anywhere.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from google.protobuf.message import DecodeError
from mutations import EVIL, HOW_MANY, attempt, flipped

from fedloom import border, states
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.local.home import Home
from fedloom.rules.revisions import Contributions
from fedloom.strategies.checkpoint import Checkpoint, State
from fedloom.strategies.fednl import FedNL
from fedloom.strategies.roster import Roster
from fedloom.strategies.shelf import Choice, SumsShelf
from fedloom.wire import Manifest, Update, arrays_digest, ticket

ROWS, RUN = 40, "ab" * 16
ARRAYS = {
    "layer.q.lora_A.weight": np.arange(12, dtype=np.float32).reshape(2, 6),
    "layer.q.lora_B.weight": np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2),
    "layer.memory.gate": np.full(70, 0.25, np.float32),
}
MANIFEST = Manifest.of(ARRAYS, method="fednl", version="1", base="b" * 64, tokenizer="t" * 64)


class Ran:
    """What unpickling would run."""

    def __reduce__(self):
        return (Path("unpickled").touch, ())


@pytest.fixture(autouse=True)
def _watched(tmp_path, monkeypatch):
    """Work where nothing is; look afterwards whether anything is. Unpickling fails the test."""
    room = tmp_path / "a" / "room"
    room.mkdir(parents=True)
    monkeypatch.chdir(room)
    monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path / "state"))

    def unpickle(*args, **named):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, unpickle)
    yield
    assert [path for path in (tmp_path / "a").rglob("*") if path != room] == []


# ---- updates -----------------------------------------------------------------------------------


def strategy(code: str) -> FedNL:
    flat = {"lora.rank": 2, "server.rule": "mean", "wire.dtype": code, "gate.norm": 1e6}
    roster = Roster({0: 1000, 1: 1001}, {p: {"train": ROWS, "name": "c"} for p in (0, 1)})
    made = FedNL(RunConfig.from_flat(flat), MANIFEST, roster, run_token=RUN)
    made._sent = dict(ARRAYS)
    return made


def good_ticket() -> int:
    return ticket(RUN, 3, MANIFEST.digest(), "train", 0)


def reply(arrays: ArrayRecord, **metrics) -> RecordDict:
    told = {"num-examples": 12, "loss": 1.5, border.TICKET: good_ticket(), **metrics}
    return RecordDict({"arrays": arrays, "metrics": MetricRecord(told)})


def change_record(records: RecordDict, random: np.random.Generator) -> RecordDict:
    """Change one stored array: its bytes, or what is said of them."""
    record = records.array_records["arrays"]
    name = str(random.choice(list(record)))
    array, odd = record[name], lambda *words: words[random.integers(len(words))]
    dtype, shape, stype, data = array.dtype, array.shape, array.stype, array.data
    match random.integers(5):
        case 0:
            dtype = odd("float16", "object", "|O", "bfloat16", "float32,float32", "", "(2,", "i8")
        case 1:
            shape = odd((), (-1,), (2**31 - 1,), (2**31 - 1,) * 3, (0,), (1,) * 40)
        case 2:
            stype = odd("numpy.ndarray", "torch.tensor", "", "loom.data", "loom.list")
        case _:
            data = flipped(data, random)
    record[name] = Array(dtype, shape, stype, data)
    return records


def change_names(records: RecordDict, random: np.random.Generator) -> RecordDict:
    """Rename, add, drop, reshape or retype whole arrays, and pack them well."""
    arrays = border.arrays_of(records)
    name = str(random.choice(list(arrays)))
    match random.integers(6):
        case 0:
            arrays[str(random.choice(EVIL))] = arrays.pop(name)
        case 1:
            arrays[str(random.choice(EVIL))] = np.zeros(3, np.float32)
        case 2:
            del arrays[name]
        case 3:
            arrays[name] = arrays[name].reshape(1, -1)
        case 4:
            arrays[name] = arrays[name].astype(random.choice(["float64", "int64", "float16"]))
        case _:
            arrays[name] = arrays[name].copy()
            arrays[name].flat[0] = random.choice([np.nan, np.inf, -np.inf, 3e38, -3e38])
    pack = border.pack_parcel if random.integers(2) else border.pack_arrays
    return reply(pack(arrays))


def change_metrics(records: RecordDict, random: np.random.Generator) -> RecordDict:
    """Say other numbers, or none."""
    metrics = records.metric_records["metrics"]
    name = str(random.choice(list(metrics)))
    odd = (0, -1, ROWS + 1, 0.5, 1e300, 2**62, float("nan"), float("inf"), [1], [0.1, 0.2])
    wrong = (ticket(RUN, 2, MANIFEST.digest(), "train", 0), good_ticket() + 1)
    if random.integers(5) == 0:
        del metrics[name]
    elif name == border.TICKET:
        metrics[name] = wrong[random.integers(2)]
    else:
        metrics[name] = odd[random.integers(len(odd))]
    return records


def change_headers(records: RecordDict, random: np.random.Generator) -> RecordDict:
    """Send arrays one by one, one of them with npy bytes that were changed or are a pickle."""
    record = border.pack_arrays(border.arrays_of(records))
    name = str(random.choice(list(record)))
    data = flipped(record[name].data, random)
    if random.integers(8) == 0:
        stream = io.BytesIO()
        np.save(stream, np.array([Ran()], dtype=object), allow_pickle=True)
        data = stream.getvalue()
    record[name] = Array(record[name].dtype, record[name].shape, record[name].stype, data)
    return reply(record)


def change_bytes(records: RecordDict, random: np.random.Generator) -> RecordDict:
    """Change the serialised message."""
    data = recorddict_to_proto(records).SerializeToString()
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(flipped(data, random)))
    except (DecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refusal("Flower reads no such message") from error


CHANGES = (change_record, change_names, change_metrics, change_headers, change_bytes)


def take(made: FedNL, records: RecordDict) -> Update:
    """Do what the server does with one reply of partition 0 in round 3."""
    made.inbox.expect("train", [0], bound=True)
    border.wire_bytes(records)
    made.inbox._check(3, 0, records)
    update = made.read_update(3, 0, records)
    metrics = border.checked_metrics(records, ("loss",))
    made.admit(3, 0, update, metrics)
    return update


@HOW_MANY
@pytest.mark.parametrize("code", ["float32", "int8"])
def test_changed_updates_are_refused_or_keep_every_law(code, count):
    made, random = strategy(code), np.random.default_rng(11)
    seen: Counter[tuple[str, bool]] = Counter()
    assert take(made, reply(border.pack_parcel(ARRAYS, code))).weight == 12
    for _ in range(count // 2):
        change: Callable = CHANGES[random.integers(len(CHANGES))]
        records, said = attempt(change, reply(border.pack_parcel(ARRAYS, code)), random)
        if said is None:
            told = {k: x for record in records.metric_records.values() for k, x in record.items()}
            update, said = attempt(take, made, records)
        if said is not None:
            assert "\n" not in said
            assert len(said) < 2500
            seen[change.__name__, False] += 1
            continue
        seen[change.__name__, True] += 1
        assert {n: a.shape for n, a in update.sums.items()} == {
            n: a.shape for n, a in ARRAYS.items()
        }
        assert all(np.isfinite(a).all() for a in update.mean().values())
        assert 1 <= update.weight <= ROWS
        assert update.weight == int(update.weight)
        assert told[border.TICKET] == good_ticket()
        assert np.isfinite(told["loss"])
    for change in CHANGES:
        assert seen[change.__name__, False] > count / 30
    assert not seen["change_metrics", True] > count / 10  # a smaller loss is no lie to be found
    # Another finite number in an array is not to be found by looking at one reply.
    assert sum(n for (_, taken), n in seen.items() if taken) < count / 5


# ---- manifests ---------------------------------------------------------------------------------


def change_tree(tree: dict, random: np.random.Generator) -> str:
    """Put something else into a manifest, well written."""
    odd = [None, -1, 1.5, [], {}, "x" * 20, 2**70, True, ["a"], {"a": 1}, "../../x", [[1], 7]]
    name = str(random.choice(list(tree["arrays"])))
    entry = tree["arrays"][name]
    match random.integers(7):
        case 0:
            tree[str(random.choice(list(tree)))] = odd[random.integers(len(odd))]
        case 1:
            tree["arrays"][str(random.choice(EVIL))] = entry
        case 2:
            entry[0] = odd[random.integers(len(odd))]
        case 3:
            entry[1] = str(random.choice(["object", "O", "float32,i8", "<U9", "", "void"]))
        case 4:
            entry[0] = [[-1], [2**70], [1.0], [True], [1] * 40, [[1]]][random.integers(6)]
        case 5:
            tree["arrays"][name] = odd[random.integers(len(odd))]
        case _:
            del tree[str(random.choice(list(tree)))]
    return json.dumps(tree)


@HOW_MANY
def test_changed_manifests_are_refused_or_name_arrays_that_can_be(count):
    random, text = np.random.default_rng(12), MANIFEST.to_json()
    refused = 0
    for i in range(count // 4):
        made = (
            change_tree(json.loads(text), random)
            if i % 2
            else flipped(text.encode(), random).decode("utf-8", "replace")
        )
        manifest, said = attempt(Manifest.from_json, made)
        if said is not None:
            refused += 1
            assert len(said) < 500
            continue
        assert manifest.nbytes() >= 0
        assert len(manifest.digest()) == 64
        for name in (*manifest.arrays, *manifest.kept):
            assert ".." not in name
            assert not name.startswith("/")
            assert "\x00" not in name
        if manifest != MANIFEST:
            assert manifest.digest() != MANIFEST.digest()
    assert refused > count / 8


@pytest.mark.parametrize("text", ["[" * 200_000, '{"arrays":' * 50_000, "9" * 10_000])
def test_deep_and_long_manifests_are_refused(text):
    with pytest.raises(Refusal, match="not an adapter manifest"):
        Manifest.from_json(text)


# ---- files -------------------------------------------------------------------------------------


def home(folder: Path) -> tuple[Path, Callable[[], object]]:
    """A client's own state, which its digest protects."""
    place = Home("cd" * 8, 0, "m")
    place.keep("adapter", ARRAYS, 1)
    (file,) = (folder / "state").rglob("adapter-000001.safetensors")

    def load() -> None:
        found = place.find("adapter", 2)
        assert found is not None
        assert arrays_digest(found) == arrays_digest(ARRAYS)

    return file, load


def shelf(folder: Path, name: str) -> tuple[Path, Callable[[], object]]:
    """FAAST's sums and their ledger."""
    kept = SumsShelf(folder / "sums")
    held = Contributions()
    held.add(3, 1, Update.summed({"gram": np.ones(3), "cross": np.zeros((2, 2))}, 5))
    kept.keep(held, Choice(0.5, 0.0, 0.0))
    return folder / "sums" / name, lambda: SumsShelf(folder / "sums").restore()


def state(folder: Path) -> tuple[Path, Callable[[], object]]:
    """A user's memory state."""
    from safetensors.numpy import save_file

    owner = states.Owner("b", "t", "a", "s")
    header = states.Header(owner, 7, "2026-01-01T00:00:00+00:00", "", "0.1.0")
    path = folder / "kept.safetensors"
    save_file({"memory.000.S": np.ones((2, 2), np.float32)}, path, header.to_metadata())
    return path, lambda: states.read_header(path)


def checkpoint(folder: Path) -> tuple[Path, Callable[[], object]]:
    """The coordinator's own, which a run goes on from."""
    parts = {"server-step": State({"m": np.ones(3)}, {"step": 2})}
    about = {"run": RUN, "manifest": MANIFEST.to_json(), "nodes": {}, "journal": {"events": 7}}
    whole = Checkpoint(round=4, arrays=ARRAYS, parts=parts, about=about)
    path = folder / "round-000004.safetensors"
    path.write_bytes(whole.to_bytes())

    def load() -> None:
        found = Checkpoint.read(path)
        assert (found.round, found.about) == (4, about)
        assert arrays_digest(found.arrays) == arrays_digest(ARRAYS)
        assert found.part("server-step").tree == {"step": 2}

    return path, load


FILES = {
    "home": home,
    "checkpoint": checkpoint,
    "shelf total": lambda folder: shelf(folder, "total.safetensors"),
    "shelf ledger": lambda folder: shelf(folder, "ledger.json"),
    "state": state,
}


@HOW_MANY
@pytest.mark.parametrize("kind", FILES)
def test_changed_files_are_refused_or_as_they_were(kind, count, tmp_path):
    path, load = FILES[kind](tmp_path)
    whole, random, refused = path.read_bytes(), np.random.default_rng(13), 0
    load()
    for _ in range(count // 16):
        path.write_bytes(flipped(whole, random))
        _, said = attempt(load)
        if said is not None:
            refused += 1
            assert "\n" not in said
    assert refused > count / 100
