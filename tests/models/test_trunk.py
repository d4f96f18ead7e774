from __future__ import annotations

import pytest
import torch

from fedloom.adapters.attach import attach
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.models.trunk import Trunk

from grafts import CUTTABLE, HEARD

ROWS = [list(range(40, 61)), list(range(90, 103)), [7, 9]]
TOP = HEARD.replaced(last_layers=1, memory__window=6)


def whole(model, row):
    return model.get_decoder()(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0]


@pytest.fixture(params=CUTTABLE)
def grafted(request):
    model = tiny.build(request.param).double().eval().requires_grad_(False)
    return attach(model, TOP), model


def test_what_is_above_the_cut_gives_the_whole_models_output(grafted):
    _, model = grafted
    cut = Trunk(model, 1, budget=1 << 20)
    with torch.no_grad():
        for padded, row in zip(cut.hidden(ROWS), ROWS, strict=True):
            torch.testing.assert_close(padded[: len(row)], whole(model, row), atol=1e-12, rtol=0)


def test_gradients_are_those_of_the_whole_model(grafted):
    adapter, model = grafted
    parameters = list(adapter.parameters().values())
    with torch.no_grad():
        for name, parameter in adapter.parameters().items():
            if ".lora_B." in name:  # at its start of zero, A would have no gradient to compare
                parameter.copy_(torch.ones_like(parameter) / 50)
    row = ROWS[0]
    direct = torch.autograd.grad(whole(model, row).square().sum(), parameters)
    cut = Trunk(model, 1, budget=1 << 20).hidden([row])[0]
    through = torch.autograd.grad(cut.square().sum(), parameters)
    for mine, theirs in zip(through, direct, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


def test_a_row_is_walked_once_and_its_bits_do_not_depend_on_company(grafted):
    _, model = grafted
    cut = Trunk(model, 1, budget=1 << 20)
    seen = []
    handle = model.get_decoder().layers[0].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        first = cut.hidden(ROWS)[2, :2]
        again = cut.hidden([ROWS[2], ROWS[2]])[0]
    handle.remove()
    assert len(seen) == 3
    assert cut.kept() == 3
    torch.testing.assert_close(first, again, atol=1e-12, rtol=0)


def test_beyond_the_budget_rows_are_computed_again(grafted):
    _, model = grafted
    width = model.config.hidden_size
    tight = Trunk(model, 1, budget=width * 8 * len(ROWS[0]))
    with torch.no_grad():
        assert torch.equal(tight.hidden(ROWS), Trunk(model, 1, budget=0).hidden(ROWS))
    assert tight.kept() == 1


def test_the_model_is_left_whole(grafted):
    _, model = grafted
    before = list(model.get_decoder().layers), model.get_decoder().norm
    with pytest.raises(IndexError):  # no such token: the pass fails in the middle
        Trunk(model, 1, budget=0).hidden([[10**6]])
    assert (list(model.get_decoder().layers), model.get_decoder().norm) == before


def test_a_model_whose_layers_depend_on_their_number_is_refused():
    """Gemma3 chooses each layer's mask and rotation by its place: half a model is another one."""
    model = tiny.build("gemma3").double().eval().requires_grad_(False)
    with pytest.raises(Refusal, match="cannot be cut"):
        Trunk(model, 1, budget=0)
