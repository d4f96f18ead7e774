"""A client that was forgotten: not a bit of it is left, and it may come again if it wants to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from fedloom.clients.bridge import serve
from fedloom.clients.faast import FAASTClient
from fedloom.clients.keys import key_bench
from fedloom.disk import held
from fedloom.rules.exact import steps
from fedloom.rules.fixed_point import encode
from fedloom.rules.membership import membership_auc
from fedloom.rules.statistics import CROSS, GRAM, Gram
from fedloom.simulations.cli import main
from fedloom.strategies.shelf import SumsShelf
from fedloom.wire import arrays_digest

from comings import events, run_with, summed_rows, there
from fast import off, weights_of


def small(digits, **changes):
    kept = {"clients__count": 4, "data__split": "iid", "data__max_train": 60, "data__max_test": 20}
    kept |= {"faast__alphas": "0.6", "faast__keep_sums": True, "sampling__wait_seconds": 0.0}
    return digits(**{**kept, "sampling__reply_seconds": 0.5, **changes})


def forget(config, client: int, revision: int = 1, *more: str) -> dict:
    folder = Path(config.output) / config.name
    asked = ["faast", "forget", str(folder), f"--client={client}", f"--revision={revision}", *more]
    with pytest.raises(SystemExit) as ended:
        main(asked)
    assert not ended.value.code
    return json.loads((folder / "forgotten.jsonl").read_text().splitlines()[-1])


def digest(config) -> str:
    return (Path(config.output) / config.name / "adapter/digest.txt").read_text().strip()


def total_of(config) -> dict[str, np.ndarray]:
    return load_file(Path(config.output) / config.name / "sums/total.safetensors")


@pytest.mark.parametrize("bits", [40, pytest.param(24, marks=pytest.mark.slow)])
def test_exact_sums_after_a_client_are_those_of_a_run_without_it(digits, bits):
    config = small(digits, faast__exact_bits=bits, name="with")
    run_with(config, [there(0, 1, 2, 3)])
    never = config.replaced(name="without")
    run_with(never, [there(0, 1, 3)])
    assert digest(config) != digest(never)
    certificate = forget(config, 2)
    assert digest(config) == digest(never) == certificate["weights-after"]
    assert certificate["same-bits"] is True
    assert (weights_of(config) == weights_of(never)).all()
    ours, theirs = total_of(config), total_of(never)
    assert arrays_digest(ours) == arrays_digest(theirs)
    wanted = 0  # 64-bit whole numbers, added as such
    for p in (0, 1, 3):
        keys, labels = summed_rows(config, p)
        sums = Gram.of(keys, np.eye(10)[labels]).arrays()
        wanted = wanted + np.concatenate([encode(sums[n].ravel(), bits) for n in (GRAM, CROSS)])
    parts = [steps(ours[f"sum/{n}"], ours[f"residue/{n}"], bits).ravel() for n in (GRAM, CROSS)]
    assert (np.concatenate(parts) == wanted.view(np.int64)).all()


def test_exact_sums_lose_what_rounding_takes_and_no_more(digits):
    plain = small(digits, name="plain")
    exact = small(digits, faast__exact_bits=40, name="exact")
    for config in (plain, exact):
        run_with(config, [there(0, 1, 2, 3)])
    assert 0 < off(weights_of(exact), weights_of(plain)) < 1e-9
    reply = [event["reply-bytes"] for c in (plain, exact) for event in events(c, "shares")]
    assert reply[0] == reply[1]


def test_sums_that_were_not_rounded_are_named_and_left_out(digits):
    class Coarse(FAASTClient):
        def fit(self, parameters, config):
            arrays, count, metrics = super().fit(parameters, config)
            if self.partition_id == 1:
                arrays[0] = arrays[0] + 2.0**-43
            return arrays, count, metrics

    app = ClientApp()
    serve(app, Coarse, action="faast")
    config = small(digits, faast__exact_bits=40)
    run_with(config, [there(0, 1, 2, 3)], app)
    (failed,) = events(config, "client-failed")
    assert failed["partition"] == 1
    assert "has numbers between multiples of 2^-40" in failed["reason"]
    assert events(config, "round")[0]["summed-clients"] == 3


class Replaying(FAASTClient):
    """Node 1 says revision 2 at the roll call and sends what it had sent before."""

    def fit(self, parameters, config):
        arrays, count, metrics = super().fit(parameters, config)
        return arrays, count, {**metrics, "revision": 1}


@pytest.mark.parametrize("bits", [pytest.param(0, marks=pytest.mark.slow), 40])
def test_who_was_forgotten_may_come_again_with_a_higher_revision(digits, bits):
    config = small(digits, faast__exact_bits=bits, rounds=1)
    everybody, again = there(0, 1, 2, 3), there(0, 1, 2, 3, p1={"revision": 2})
    run_with(config, [everybody])
    before = weights_of(config)
    forget(config, 1)
    without, left = weights_of(config), digest(config)
    # The run goes on, and nobody asks the forgotten for what it has taken back.
    config = config.replaced(resume=True, rounds=2)
    grid = run_with(config, [everybody])
    assert grid.asked("train.faast") == []
    assert events(config, "roll-call")[-1]["revised"] == {}
    assert digest(config) == left
    app = ClientApp()
    serve(app, Replaying, action="faast")
    config = config.replaced(rounds=3)
    grid = run_with(config, [again], app)
    assert grid.asked("train.faast") == [(3, 1)]
    reason = events(config, "client-failed")[-1]["reason"]
    assert "revision 1 came, revision 1 was deleted; it may join again" in reason
    assert (weights_of(config) == without).all()
    config = config.replaced(rounds=4)
    grid = run_with(config, [again])
    assert grid.asked("train.faast") == [(4, 1)]
    assert events(config, "roll-call")[-1]["revised"] == {"1": 2}
    assert off(weights_of(config), before) <= (0 if bits else 1e-12)
    kept, _ = SumsShelf(Path(config.output) / config.name / "sums").restore()
    assert (kept[1].revision, kept.gone) == (2, {1: 1})
    assert forget(config, 1, 2)["clients-left"] == 3  # and leave again
    assert off(weights_of(config), without) <= (0 if bits else 1e-12)


def test_validation_rows_of_a_forgotten_client_choose_no_filter(digits):
    config = small(digits, faast__alphas="0.4,0.8", rounds=1, clients__count=4)
    run_with(config, [there(0, 1, 2)])
    forget(config, 1)
    config = config.replaced(resume=True, rounds=2)
    run_with(config, [there(0, 1, 2), there(0, 1, 2, 3)])
    held_out = config.faast.held_out(60)
    assert [e["rows"] for e in events(config, "choice")] == [3 * held_out, 3 * held_out]


def test_rows_of_a_forgotten_client_are_told_from_unseen_ones_as_if_never_seen(digits, capsys):
    """Keys wide enough to fit the rows: an attack on the loss finds them, and then does not."""
    config = small(digits, faast__encoder="relu:256:pixels", faast__alphas="1.0", data__max_test=60)
    run_with(config, [there(0, 1, 2, 3)])
    never = config.replaced(name="without")
    run_with(never, [there(0, 1, 3)])
    scored = forget(config, 2, 1, "--membership")["membership"]
    assert (scored["rows"], scored["unseen"]) == (60, 60)
    assert scored["before"] > 0.9
    assert scored["after"] == scored["retrained"]
    assert abs(scored["after"] - 0.5) < 0.12  # two standard errors of so few rows
    bench = key_bench(config)
    sides = [bench.side(2, side) for side in ("summed", "test")]
    pairs = [(s.unit(), s.labels) for s in sides]
    assert scored["after"] == membership_auc(weights_of(never), *pairs)
    assert f"before {scored['before']:.3f}, after {scored['after']:.3f}" in capsys.readouterr().out
    folder = Path(config.output) / config.name
    other = (folder / "config.toml").read_text().replace("relu:256:pixels", "relu:128:pixels")
    (folder / "config.toml").write_text(other)
    with pytest.raises(SystemExit):
        main(["faast", "forget", str(folder), "--client=0", "--revision=1", "--membership"])
    assert "this machine makes other keys than client 0 did" in capsys.readouterr().err
    assert weights_of(config).shape == (256, 10)


def test_nothing_is_forgotten_behind_a_run_that_is_at_work(digits, capsys):
    """It would write the client back with its next round."""
    config = small(digits)
    run_with(config, [there(0, 1, 2, 3)])
    before = digest(config)
    folder = Path(config.output) / config.name
    with held(folder / "run.lock"), pytest.raises(SystemExit) as ended:
        main(["faast", "forget", str(folder), "--client=1", "--revision=1"])
    assert ended.value.code == 2
    assert "another process is at work on this run" in capsys.readouterr().err
    assert digest(config) == before
