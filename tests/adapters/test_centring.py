from __future__ import annotations

import torch

from fedloom.adapters.attach import attach
from fedloom.adapters.centring import TEXT, mean_projections
from fedloom.models.tokenizer import ByteTokenizer

from grafts import HEARD, logits

SAMPLE = ByteTokenizer().encode(TEXT)
CENTRED = HEARD.replaced(memory__centre="learnt", memory__feature_map="l2")


def test_centres_start_at_the_means_of_what_the_frozen_model_projects(model):
    attentions = [layer.self_attn for layer in model.get_decoder().layers]
    means = mean_projections(model, attentions, torch.tensor([SAMPLE]))
    adapter = attach(model, CENTRED.replaced(memory__window=9), SAMPLE)
    for attention, (q, k) in zip(attentions, means, strict=True):
        delta = attention.memory.delta
        torch.testing.assert_close(delta.centre_q.flatten(), q)
        torch.testing.assert_close(delta.centre_k.flatten(), k)
    assert {n.rpartition(".")[2] for n in adapter.arrays() if ".centre_" in n} == {
        "centre_q",
        "centre_k",
    }


def test_reset_goes_back_to_the_means_and_not_to_zero(model):
    adapter = attach(model, CENTRED, SAMPLE)
    name = next(name for name in adapter.arrays() if name.endswith("centre_k"))
    start = adapter.arrays()[name]
    adapter.load({name: start + 1})
    adapter.reset()
    assert (adapter.arrays()[name] == start).all()
    assert abs(start).max() > 0


def test_a_centre_of_zero_is_no_centre(model, ids):
    adapter = attach(model, CENTRED, SAMPLE)
    adapter.load({n: 0 * x for n, x in adapter.arrays().items() if ".centre_" in n})
    centred = logits(model, ids)
    adapter.detach()
    attach(model, HEARD.replaced(memory__feature_map="l2"))
    torch.testing.assert_close(centred, logits(model, ids))


def test_keys_point_further_apart(model):
    """Two different tokens' keys: their mean cosine over a text is lower once centred."""
    attention = model.get_decoder().layers[0].self_attn
    raw = []
    attention.k_proj.register_forward_hook(lambda _m, _i, out: raw.append(out[0]))
    attach(model, CENTRED, SAMPLE)
    model(torch.tensor([SAMPLE[:80]]))
    delta = attention.memory.delta
    keys = raw[-1].unflatten(-1, (delta.heads, delta.dim))

    def likeness(k):
        unit = torch.nn.functional.normalize(k, dim=-1).transpose(0, 1)
        return (unit @ unit.mT).mean()

    assert likeness(keys - delta.centre_k) < likeness(keys)
