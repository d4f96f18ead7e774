"""Every baseline is what its name says, on the real apps: three rounds of two clients each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from flwr.common.serde import recorddict_to_proto
from safetensors.numpy import load_file

from fedloom import border
from fedloom.clients.workbench import release
from fedloom.config import BASELINES, RunConfig
from fedloom.errors import Refusal

from runs import METRICS_THAT_MAY_LEAVE, equal, recorded, rows

ROUNDS = 3
COLUMNS = [name for name in BASELINES if name != "fed-mamba"]  # which needs another model
PERSONAL = ("local", "fedavg-ft", "ditto", "fedala")


@dataclass
class Run:
    """What one run left and sent."""

    folder: Path
    grid: object
    state: Path
    metrics: list[dict] = field(default_factory=list)

    def adapter(self) -> dict[str, np.ndarray]:
        file = self.folder / "adapter" / "adapter_model.safetensors"
        return load_file(file) if file.exists() else {}

    def kept(self, purpose: str, server_round: int) -> dict[int, dict[str, np.ndarray]]:
        """By partition, what the clients kept."""
        found = sorted(self.state.glob(f"*/*/{purpose}-{server_round:06d}.safetensors"))
        return {int(path.parent.name): load_file(path) for path in found}

    def scores(self, phase: str) -> dict[tuple[int, int], tuple[float, float]]:
        return {
            (r["round"], r["partition"]): (r["gold-ce-sum"], r["letter-ce-sum"])
            for r in self.metrics
            if r["phase"] == phase
        }

    def of_round(self, phase: str, server_round: int) -> list[dict]:
        return [r for r in self.metrics if (r["phase"], r["round"]) == (phase, server_round)]


def build(questions: Path, output: Path, **changes) -> RunConfig:
    small = {
        "model__source": "tiny:llama",
        "data__source": f"path:{questions}",
        "data__max_train": 8,
        "data__max_test": 2,
        "data__min_train": 4,
        "data__min_test": 2,
        "output": str(output),
        "rounds": ROUNDS,
        "evaluation__every": ROUNDS,
        "clients__count": 2,
        "train__max_steps": 2,
        "train__learning_rate": 5e-3,
        "local__ala_passes": 3,
        "memory__chunk": 16,
    }
    return RunConfig().replaced(**{**small, **changes})


@pytest.fixture(scope="module")
def run(questions, tmp_path_factory):
    """Return ``run(name, **changes)``, which runs a baseline once in this module."""
    done: dict[str, Run] = {}

    def once(name: str, baseline: str | None = None, **changes) -> Run:
        if name not in done:
            place = tmp_path_factory.mktemp("baselines")
            baseline = name if baseline is None else baseline
            config = build(questions, place, name=name, baseline=baseline, **changes)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FEDLOOM_STATE", str(place / "clients"))
                grid = recorded(config)
            release()
            made = Run(place / name, grid, place / "clients")
            made.metrics = rows(made.folder, "metrics")
            done[name] = made
        return done[name]

    return once


def sent(run: Run, server_round: int, kind: str = "train") -> dict[str, np.ndarray]:
    """Return the arrays that a round's clients were sent."""
    for message in run.grid.sent:
        told = border.config_of(message.content)
        if message.metadata.message_type.startswith(kind) and told.get("round") == server_round:
            return border.unpack_arrays(message.content.array_records["arrays"])
    raise AssertionError(f"no {kind} message in round {server_round}")


def train_replies(run: Run, server_round: int) -> dict[int, dict[str, np.ndarray]]:
    """Return what a round's clients answered, by partition."""
    found = {}
    for message, reply in zip(run.grid.sent, run.grid.answered, strict=True):
        told = border.config_of(message.content)
        if message.metadata.message_type.startswith("train") and told["round"] == server_round:
            partition = message.metadata.dst_node_id - 1000
            found[partition] = border.unpack_arrays(reply.content.array_records["arrays"])
    return found


def theta(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: a for n, a in arrays.items() if not n.startswith("control/")}


def array_bytes(run: Run, phase: str) -> set[int]:
    ledger = rows(run.folder, "ledger")
    return {r["bytes"] for r in ledger if r["phase"] == phase and r["dtype"] == "float32"}


def test_no_two_baselines_end_alike_except_where_they_must(run):
    """FedAvg's global adapter is also Ditto's and fedavg-ft's; what is personal differs by all."""
    averaged = {name: run(name).adapter() for name in COLUMNS if name not in ("frozen", "local")}
    for one, other in itertools.combinations(averaged, 2):
        must = {one, other} <= {"fedavg", "fedavg-ft", "ditto"}
        assert equal(averaged[one], averaged[other]) == must, (one, other)
    personal = {name: run(name).scores("personal") for name in PERSONAL}
    for name, scores in personal.items():
        assert set(scores) == {(ROUNDS, 0), (ROUNDS, 1)}, name
        if name != "local":
            assert scores != run(name).scores("evaluate"), name
    for one, other in itertools.combinations(personal, 2):
        assert personal[one] != personal[other], (one, other)
    for name in averaged.keys() - {*PERSONAL, "fedsa-lora"}:  # its B is each client's own
        assert not run(name).scores("personal"), name


def test_what_leaves_a_node_is_arrays_of_the_manifest_and_listed_numbers(run):
    for name in COLUMNS:
        for message in run(name).grid.answered:
            for record in message.content.metric_records.values():
                told = {k.removeprefix("local-").removeprefix("personal-") for k in record}
                assert told <= METRICS_THAT_MAY_LEAVE, name
            if message.metadata.message_type.startswith(("train", "evaluate")):
                assert not message.content.config_records, name


def test_frozen_trains_nobody_and_scores_the_bare_model(run):
    frozen = run("frozen")
    assert not frozen.of_round("train", 1)
    assert not any(m.metadata.message_type.startswith("train") for m in frozen.grid.sent)
    bare, scored = frozen.scores("frozen"), frozen.scores("evaluate")
    for partition in (0, 1):
        # the shut gate adds zero times something; LoRA adds exact zeros
        assert scored[ROUNDS, partition] == pytest.approx(bare[0, partition], rel=1e-6)
    assert rows(frozen.folder, "events")[-1]["status"] == "completed"


def test_local_sends_no_array_and_is_what_a_lone_client_learns(run):
    """Each client's adapter is its own from round to round: client 0 is one-client FedAvg."""
    alone, lone = run("local"), run("one", baseline="fedavg", clients__count=1)
    assert not [r for r in rows(alone.folder, "ledger") if r["dtype"] == "float32"]
    assert not alone.adapter()
    kept = alone.kept("adapter", ROUNDS)
    assert kept.keys() == {0, 1}
    assert equal(kept[0], lone.adapter())
    assert not equal(kept[0], kept[1])
    assert alone.scores("personal") == alone.scores("evaluate")
    assert alone.scores("personal")[ROUNDS, 0] == lone.scores("evaluate")[ROUNDS, 0]


def test_pooled_is_one_client_with_all_rows_and_all_steps(run):
    pooled, average = run("pooled"), run("fedavg")
    for server_round in range(1, ROUNDS + 1):
        (row,) = pooled.of_round("train", server_round)
        each = average.of_round("train", server_round)
        assert row["steps"] == sum(r["steps"] for r in each) == 4
        assert row["num-examples"] == sum(r["num-examples"] for r in each)
    assert pooled.scores("evaluate").keys() == average.scores("evaluate").keys()
    epochs = {"clients__count": 1, "train__max_steps": 0, "train__batch_size": 3, "rounds": 2}
    one = run("one-pooled", baseline="pooled", evaluation__every=2, **epochs)
    central = run("one-central", baseline="fedavg", evaluation__every=2, **epochs)
    assert equal(one.adapter(), central.adapter())


def test_scaffold_is_fedavg_until_the_controls_know_something(run):
    scaffold, average = run("scaffold"), run("fedavg")
    assert equal(theta(sent(scaffold, 2)), sent(average, 2))
    assert not equal(theta(sent(scaffold, 3)), sent(average, 3))
    assert not any(c.any() for n, c in sent(scaffold, 1).items() if n.startswith("control/"))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_scaffolds_control_is_the_mean_over_all_clients_drawn_or_not(run, fraction):
    """``c`` is the mean of the clients' controls, which start at zero and move by what was sent."""
    name = f"scaffold-{fraction}"
    made = run(name, baseline="scaffold", sampling__fraction=fraction)
    own: dict[int, dict[str, np.ndarray]] = {0: {}, 1: {}}
    for server_round in range(1, ROUNDS):
        replies = train_replies(made, server_round)
        assert len(replies) == 2 * fraction
        for partition, arrays in replies.items():
            for n, move in arrays.items():
                if n.startswith("control/"):
                    own[partition][n] = own[partition].get(n, 0.0) + move.astype(float)
        common = {n: a for n, a in sent(made, server_round + 1).items() if n.startswith("control/")}
        for n, array in common.items():
            wanted = (own[0].get(n, 0.0) + own[1].get(n, 0.0)) / 2
            # c is rounded to float32 once a round
            np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-7, err_msg=n)
        assert any(array.any() for array in common.values())
        for partition, kept in made.kept("control", server_round).items():
            if server_round == ROUNDS - 1:  # older ones are gone
                for n, array in kept.items():
                    np.testing.assert_allclose(array, own[partition]["control/" + n], atol=1e-7)


def test_scaffold_pays_twice_and_the_ledger_says_so(run):
    (scaffold,), (average,) = (
        array_bytes(run("scaffold"), "train"),
        array_bytes(run("fedavg"), "train"),
    )
    assert scaffold == 2 * average
    assert array_bytes(run("scaffold"), "evaluate") == {average}  # scores need no control
    assert all(".lora_" in n and "control" not in n for n in run("scaffold").adapter())
    message = next(
        m for m in run("scaffold").grid.answered if m.content.array_records.get("arrays")
    )
    assert len(recorddict_to_proto(message.content).SerializeToString()) > scaffold


def test_dittos_personal_adapters_are_neither_global_nor_each_others(run):
    kept = run("ditto").kept("personal", ROUNDS)
    assert kept.keys() == {0, 1}
    assert not equal(kept[0], kept[1])
    assert not any(equal(own, run("ditto").adapter()) for own in kept.values())
    assert equal(run("ditto").adapter(), run("fedavg").adapter())


def test_fedala_mixes_the_top_layer_from_round_two_on(run):
    ala, average = run("fedala"), run("fedavg")
    assert equal(sent(ala, 2), sent(average, 2))
    assert not equal(sent(ala, 3), sent(average, 3))
    assert [{r["ala-passes"] for r in ala.of_round("train", n)} for n in (1, 2, 3)] == [
        {0}, {3}, {1},
    ]  # fmt: skip
    assert not ala.kept("ala", 1)
    for server_round in (2, 3):
        weights = ala.kept("ala", server_round)
        assert weights.keys() == {0, 1}
        for own in weights.values():
            assert own
            assert all("layers.1." in name for name in own)  # of layers 0 and 1
            flat = np.concatenate([w.ravel() for w in own.values()])
            assert 0 <= flat.min() < flat.max() <= 1
    assert not equal(*ala.kept("ala", 3).values())


def test_fedssis_importance_is_not_zero_and_changes_the_result(run):
    ssi, average = run("fedssi"), run("fedavg")
    assert equal(sent(ssi, 2), sent(average, 2))  # nothing is known in round 1
    assert not equal(sent(ssi, 3), sent(average, 3))
    assert all(r["omega-norm"] == 0 < r["omega-next"] for r in ssi.of_round("train", 1))
    for server_round in (2, 3):
        trained = ssi.of_round("train", server_round)
        assert trained
        assert all(0 < r["omega-norm"] < r["omega-next"] for r in trained)


@pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
def test_server_optimisers_step_as_a_plain_loop_does(run, name):
    """From the replies as they were sent: the recurrences, array by array."""
    made = run(name)
    now = {n: a.astype(np.float64) for n, a in sent(made, 1).items()}
    m = {n: np.zeros_like(a) for n, a in now.items()}
    v = {n: np.full_like(a, 1e-6) for n, a in now.items()}
    for server_round in range(1, ROUNDS + 1):
        replies = train_replies(made, server_round)
        held = {r["partition"]: r["num-examples"] for r in made.of_round("train", server_round)}
        weights = np.array([held[p] for p in replies], float)
        arrays = list(replies.values())
        for n in now:
            mean = sum(w * a[n].astype(float) for w, a in zip(weights, arrays, strict=True))
            step = (mean / weights.sum()).astype(np.float32) - now[n]
            if name == "fedavgm":
                m[n] = 0.9 * m[n] + step
                now[n] = now[n] + m[n]
            else:
                m[n] = 0.9 * m[n] + 0.1 * step
                v[n] = 0.99 * v[n] + 0.01 * step**2
                now[n] = now[n] + 0.01 * m[n] / (np.sqrt(v[n]) + 1e-3)
    for n, array in made.adapter().items():
        np.testing.assert_allclose(array, now[n], rtol=0, atol=1e-6, err_msg=n)  # float32 a round


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"baseline": "fedporx"}, "did you mean fedprox?"),
        ({"local.method": "dito"}, "did you mean ditto?"),
        ({"local.ssi-lambda": 0.0}, "above 0"),
        ({"local.ala-share": 1.5}, "at most 1"),
        ({"local.method": "ditto", "server.rule": "mean", "share": "memory"}, "the whole adapter"),
        ({"local.method": "scaffold", "server.rule": "svd"}, 'server.rule = "mean"'),
        ({"server.optimizer": "adam", "server.rule": "svd"}, "mean nothing"),
        ({"server.learning-rate": 0.0}, "positive"),
        ({"baseline": "fedavg", "lora.frozen": True}, "nothing would be trained"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_a_model_loads(values, expected):
    with pytest.raises(Refusal, match=expected) as caught:
        RunConfig.from_flat(values)
    assert "\n" not in str(caught.value)
