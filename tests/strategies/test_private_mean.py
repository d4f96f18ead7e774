"""FedNL's rounds under masks and with noise: what the server learns, and what it must not."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from flwr.serverapp.exception import AggregationError

from fedloom import border
from fedloom.errors import Refusal
from fedloom.rules import sampled_gaussian
from fedloom.rules.fixed_point import rounding_bound
from fedloom.rules.private import calibrate
from fedloom.rules.releases import joint_norm
from fedloom.strategies.checkpoint import Torn

from private_rounds import Owner, Rounds, change, flat, moved, recipe, rows_of, start
from summations import chi_square, source

WAYS = [
    {"server__rule": "mean"},
    {"server__rule": "mean", "server__momentum": 0.5},
    {"server__rule": "ffa"},
    {"server__rule": "rolora"},
    {"server__rule": "fedsa"},
    {"share": "memory"},
]


def mean_of(partitions, number: int, names) -> dict[str, np.ndarray]:
    weights = {p: rows_of(p) for p in partitions}
    total = sum(weights.values())
    return {n: sum(w * change(p, number)[n] for p, w in weights.items()) / total for n in names}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_the_masked_mean_is_the_plain_one_within_a_step_of_fixed_point(way):
    plain = Rounds(recipe(clients__count=3, **way)).run()
    masked = Rounds(recipe(clients__count=3, **way, privacy__masks=True)).run()
    assert len(masked.states) == len(plain.states) == 3
    weight = sum(map(rows_of, range(3)))
    for number in (1, 2):
        for name, array in plain.states[number].items():
            ours = masked.states[number][name]
            assert ours.dtype == array.dtype
            # The plain reply rounds each client's array to float32 first; ours rounds a change.
            single = 2 * np.abs(array).max() * np.finfo(np.float32).eps
            assert np.abs(ours - array).max() <= rounding_bound(3) / weight + single
    moving = [n for n in start() if np.abs(moved(masked, 1)[n]).max() > 0]
    assert moving == [n for n in start() if np.abs(moved(plain, 1)[n]).max() > 0]
    told = masked.events("round")
    assert [e["mask-error"] for e in told] == [rounding_bound(3) / weight] * 2
    losses = [e["train-loss"] for e in plain.events("round")]
    assert [e["train-loss"] for e in told] == pytest.approx(losses)


def test_few_bits_cost_what_the_round_says():
    """In float64 against the definition: within the bound, and not far below it."""
    run = Rounds(recipe(server__rule="mean", privacy__masks=True, privacy__bits=24)).run()
    bound = run.events("round")[0]["mask-error"]
    sums = run.strategy.private._total.whole()  # the last round's
    wanted = mean_of(range(5), 2, start())
    gap = max(np.abs(sums[n] / run.strategy.private._by - wanted[n]).max() for n in wanted)
    client_rounding = 2e-7  # trained arrays are float32, so changes are off by that
    assert bound / 20 < gap <= bound + client_rounding
    assert bound == rounding_bound(5, 24) / sum(map(rows_of, range(5)))


@pytest.mark.parametrize("clip", [0.0, 100.0])
def test_a_client_lost_after_it_masked_leaves_the_others_mean(clip):
    lose = lambda kind, p, number: (kind, p, number) == ("train.fednl", 3, 1)  # noqa: E731
    config = recipe(server__rule="mean", privacy__masks=True, privacy__clip=clip)
    run = Rounds(config, lose=lose).run()
    left = [0, 1, 2, 4]
    wanted = mean_of(left, 1, start())
    if clip:  # all weigh the same, and who is lost counts as one who learnt nothing
        wanted = {n: sum(change(p, 1)[n] for p in left) / 5 for n in wanted}
    for name, array in moved(run, 1).items():
        np.testing.assert_allclose(array, wanted[name], atol=5e-7)
    first, second = run.events("privacy")
    assert first["lost"] == {"3": "numbers: they did not come"}
    assert second["lost"] == {}
    assert [e["partitions"] for e in run.events("secure-sum")] == [left, [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("query.secure_keys", "3 clients gave keys, at least 4 are needed"),
        ("query.secure_shares", "3 clients handed out shares, at least 4"),
        ("train.fednl", "3 clients sent numbers, at least 4"),
        ("query.secure_unmask", "3 clients revealed shares, at least 4"),
    ],
)
def test_below_the_threshold_the_round_fails_with_a_sentence(kind, says):
    config = recipe(privacy__masks=True)
    with pytest.raises(Refusal, match=says):
        Rounds(config, lose=lambda k, p, _: k == kind and p < 2).run()


@pytest.mark.parametrize("noise", [{}, {"privacy__clip": 1.0, "privacy__noise": 1.0}])
def test_a_recorder_at_the_server_sees_uniform_words_and_no_metric(noise):
    run = Rounds(recipe(privacy__masks=True, **noise)).run()
    extra = set() if noise else {"weight", "loss"}
    words = []
    for number in (1, 2):
        for arrays in run.grid.trained(number).values():
            assert {a.dtype for a in arrays.values()} == {np.dtype(np.uint64)}
            assert arrays.keys() == {n for n in start() if "lora_A" not in n} | extra
            words.append(np.concatenate([a.ravel() for a in arrays.values()]))
    assert len(words) == 10
    for i, one in enumerate(words):
        assert chi_square(one.tobytes()) < 6
        for other in words[:i]:  # of other clients, and of the same one in another round
            assert chi_square((one - other).tobytes()) < 6
    for kind, _, _, reply in run.grid.heard:
        if kind == "train.fednl":
            assert border.metrics_of(reply.content) == {"num-examples": 1}
            assert not reply.content.config_records


def test_the_same_recorder_sees_an_update_without_masks():
    """The check above can fail."""
    run = Rounds(recipe(privacy__clip=100.0)).run()
    sent = run.grid.trained(1)[2]
    for name, array in sent.items():
        np.testing.assert_allclose(array, change(2, 1)[name], atol=1e-6)
    assert chi_square(b"".join(a.tobytes() for a in sent.values())) > 6


def test_keys_are_fresh_in_every_round():
    run = Rounds(recipe(privacy__masks=True, rounds=3)).run()
    keys = [
        border.arrays_of(reply.content)["keys"].tobytes()
        for kind, _, _, reply in run.grid.heard
        if kind == "query.secure_keys"
    ]
    assert len(keys) == len(set(keys)) == 15


@pytest.mark.parametrize("weight", [0.5, -100.0, 10.25])
def test_a_false_weight_under_masks_is_refused(weight):
    class Liar(Owner):
        def send(self, told, begun, trained):
            from fedloom.clients.secure import masked

            moved = {n: weight * (a - begun[n]) for n, a in trained.items()}
            sums = {**moved, "weight": np.array([weight]), "loss": np.array([1.0])}
            return dict(masked(self.context, told, sums))

    with pytest.raises(Refusal, match=r"weights of 5 clients .* sent a false weight"):
        Rounds(recipe(privacy__masks=True), Liar).run()


class Unclipped(Owner):
    """Partition 1 sends ten times what was agreed on."""

    def send(self, told, begun, trained):
        if self.partition == 1:
            self.config = self.config.replaced(privacy__clip=10 * self.config.privacy.clip)
        return super().send(told, begun, trained)


def test_who_did_not_clip_is_named_and_left_out():
    config = recipe(server__rule="mean", privacy__clip=0.5)
    run = Rounds(config, Unclipped).run()
    failed = run.events("client-failed")
    assert {e["partition"] for e in failed} == {1}
    assert "an update of length 5 came, at most privacy.clip = 0.5" in failed[0]["reason"]
    wanted = dict.fromkeys(start(), 0.0)
    for p in (0, 2, 3, 4):
        mine = change(p, 1)
        for n in wanted:  # divided by who was asked: dropping a client tells nothing of its size
            wanted[n] = wanted[n] + mine[n] * 0.5 / joint_norm(mine) / 5
    for name, array in moved(run, 1).items():
        np.testing.assert_allclose(array, wanted[name], atol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_who_did_not_clip_under_masks_spoils_the_sum_and_is_noticed(noise):
    config = recipe(server__rule="mean", privacy__masks=True, privacy__clip=0.5)
    with pytest.raises(Refusal, match=r"the sum of 5 clients .* one of them has not clipped"):
        Rounds(config.replaced(privacy__noise=noise), Unclipped).run()
    assert len(Rounds(config.replaced(privacy__noise=noise)).run().states) == 3  # who did, does not


class Idle(Owner):
    """Has no rows: sends no change."""

    def send(self, told, begun, trained):
        if self.partition == 2:
            trained = {n: begun[n] for n in trained}
        return super().send(told, begun, trained)


def test_noise_has_the_size_that_hides_one_client():
    """One seeded source, with and without a client: the noise is the same, so it can be told."""
    config = recipe(server__rule="mean", privacy__clip=0.5, privacy__noise=2.0, rounds=1)
    quiet = recipe(server__rule="mean", privacy__clip=0.5, rounds=1)
    ours, without = (Rounds(config, o, source(1)).run() for o in (Owner, Idle))
    plain = Rounds(quiet).run()
    noise = flat(moved(ours, 1)) - flat(moved(plain, 1))
    sigma = 2.0 * 0.5 / 5
    # n normal numbers know their deviation to sigma / sqrt(2 n); five times that.
    assert noise.std() == pytest.approx(sigma, abs=5 * sigma / np.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 5 * sigma / np.sqrt(noise.size)
    assert run_sigma(ours) == pytest.approx(sigma)
    apart = np.linalg.norm(flat(moved(ours, 1)) - flat(moved(without, 1)))
    assert apart == pytest.approx(0.5 / 5, rel=1e-4)  # just the clip: the noise was equal
    again = Rounds(config, Owner, source(2)).run()
    assert np.abs(flat(moved(again, 1)) - flat(moved(ours, 1))).max() > sigma


def run_sigma(run: Rounds) -> float:
    return run.events("round")[0]["noise-sigma"]


def test_noise_of_the_clients_together_is_enough_when_a_third_is_lost():
    """Parts are sized for the threshold of 7 among 9; 7 or 9 come."""

    class Seeded(Owner):
        @property
        def source(self):
            return source(self.partition)

    told = {"server__rule": "mean", "clients__count": 9, "rounds": 1, "privacy__masks": True}
    config = recipe(**told, privacy__clip=0.5, privacy__noise=2.0)
    lose = lambda kind, p, _: kind == "train.fednl" and p in (4, 8)  # noqa: E731
    for parties, options in ((9, {}), (7, {"lose": lose})):
        run = Rounds(config, Seeded, **options).run()
        quiet = Rounds(config.replaced(privacy__noise=0.0), Seeded, **options).run()
        noise = flat(moved(run, 1)) - flat(moved(quiet, 1))
        sigma = 2.0 * 0.5 / 9 * np.sqrt(parties / 7)
        assert run.events("privacy")[0]["threshold"] == 7
        assert run_sigma(run) == pytest.approx(sigma)
        assert noise.std() == pytest.approx(sigma, abs=5 * sigma / np.sqrt(2 * noise.size))


@pytest.mark.parametrize("masks", [False, True])
def test_what_was_spent_is_told_in_every_round(masks):
    config = recipe(privacy__masks=masks, privacy__clip=0.5, privacy__epsilon=4.0, rounds=3)
    run = Rounds(config).run()
    spent = [e["epsilon-spent"] for e in run.events("round")]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(4.0, abs=1e-6)
    last = run.events("privacy")[-1]
    assert last["multiplier"] == pytest.approx(calibrate(4.0, 1e-5) * np.sqrt(3))
    assert (last["releases"], last["delta"], last["sampling"]) == (3, 1e-5, "public")
    assert all(e["train-loss"] is None for e in run.events("round"))


def test_who_is_asked_less_often_pays_less_and_nobody_more_than_was_planned():
    config = recipe(privacy__clip=0.5, privacy__epsilon=4.0, rounds=4, sampling__fraction=0.4)
    run = Rounds(config).run()
    releases = run.strategy.private.promise.releases
    asked = [p for n in range(1, 5) for p in run.grid.trained(n)]
    assert max(asked.count(p) for p in range(5)) == releases < 4
    assert run.events("round")[-1]["epsilon-spent"] == pytest.approx(4.0, abs=1e-6)
    run = Rounds(config)
    run.strategy.private._asked.update(dict.fromkeys(range(5), releases))
    with pytest.raises(Refusal, match=r"all who were drawn have been asked in the \d rounds"):
        run.run()


def test_a_run_that_goes_on_has_paid_for_its_first_rounds():
    config = recipe(privacy__clip=0.5, privacy__noise=3.0, rounds=4, sampling__fraction=0.4)
    straight, resumed = Rounds(config).run(), Rounds(config)
    private, sample = resumed.strategy.private, resumed.strategy.roster.sample
    private.restore(Rounds(config.replaced(rounds=3)).run().strategy.private.state())
    private.count_torn(Torn({4: [0, 1]}))  # the fourth was torn, after two had been asked
    assert private._asked == straight.strategy.private._asked - Counter(
        sample(config.seed, 4, 0.4)
    ) + Counter([0, 1])
    private.begin(resumed.grid, 4, sample(config.seed, 4, 0.4))
    assert private._asked == straight.strategy.private._asked + Counter([0, 1])
    again = Rounds(config).strategy.private
    again.restore(private.state())
    assert again._asked == private._asked


def test_a_torn_round_in_secret_is_paid_for_by_all_and_no_round_over_epsilon_is_begun():
    told = {"privacy__sampling": "secret", "sampling__fraction": 0.4, "server__rule": "mean"}
    config = recipe(privacy__clip=0.5, privacy__epsilon=4.0, rounds=3, **told)
    run = Rounds(config)
    run.strategy.private.count_torn(Torn({1: []}))  # it fell on nobody
    assert set(run.strategy.private._asked.values()) == {1}
    with pytest.raises(Refusal, match=r"round 3: all who .* 3 rounds that privacy.epsilon = 4"):
        run.run()
    assert run.events("round")[-1]["epsilon-spent"] <= 4.0 + 1e-6


def test_a_torn_sum_under_masks_is_repeated_only_if_nobody_was_asked_to_open_it():
    config = recipe(privacy__masks=True, server__rule="ffa", rounds=4)
    private = Rounds(config).strategy.private
    for harmless in (Torn({}), Torn({2: []}), Torn({2: [0, 1]}), Torn({2: [0]}, {2: []})):
        private.count_torn(harmless)
    with pytest.raises(Refusal, match="round 2 was torn after clients had been asked to take"):
        private.count_torn(Torn({2: [0, 1]}, {2: [0]}))
    mixed = Torn({2: [0, 1, 2]}, {2: [0, 1]})  # as a group sees it, of others than its own
    assert mixed.among([2]) == {2: [2]}
    private.count_torn(mixed.among([2]))


def test_a_torn_masked_round_is_summed_again_under_new_keys_and_never_after_it_was_opened():
    """What runs twice is Flower's run; the token is one, so nodes know it again."""
    config = recipe(privacy__masks=True, server__rule="mean")

    def dies(kind: str, partition: int, number: int) -> bool:
        if (kind, partition, number) == ("train.fednl", 3, 2):
            raise KeyboardInterrupt
        return False

    token = "ab" * 16
    torn = Rounds(config, token=token, lose=dies)
    with pytest.raises(KeyboardInterrupt):
        torn.run()
    assert len(torn.states) == 2
    again = Rounds(config, token=token).go_on(after=1)
    wanted = mean_of(range(5), 2, start())
    for name, array in again.states[-1].items():
        moved_by = array.astype("f8") - start()[name]
        np.testing.assert_allclose(moved_by, wanted[name], atol=1e-6)
    keys = [
        border.arrays_of(reply.content)["keys"].tobytes()
        for run in (torn, again)
        for kind, _, number, reply in run.grid.heard
        if (kind, number) == ("query.secure_keys", 2)
    ]
    assert len(keys) == len(set(keys)) == 10
    words = [flat_words(run.grid.trained(2)[0]) for run in (torn, again)]
    assert chi_square((words[0] - words[1]).tobytes()) < 6  # the masks were others, too
    late = Rounds(config, token=token)
    with pytest.raises(Refusal, match="0 clients gave keys"):
        late.go_on(after=1)
    assert (
        "client 0 has opened sum 2 of this run, sum 2 came"
        in (late.events("client-failed")[0]["reason"])
    )


def flat_words(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([a.ravel() for _, a in sorted(arrays.items())])


@pytest.mark.parametrize("masks", [False, True])
def test_what_was_asked_is_on_the_disk_before_a_message_leaves(masks, tmp_path, monkeypatch):
    config = recipe(privacy__masks=masks, privacy__clip=0.5)
    run, flush, push = Rounds(config, folder=tmp_path / "run"), os.fsync, None
    lasting: dict[int, int] = {}  # file -> bytes that a power cut leaves
    left: list[str] = []

    def flushing(handle: int) -> None:
        flush(handle)
        lasting[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def pushing(messages):
        ledger, listed = (tmp_path / "run/ledger.jsonl").stat(), list(messages)
        for kind in {m.metadata.message_type for m in listed}:
            left.append(kind)
            if kind in ("train.fednl", "query.secure_unmask"):
                assert lasting.get(ledger.st_ino) == ledger.st_size, kind
        return push(listed)

    monkeypatch.setattr(os, "fsync", flushing)
    push, run.grid.push_messages = run.grid.push_messages, pushing
    run.run()
    assert left.count("train.fednl") == 2
    assert left.count("query.secure_unmask") == 2 * masks


def test_secret_samples_are_drawn_by_chance_and_accounted_as_sampled_gaussian():
    told = {"privacy__sampling": "secret", "sampling__fraction": 0.2, "clients__count": 20}
    config = recipe(server__rule="mean", privacy__clip=0.5, privacy__noise=1.5, rounds=6, **told)
    run = Rounds(config, Owner, source(5)).run()
    drawn = [sorted(run.grid.trained(n)) for n in range(1, 7)]
    assert len({tuple(d) for d in drawn}) > 3
    assert len({len(d) for d in drawn}) > 1  # Poisson: the number is chance, too
    spent = run.events("round")[-1]["epsilon-spent"]
    assert spent == sampled_gaussian.epsilon(0.2, 1.5, 6, 1e-5)
    assert run_sigma(run) == pytest.approx(1.5 * 0.5 / (0.2 * 20))  # the number divided by is fixed
    counts = [len(run.strategy.private._drawn_in_secret()) for _ in range(300)]
    assert np.mean(counts) == pytest.approx(4.0, abs=5 * np.sqrt(20 * 0.2 * 0.8 / 300))


def test_a_secret_round_that_asks_nobody_is_noise_and_nothing_else():
    told = {"privacy__sampling": "secret", "sampling__fraction": 1e-6, "clients__count": 3}
    run = Rounds(recipe(server__rule="mean", privacy__clip=0.5, privacy__noise=1.0, **told)).run()
    assert run.grid.trained(1) == {}
    assert np.abs(flat(moved(run, 1))).min() > 0
    assert len(run.events("privacy")) == 2


def test_without_noise_a_round_without_replies_still_fails():
    config = recipe(privacy__clip=0.5)
    with pytest.raises(AggregationError, match="0 usable replies"):
        Rounds(config, lose=lambda kind, *_: kind == "train.fednl").run()
