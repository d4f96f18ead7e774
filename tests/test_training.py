from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fedloom.adapters.attach import attach
from fedloom.config import RunConfig, TrainConfig
from fedloom.data.prompts import Encoded
from fedloom.evaluation import ChoiceScores, score_choices
from fedloom.models import tiny
from fedloom.models.answers import Prompts, answer_logits, answer_loss
from fedloom.training import Pull, _batches, train_locally


def rows(count: int) -> list[Encoded]:
    random = np.random.default_rng(3)
    return [
        Encoded(
            tuple(map(int, random.integers(1, 250, random.integers(3, 30)))),
            (65, 66, 67, 68),
            int(random.integers(4)),
        )
        for _ in range(count)
    ]


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 3), st.integers(0, 99))
def test_an_epoch_shows_every_row_once_and_pads_little(count, size, epochs, seed):
    config = TrainConfig(epochs=epochs, batch_size=size)
    batches = list(_batches(range(count), lambda x: x, config, seed))
    assert sorted(x for batch in batches for x in batch) == sorted([*range(count)] * epochs)
    assert all(1 <= len(batch) <= size for batch in batches)
    assert batches == list(_batches(range(count), lambda x: x, config, seed))


@given(st.integers(1, 9), st.integers(1, 30))
def test_max_steps_counts_steps_over_as_many_epochs_as_it_takes(count, steps):
    config = TrainConfig(max_steps=steps, batch_size=4)
    assert len(list(_batches(range(count), lambda x: x, config, 0))) == steps


@pytest.fixture
def adapter():
    config = RunConfig().replaced(memory__chunk=16, train__learning_rate=5e-3)
    return attach(tiny.build("llama").requires_grad_(False), config)


def loss_on(adapter):
    model = adapter.model.get_base_model()

    def loss(batch):
        answers = torch.tensor([row.letter_ids[row.gold] for row in batch])
        prompts = Prompts.of([row.prompt_ids for row in batch], torch.device("cpu"))
        return answer_loss(model, prompts, answers), prompts.tokens

    return loss


def length(row: Encoded) -> int:
    return len(row.prompt_ids)


def test_training_learns_reports_and_leaves_torchs_randomness_alone(adapter):
    state = torch.random.get_rng_state()
    config = TrainConfig(epochs=4, batch_size=4, learning_rate=5e-3)
    report = train_locally(adapter, rows(10), loss_on(adapter), length, config, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (report.examples, report.steps) == (10, 12)
    assert report.tokens == 4 * sum(map(length, rows(10)))
    assert report.loss_last < report.loss_first
    assert not adapter.model.training


def test_dropout_is_part_of_the_seed():
    arrays = []
    for seed in (1, 1, 2):
        config = RunConfig().replaced(lora__dropout=0.3, memory__chunk=16)
        adapter = attach(tiny.build("llama").requires_grad_(False), config)
        train_locally(adapter, rows(6), loss_on(adapter), length, config.train, seed=seed)
        arrays.append(adapter.arrays())
    same = [all((arrays[0][n] == other[n]).all() for n in other) for other in arrays[1:]]
    assert same == [True, False]


def test_loss_that_is_not_finite_stops_the_client(adapter):
    with pytest.raises(FloatingPointError, match="lower learning rate"):
        train_locally(
            adapter,
            rows(4),
            lambda batch: (torch.tensor(float("nan"), requires_grad=True), 1),
            length,
            TrainConfig(),
            seed=0,
        )


def test_memory_rate_moves_the_gates_alone(adapter):
    start = adapter.arrays()
    config = TrainConfig(max_steps=2, learning_rate=1e-12, memory_learning_rate=0.1)
    train_locally(adapter, rows(6), loss_on(adapter), length, config, seed=1)
    moved = {n: float(np.abs(a - start[n]).max()) for n, a in adapter.arrays().items()}
    assert min(v for n, v in moved.items() if ".memory." in n) > 0.05
    assert max(v for n, v in moved.items() if ".lora_" in n) < 1e-6


def test_a_step_of_sgd_is_the_clipped_gradient(adapter):
    start, loss = adapter.arrays(), loss_on(adapter)
    value, _ = loss(rows(6))
    value.backward()
    gradients = {n: p.grad.clone() for n, p in adapter.parameters().items()}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    config = TrainConfig(
        optimizer="sgd", max_steps=1, batch_size=6, clip_norm=0.5 * float(norm),
        learning_rate=0.1, memory_learning_rate=0.3,
    )  # fmt: skip
    train_locally(adapter, rows(6), loss, length, config, seed=1)
    for name, array in adapter.arrays().items():
        rate = 0.3 if ".memory." in name else 0.1
        want = start[name] - rate * 0.5 * gradients[name].numpy()
        np.testing.assert_allclose(array, want, rtol=1e-4, atol=1e-7)


def test_answer_logits_are_those_after_each_prompt_alone(adapter):
    model = adapter.model.get_base_model()
    prompts = [row.prompt_ids for row in rows(5)]
    with torch.no_grad():
        together = answer_logits(model, Prompts.of(prompts, torch.device("cpu")))
        alone = [model(torch.tensor([p]), use_cache=False).logits[0, -1] for p in prompts]
    # float32, other batch shapes: matmuls sum in another order
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_empty_prompts_are_an_error(prompts):
    with pytest.raises(ValueError, match="at least one"):
        Prompts.of(prompts, torch.device("cpu"))


def test_scores_are_what_the_definition_says_and_add_up(adapter):
    model = adapter.model.get_base_model()
    examples = rows(7)
    whole = score_choices(model, examples, batch_size=3)
    parts = [score_choices(model, part, batch_size=9) for part in (examples[:2], examples[2:])]
    total = parts[0] + parts[1]
    gold_ce, letter_ce, correct, first = 0.0, 0.0, 0, 0
    with torch.no_grad():
        for row in examples:
            logits = model(torch.tensor([row.prompt_ids]), use_cache=False).logits[0, -1].double()
            token, among = row.letter_ids[row.gold], logits[list(row.letter_ids)]
            gold_ce += float(F.cross_entropy(logits, torch.tensor(token)))
            letter_ce += float(F.cross_entropy(among, torch.tensor(row.gold)))
            correct += int(among.argmax() == row.gold)
            first += int(logits.argmax() == token)
    for scores in (whole, total):
        assert isinstance(scores, ChoiceScores)
        assert (scores.examples, scores.correct, scores.first_token_correct) == (7, correct, first)
        assert scores.gold_ce_sum == pytest.approx(gold_ce, rel=1e-5)  # float32 forward
        assert scores.letter_ce_sum == pytest.approx(letter_ce, rel=1e-5)
    assert whole.tokens == sum(map(length, examples))


def test_proximal_pull_is_the_gradient_of_fedprox(adapter):
    """One step after a first one has moved the adapter: autograd of the whole objective."""
    parameters = list(adapter.parameters().values())
    start = [p.detach().clone() for p in parameters]
    pull = Pull(0.7)
    pull.begin(adapter.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.01)
    plain, _ = loss_on(adapter)(rows(4))
    distance = sum((p - s).square().sum() for p, s in zip(parameters, start, strict=True))
    wanted = torch.autograd.grad(plain + 0.7 / 2 * distance, parameters, retain_graph=True)
    plain.backward()
    pull.after_backward(adapter.parameters())
    for parameter, grad in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-7)  # float32 sums


def test_mu_zero_is_fedavg_to_the_bit_and_a_large_mu_stays_near():
    moved, arrays = {}, {}
    for mu in (None, 0.0, 1e4):
        adapter = attach(tiny.build("llama").requires_grad_(False), RunConfig())
        start = adapter.arrays()
        config = TrainConfig(max_steps=6, clip_norm=0.0, learning_rate=1e-3)
        if mu is not None:
            config = dataclasses.replace(config, proximal_mu=mu)
        train_locally(adapter, rows(8), loss_on(adapter), length, config, seed=1)
        arrays[mu] = adapter.arrays()
        moved[mu] = max(float(np.abs(a - start[n]).max()) for n, a in arrays[mu].items())
    assert all((arrays[None][n] == arrays[0.0][n]).all() for n in arrays[None])
    assert moved[1e4] < 0.6 * moved[0.0]
