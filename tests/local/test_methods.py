"""Each method's update against a plain loop of its own, on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom import seeds
from fedloom.adapters.attach import attach
from fedloom.clients.fednl import FedNLClient
from fedloom.clients.workbench import workbench
from fedloom.config import RunConfig
from fedloom.data.prompts import Encoded
from fedloom.local.ala import FedALA
from fedloom.local.home import Home
from fedloom.local.personal import Ditto, FineTune
from fedloom.local.scaffold import Correction, Scaffold
from fedloom.local.ssi import XI, FedSSI, PathIntegral
from fedloom.local.work import Plain, Work
from fedloom.models import tiny
from fedloom.models.answers import Prompts, answer_loss
from fedloom.rules import control_names
from fedloom.simulations import client_app
from fedloom.simulations.inprocess import InProcessGrid
from fedloom.training import Pull, one_epoch

RUN = "ab" * 16


def encoded(count: int) -> list[Encoded]:
    random = np.random.default_rng(3)
    return [
        Encoded(
            tuple(map(int, random.integers(1, 250, random.integers(3, 9)))),
            (65, 66, 67, 68),
            int(random.integers(4)),
        )
        for _ in range(count)
    ]


def work(server_round: int = 1, **changes) -> Work:
    settings = {"train__max_steps": 3, "train__batch_size": 2, "memory__gate": "shut"}
    settings |= {"server__rule": "mean"}
    settings |= {"train__learning_rate": 1e-2, "train__clip_norm": 0.0}
    config = RunConfig().replaced(**{**settings, **changes})
    adapter = attach(tiny.build("llama").requires_grad_(False), config)
    model = adapter.model.get_base_model()

    def loss(batch):
        answers = torch.tensor([row.letter_ids[row.gold] for row in batch])
        prompts = Prompts.of([row.prompt_ids for row in batch], torch.device("cpu"))
        return answer_loss(model, prompts, answers), prompts.tokens

    return Work(
        adapter=adapter,
        rows=encoded(6),
        loss=loss,
        length=lambda row: len(row.prompt_ids),
        config=config,
        home=Home(RUN, 0, "manifest"),
        round=server_round,
        partition=0,
    )


def moved(arrays: dict, by: float, seed: int = 0) -> dict:
    random = np.random.default_rng(seed)
    return {
        n: (a + by * random.standard_normal(a.shape)).astype(a.dtype) for n, a in arrays.items()
    }


def batches(job: Work, purpose: str) -> list:
    """What ``train`` sees, written down: three steps of the first epoch."""
    random = seeds.generator(job.seed(purpose), 0, "order")
    return list(one_epoch(job.rows, job.length, 2, random))[:3]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def close(a: dict, b: dict, atol: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for n in a:
        wanted = b[n].detach().numpy() if isinstance(b[n], torch.Tensor) else b[n]
        np.testing.assert_allclose(a[n], wanted, rtol=0, atol=atol, err_msg=n)


def adamw(job: Work, purpose: str, penalty=None, watch=None) -> None:
    """Three steps with autograd of the whole objective, penalty and all."""
    named = job.adapter.parameters()
    optimiser = torch.optim.AdamW(named.values(), lr=1e-2, weight_decay=0.0)
    for batch in batches(job, purpose):
        value, _ = job.loss(batch)
        slopes = dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))
        extra = torch.zeros(()) if penalty is None else penalty(named)
        for n, p in named.items():
            p.grad = slopes[n].clone()
        if extra.requires_grad:
            pulls = torch.autograd.grad(extra, list(named.values()))
            for p, pull in zip(named.values(), pulls, strict=True):
                p.grad += pull
        before = {n: p.detach().clone() for n, p in named.items()}
        optimiser.step()
        if watch is not None:
            watch(slopes, {n: named[n].detach() - before[n] for n in named})


def test_hooks_that_add_nothing_change_no_bit():
    """FedProx at mu = 0, and controls that are all zero, are FedAvg."""
    ends = []
    for hooks in ((), (Pull(0.0),), ("zeros",)):
        job = work()
        zeros = {n: torch.zeros_like(p) for n, p in job.adapter.parameters().items()}
        job.train(hooks=[Correction(zeros)] if hooks == ("zeros",) else hooks)
        ends.append(job.adapter.arrays())
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def test_rates_fall_to_their_last_share():
    """In round 2 of 3, at three quarters; a personal adapter after the last has the last's."""
    falling = {"train__last_rate": 0.5, "rounds": 3}
    for server_round, rate in ((1, 1e-2), (2, 7.5e-3), (3, 5e-3), (4, 5e-3)):
        job = work(server_round, **falling)
        plain = work(server_round, train__learning_rate=rate)
        job.train()
        plain.train()
        assert same(job.adapter.arrays(), plain.adapter.arrays())


def test_scaffolds_control_is_option_two_under_sgd():
    """With SGD the mean raw gradient is ``c_k - c + (theta - theta_k) / (K lr)``."""
    job, rate = work(), 0.05
    named = job.adapter.parameters()
    start = {n: p.detach().clone() for n, p in named.items()}
    shift = {n: torch.full_like(p, 0.01) for n, p in named.items()}  # c - c_k
    hook = Correction(shift)
    hook.begin(named)
    for batch in batches(job, "training"):
        job.adapter.model.zero_grad()
        job.loss(batch)[0].backward()
        hook.after_backward(named)
        with torch.no_grad():
            for p in named.values():
                p -= rate * p.grad
    close(hook.mean(), {n: (start[n] - p) / (3 * rate) - shift[n] for n, p in named.items()}, 1e-5)


def test_scaffold_step_uses_what_was_kept_and_sends_the_move():
    job = work(server_round=2)
    received, common = moved(job.adapter.arrays(), 0.01), moved(job.adapter.arrays(), 0.02, 1)
    kept = moved(job.adapter.arrays(), 0.02, 2)
    job.home.keep("control", kept, 1)
    job.adapter.load(received)
    trained = Scaffold().fit(job, {**received, **control_names(common)})
    twin, sums = work(server_round=2), dict.fromkeys(received, 0.0)
    twin.adapter.load(received)

    def correction(named):
        return sum(((p * torch.from_numpy(common[n] - kept[n])).sum()) for n, p in named.items())

    def watch(slopes, _):
        for n in sums:
            sums[n] = sums[n] + slopes[n].numpy() / 3

    adamw(twin, "training", correction, watch)
    close(job.adapter.arrays(), twin.adapter.arrays())
    close(job.home.find("control", 3), sums)
    close(trained.beside, control_names({n: sums[n] - kept[n] for n in sums}))


def test_ditto_pulls_its_own_adapter_to_what_was_received():
    job = work(server_round=2, local__method="ditto", local__ditto_pull=0.7)
    received, own = moved(job.adapter.arrays(), 0.01), moved(job.adapter.arrays(), 0.02, 1)
    job.home.keep("personal", own, 1)
    job.adapter.load(received)
    Ditto().fit(job, received)
    personal, plain = work(server_round=2), work(server_round=2)
    personal.adapter.load(own)
    away = {n: torch.from_numpy(a) for n, a in received.items()}
    adamw(
        personal,
        "personal",
        lambda named: 0.7 / 2 * sum((p - away[n]).square().sum() for n, p in named.items()),
    )
    close(job.home.find("personal", 3), personal.adapter.arrays())
    plain.adapter.load(received)
    Plain().fit(plain, received)
    assert same(job.adapter.arrays(), plain.adapter.arrays())  # what is sent is FedAvg's


def test_fedssi_is_its_three_steps_written_out():
    settings = {"local__method": "fedssi", "local__ssi_weight": 3.0, "local__ssi_lambda": 0.25}
    job, twin = work(server_round=2, **settings), work(server_round=2, **settings)
    received = moved(job.adapter.arrays(), 0.01)
    omega = {n: np.abs(a) * 10 for n, a in moved(job.adapter.arrays(), 0.1, 1).items()}
    job.home.keep("omega", omega, 1)
    start = {n: torch.from_numpy(a) for n, a in received.items()}
    for each in (job, twin):
        each.adapter.load(received)
    FedSSI().fit(job, received)
    shares = {n: torch.zeros_like(a) for n, a in start.items()}

    def watch(slopes, steps):
        for n in shares:
            shares[n] -= slopes[n] * steps[n]

    q = (1 - 0.25) / (2 * 0.25)
    adamw(
        twin,
        "surrogate",
        lambda named: q / 2 * sum((p - start[n]).square().sum() for n, p in named.items()),
        watch,
    )
    importance = {}
    for n, p in twin.adapter.parameters().items():
        importance[n] = (
            omega[n] + (shares[n].clamp(min=0) / ((p.detach() - start[n]) ** 2 + XI)).numpy()
        )
    twin.adapter.load(received)
    adamw(
        twin,
        "training",
        lambda named: (
            3.0
            * sum(
                (torch.from_numpy(omega[n]) * (p - start[n]) ** 2).sum() for n, p in named.items()
            )
        ),
    )
    close(job.home.find("omega", 3), importance, 1e-4)  # shares over XI = 1e-3
    close(job.adapter.arrays(), twin.adapter.arrays())
    assert max(float(np.abs(importance[n] - omega[n]).max()) for n in omega) > 1e-3


def test_path_integral_of_plain_descent_is_the_fall_of_a_quadratic():
    """On ``|x|^2 / 2`` with a small rate, the shares add up to the loss that was lost."""
    x = torch.nn.Parameter(torch.tensor([3.0, -2.0, 0.0], dtype=torch.float64))
    hook, named = PathIntegral(), {"x": x}
    hook.begin(named)
    for _ in range(2000):
        x.grad = x.detach().clone()
        hook.after_backward(named)
        with torch.no_grad():
            x -= 1e-3 * x.grad
        hook.after_step(named)
    start = np.array([3.0, -2.0, 0.0])
    end = x.detach().numpy()
    fall = (start**2 - end**2) / 2
    wanted = fall / ((start - end) ** 2 + XI)
    np.testing.assert_allclose(hook.importance()["x"], wanted, rtol=2e-3)  # first order in the rate


@pytest.mark.parametrize("first", [True, False])
def test_fedala_learns_its_weights_as_the_papers_loop_does(first):
    settings = {"local__method": "fedala", "local__ala_passes": 4, "local__ala_rate": 50.0}
    job, twin = work(server_round=3, **settings), work(server_round=3, **settings)
    received, old = moved(job.adapter.arrays(), 0.05), moved(job.adapter.arrays(), 0.05, 1)
    top = [n for n in received if "layers.1." in n]
    random = np.random.default_rng(5)
    weights = {n: torch.ones_like(torch.from_numpy(received[n])) for n in top}
    job.home.keep("local", old, 2)
    if not first:
        weights = {
            n: torch.from_numpy(random.random(w.shape).astype("f4")) for n, w in weights.items()
        }
        job.home.keep("ala", {n: w.numpy() for n, w in weights.items()}, 2)
    for each in (job, twin):
        each.adapter.load(received)
    trained = FedALA().fit(job, received)

    named = twin.adapter.parameters()
    gap = {n: torch.from_numpy(received[n] - old[n]) for n in top}
    draw = seeds.generator(twin.seed("ala"))
    rows = [twin.rows[i] for i in draw.choice(6, 4, replace=False)]  # 80 % of 6
    sample = list(one_epoch(rows, twin.length, 2, draw))

    def mix():
        with torch.no_grad():
            for n in top:
                named[n].copy_(torch.from_numpy(old[n]) + gap[n] * weights[n])

    mix()
    for _ in range(4 if first else 1):
        for batch in sample:
            twin.adapter.model.zero_grad()
            twin.loss(batch)[0].backward()
            for n in top:
                weights[n] = (weights[n] - 50.0 * named[n].grad * gap[n]).clamp(0, 1)
            mix()
    assert trained.metrics["ala-passes"] == (4 if first else 1)
    kept = job.home.find("ala", 4)
    close(kept, weights, 1e-5)  # rate 50 on float32 slopes
    flat = np.concatenate([w.ravel() for w in kept.values()])
    assert 0 <= flat.min() < flat.max() <= 1
    for n in set(received) - set(top):
        assert np.array_equal(twin.adapter.arrays()[n], received[n])  # lower layers: the server's
    adamw(twin, "training")
    close(job.adapter.arrays(), twin.adapter.arrays(), 1e-5)
    assert same(job.home.find("local", 4), job.adapter.arrays())


def test_fedala_settles_when_the_losses_do():
    job = work(server_round=2, local__method="fedala", train__learning_rate=1e-4)
    received = job.adapter.arrays()
    job.home.keep("local", moved(received, 1e-4), 1)
    assert FedALA().fit(job, received).metrics["ala-passes"] == 11  # ten more than one


def test_fine_tuning_happens_once_and_leaves_its_adapter():
    job = work(server_round=4, local__method="fine-tune", local__fine_tune_steps=2)
    assert not FineTune().is_personal(job)
    received = moved(job.adapter.arrays(), 0.01)
    job.adapter.load(received)
    FineTune().personalise(job, received)
    assert same(job.home.find("personal", 5), job.adapter.arrays())
    assert not same(job.adapter.arrays(), received)


@pytest.mark.parametrize("baseline", ["local", "scaffold", "ditto", "fedala", "fedssi"])
def test_a_clients_state_never_reaches_the_next_client(recipe, monkeypatch, tmp_path, baseline):
    """Client 1 alone in the world, and after client 0 in one process: the same bits."""
    config = recipe(baseline=baseline, local__ala_passes=2, train__learning_rate=5e-3)
    ends = {}
    for company in (False, True):
        monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path / f"home-{company}"))
        contexts = InProcessGrid(client_app.app, 2, config.flat())._contexts
        arrays = list(workbench(config).start().values())
        for server_round in (1, 2):
            both = (1, 0) if server_round == 1 else (0, 1)  # the other wrote last, and ran just now
            for node in both if company else (1,):
                client = FedNLClient(contexts[1000 + node])
                client.array_names = list(workbench(config).manifest.arrays)
                told = {"round": server_round, "run": RUN, "last": False}
                told["manifest"] = workbench(config).manifest.digest()
                answer, _, metrics = client.fit([a.copy() for a in arrays], told)
                del metrics["seconds"]
                held = workbench(config).adapter.arrays()
                ends[company, node, server_round] = (answer, held, metrics)
            arrays = [a + np.float32(0.003) for a in arrays]  # the server's mean moved
    for server_round in (1, 2):
        (sent, held, told), (sent_, held_, told_) = (
            ends[company, 1, server_round] for company in (False, True)
        )
        assert told == told_  # Ditto's own loss among them
        assert all(np.array_equal(a, b) for a, b in zip(sent, sent_, strict=True))
        assert same(held, held_)
        assert not same(held, ends[True, 0, server_round][1])
