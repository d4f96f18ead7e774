import numpy as np
import pytest
import torch

from fedloom.models import tiny
from fedloom.models.sources import TINY


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", TINY)
def test_weights_are_the_same_at_each_build_and_random_numbers_untouched(family):
    torch.manual_seed(5)
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    one = tiny.build(family)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpys).all()  # noqa: NPY002
    torch.manual_seed(6)
    assert tiny.digest(tiny.build(family)) == tiny.digest(one)


def test_weights_are_the_same_on_every_machine():
    assert {family: tiny.digest(tiny.build(family))[:16] for family in TINY} == {
        "llama": "af4562a1bab72510",
        "qwen2": "5c7f5b4e5cbdc066",
        "qwen3": "91c0c8b9597d419d",
        "gemma3": "3ef3fe2a4da27a13",
        "mamba": "11a83672a86076af",
    }


@pytest.mark.parametrize("family", TINY)
def test_logits_vary_with_the_order_of_tokens(family):
    model = tiny.build(family).eval()
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (2, 64)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[257, 65, 66, 67], [257, 67, 66, 65]])).logits
    assert logits.std() > 0.5
    assert not torch.allclose(logits[0, -1], logits[1, -1], atol=0.1)


@pytest.mark.parametrize("family", [family for family in TINY if family != "mamba"])
def test_heads_are_grouped(family):
    model = tiny.build(family)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 2)
    attention = model.model.layers[0].self_attn
    assert (attention.q_proj.out_features, attention.k_proj.out_features) == (64, 32)
    assert (attention.q_proj.bias is not None) == (family == "qwen2")
    assert hasattr(attention, "q_norm") == (family in ("qwen3", "gemma3"))


def test_gemma_slides_a_window_in_one_layer_and_scales_its_embedding():
    model = tiny.build("gemma3")
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert windows == [tiny.WINDOW, None]
    token = torch.tensor([65])
    embedding = model.get_input_embeddings()
    torch.testing.assert_close(embedding(token), 8 * embedding.weight[token])
    assert model.get_output_embeddings().weight is embedding.weight
