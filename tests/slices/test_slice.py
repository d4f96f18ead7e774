"""A slice is what the model computed: keys without position, values, the tokens one asked for."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.models.base import load_base
from fedloom.ops.rotary import rotate
from fedloom.slices.geometry import Geometry, geometry_of, rotaries_of
from fedloom.slices.slice import batch_of, export_batch, export_cache

from grafts import FAMILIES

TEXT = list("ein Käse für Zoë".encode())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_turned_again_it_is_the_cache(family):
    """In Gemma3 also beyond the window, which transformers' own cache would forget."""
    base = load_base(f"tiny:{family}", "float64")
    geometry = geometry_of(base.model, base.base_hash, base.tokenizer_hash)
    piece = export_cache(base.model, geometry, TEXT)
    assert piece.tokens == len(TEXT) > tiny.WINDOW
    held = base.model(torch.tensor([TEXT]), cache=DynamicCache(), use_cache=True).cache
    for n, rotary in enumerate(rotaries_of(base.model)):
        turned = rotate(piece.keys[n][None], torch.arange(len(TEXT))[None], rotary)
        torch.testing.assert_close(turned, held.layers[n].keys, rtol=0, atol=1e-12)
        torch.testing.assert_close(piece.values[n][None], held.layers[n].values, rtol=0, atol=0)


def test_geometry_tells_models_apart(llama, geometry):
    assert (geometry.layers, geometry.heads, geometry.dim) == (2, 2, 16)
    assert geometry.model == llama.base_hash
    assert Geometry.from_json(geometry.to_json()) == geometry
    gemma = load_base("tiny:gemma3")
    other = geometry_of(gemma.model, gemma.base_hash, gemma.tokenizer_hash)
    assert other.windows == (tiny.WINDOW, 0)
    assert other.full == (1,)
    assert other.model != geometry.model
    assert len(set(other.bases)) == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 1}'])
def test_what_is_no_geometry_is_refused(text):
    with pytest.raises(Refusal, match="not a cache geometry"):
        Geometry.from_json(text)


def test_mamba_is_refused():
    base = load_base("tiny:mamba")
    with pytest.raises(Refusal, match="a mamba model has no attention in layer 0"):
        geometry_of(base.model, base.base_hash, base.tokenizer_hash)


def test_an_embedding_that_pairs_other_dimensions_is_refused():
    """Half of the models of the world interleave; turned back our way their keys are nonsense."""
    model = tiny.build("llama")
    rotary = model.model.rotary_emb

    def interleaved(_module, _inputs, waves):
        return tuple(w.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for w in waves)

    rotary.register_forward_hook(interleaved)
    with pytest.raises(Refusal, match="pairs other dimensions"):
        geometry_of(model, "m", "t")


def test_template_goes_and_the_sink_stays(llama, geometry):
    piece = export_cache(llama.model, geometry, TEXT, own=range(5))
    assert piece.places == (0, *range(5, len(TEXT)))
    without = export_cache(llama.model, geometry, TEXT, own=range(5), sink=False)
    assert without.places == tuple(range(5, len(TEXT)))
    whole = export_cache(llama.model, geometry, TEXT)
    for n in whole.layers:  # the message was read behind the template all the same
        assert torch.equal(without.keys[n], whole.keys[n][:, 5:])


def test_tokens_and_layers_are_chosen(llama, geometry):
    last = export_cache(llama.model, geometry, TEXT, keep=4, layers=[1], ends=range(1, 20))
    assert (last.places, last.layers) == ((0, 16, 17, 18), (1,))
    assert last.ends == (1, 17, 18, 19)
    loud = export_cache(llama.model, geometry, TEXT, keep=4, by="value-norm", sink=False)
    whole = export_cache(llama.model, geometry, TEXT)
    norm = sum(v.norm(dim=-1).mean(0) / v.norm(dim=-1).mean() for v in whole.values.values())
    assert set(loud.places) == set(norm.topk(4).indices.tolist())
    assert loud.places == tuple(sorted(loud.places))


def test_bad_choices_are_refused(llama, geometry):
    for told, match in (
        ({"layers": [2]}, "expected some of 0 to 1"),
        ({"by": "loudness"}, "expected one of last, value-norm"),
        ({"own": range(19), "sink": False}, "nothing would be left"),
    ):
        with pytest.raises(Refusal, match=match):
            export_cache(llama.model, geometry, TEXT, **told)
    with pytest.raises(Refusal, match="empty context"):
        export_cache(llama.model, geometry, [])


def test_batches_are_left_padded(llama, geometry):
    pieces = [export_cache(llama.model, geometry, TEXT[:n]) for n in (7, 3)]
    batch = batch_of(pieces)
    assert batch.real_BT.sum(1).tolist() == [7, 3]
    assert torch.equal(batch.keys[1][1, :, 4:], pieces[1].keys[1])
    assert not batch.values[0][1, :, :4].any()


def test_contexts_read_at_once_are_each_alone(llama, geometry):
    rows = [TEXT, TEXT[:3], TEXT[5:12]]
    batch = export_batch(llama.model, geometry, rows)
    for i, row in enumerate(rows):
        single = export_cache(llama.model, geometry, row)
        for n in batch.layers:
            got = batch.keys[n][i, :, batch.real_BT[i]]
            torch.testing.assert_close(got, single.keys[n], rtol=0, atol=1e-10)
