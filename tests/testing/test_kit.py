"""The test kit passes what is right, and each law catches a strategy that is wrong in its way."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

import numpy as np
import pytest
from flwr.serverapp.exception import AggregationError

from fedloom import border, rules
from fedloom.errors import Refusal
from fedloom.strategies import AdapterStrategy, FedNL
from fedloom.strategies.faast import FAAST
from fedloom.testing import LAWS, LawBroken, check_strategy, laws
from fedloom.wire import Update

MEAN = {"server.rule": "mean"}
OF_STACKS = ("grouping-free", "streaming", "one-client", "consensus")


@pytest.mark.parametrize("law", laws(FedNL, MEAN), ids=str)
def test_the_mean_of_factors_keeps_every_law(law):
    law()


@pytest.mark.parametrize(
    ("strategy", "config", "without"),
    [
        (FAAST, {"method": "faast"}, ("grouping-free", "one-client")),
        (FedNL, {"server.rule": "rolora"}, ("grouping-free",)),
        (FedNL, {"server.rule": "flora"}, OF_STACKS),
        (FedNL, {"server.rule": "svd", "lora.ranks": "4,1,2,3,4"}, (*OF_STACKS, "drop-outs")),
    ],
    ids=["faast", "rolora", "flora", "svd of many ranks"],
)
def test_ours_keep_what_they_promise(strategy, config, without):
    only = None if strategy is FAAST else ("order-free", "listing", "sent-untouched", "finite")
    if "lora.ranks" in config:  # as many clients as it names ranks
        config, only = {**config, "clients.count": 5}, ("order-free", "listing")
    report = check_strategy(strategy, config, without=without, only=only)
    assert report.ok, str(report)
    assert sum(verdict.promised for verdict in report.verdicts) >= 2


class Plain(AdapterStrategy):
    """A strategy of ten lines: every mutant is one step away from it."""

    def fold(self, updates, sent):
        return rules.mean(updates, sent)


def test_a_strategy_of_three_lines_keeps_its_laws():
    report = check_strategy(Plain, only=LAWS.keys() - {"streaming"})  # the mean's own law above
    assert report.ok, str(report)
    assert len(report.verdicts) == len(LAWS) - 1


class LastWins(Plain):
    def fold(self, updates, sent):
        made = dict(sent)
        for update in updates:
            made = {n: ((made[n] + a) / 2).astype(made[n].dtype) for n, a in update.mean().items()}
        return made


class OneVoteEach(Plain):
    def fold(self, updates, sent):
        return rules.mean((Update.of(u.mean(), 1.0) for u in updates), sent)


class Hoarder(Plain):
    def fold(self, updates, sent):
        return rules.mean(list(updates), sent)


class HalfAStep(Plain):
    def fold(self, updates, sent):
        made = super().fold(updates, sent)
        return {n: ((a + sent[n]) / 2).astype(a.dtype) for n, a in made.items()}


class Heavier(Plain):
    """Sums where it should average."""

    def fold(self, updates, sent):
        whole = rules.total(updates).whole()
        return {n: whole[n].astype(a.dtype) for n, a in sent.items()}


class BySpread(Plain):
    def fold(self, updates, sent):
        made = [update.mean() for update in updates]
        with np.errstate(all="ignore"):
            return {
                n: np.asarray(np.mean(x := [m[n] for m in made], 0) / np.std(x, 0), a.dtype)
                for n, a in sent.items()
            }


class InDoubles(Plain):
    def fold(self, updates, sent):
        return dict(rules.total(updates).mean())


class InPlace(Plain):
    def fold(self, updates, sent):
        made = super().fold(updates, sent)
        for name, array in made.items():
            sent[name][...] = array
        return made


class Noisy(Plain):
    def fold(self, updates, sent):
        random = np.random.default_rng()
        made = super().fold(updates, sent)
        return {n: (a + random.normal(size=a.shape)).astype(a.dtype) for n, a in made.items()}


class Unweighted(Plain):
    """Takes a reply of no examples for one."""

    def aggregate_train(self, server_round, replies):
        updates = [
            Update.of(border.arrays_of(r.content), border.metrics_of(r.content)["num-examples"] + 1)
            for r in replies
        ]
        return border.pack_arrays(rules.mean(updates, self._sent)), None


class AllOrNothing(Plain):
    def fold(self, updates, sent):
        listed = list(updates)
        if len(listed) < len(self.roster.nodes):
            raise AggregationError("somebody is missing")
        return rules.mean(listed, sent)


class ByNode(Plain):
    """Draws node ids, which are others in each run."""

    def configure_train(self, server_round, arrays, config, grid):
        self._grid, self._sent = grid, border.unpack_arrays(arrays)
        first = sorted(self.roster.nodes.values())[:2]
        chosen = [p for p, node in self.roster.nodes.items() if node in first]
        told = self.train_config(server_round)
        return self._messages("train", "train", server_round, chosen, arrays, told)


_calls = count()


class ByChance(ByNode):
    def configure_train(self, server_round, arrays, config, grid):
        self.config = self.config.replaced(seed=next(_calls))
        return Plain.configure_train(self, server_round, arrays, config, grid)


MUTANTS = [
    ("order-free", LastWins),
    ("repeatable", Noisy),
    ("grouping-free", OneVoteEach),
    ("streaming", Hoarder),
    ("one-client", HalfAStep),
    ("consensus", Heavier),
    ("finite", BySpread),
    ("listing", InDoubles),
    ("sent-untouched", InPlace),
    ("zero-weight", Unweighted),
    ("drop-outs", AllOrNothing),
    ("same-nodes", ByNode),
    ("same-nodes", ByChance),
]


@pytest.mark.parametrize(("law", "mutant"), MUTANTS, ids=lambda x: getattr(x, "__name__", x))
def test_each_law_catches_its_mutant(law, mutant):
    (found,) = (each for each in laws(mutant) if each.name == law)
    with pytest.raises(LawBroken) as broken:
        found()
    assert "\n" not in str(broken.value)


def test_every_law_has_a_mutant_and_a_mutant_breaks_little_else():
    assert {law for law, _ in MUTANTS} == LAWS.keys()
    cheap = ("order-free", "grouping-free", "listing", "one-client", "same-nodes", "repeatable")
    report = check_strategy(OneVoteEach, only=cheap)
    assert report.broken.keys() == {"grouping-free"}
    assert "BROKEN        grouping-free" in str(report)
    assert check_strategy(HalfAStep, only=cheap).broken.keys() == {"one-client"}


def test_what_is_not_promised_is_said_and_not_looked_at():
    report = check_strategy(
        OneVoteEach, without=["grouping-free"], only=("grouping-free", "finite")
    )
    assert report.ok
    assert "not promised  grouping-free" in str(report)
    with pytest.raises(Refusal, match="did you mean streaming"):
        laws(Plain, without=["streeming"])


def test_the_kit_needs_no_torch():
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'peft', 'ray')));"
        "from fedloom.testing import check_strategy; from fedloom.strategies import FedNL;"
        "assert check_strategy(FedNL, {'server.rule': 'mean'}, only=('order-free',)).ok"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
