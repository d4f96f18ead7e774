"""A cache is as readable as its text: in every precision, from every layer, and through a fuser."""

from __future__ import annotations

import secrets

import pytest
import torch

from fedloom.adapters.fused import pass_through
from fedloom.errors import Refusal
from fedloom.refining import leakage
from fedloom.slices.frames import encode
from fedloom.slices.slice import batch_of, export_cache

from rooms import fuser_of, room

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
SENT = [*(("llama", s) for s in ("bf16", "int8", "int4")), *((f, "int4") for f in FAMILIES[1:])]
SECRET = [257, *"Zoë 555-019".encode()]
VOCABULARY = 259


def wiretap(piece, scheme):
    """What somebody on the line has of a slice: its frames, and no key."""
    key, session = secrets.token_bytes(32), secrets.token_bytes(16)
    return leakage.overheard(b"".join(encode(piece, scheme, key, session)), piece.geometry)


def sent(family, scheme, **told):
    base, geometry = room(family, "float32")
    piece = export_cache(base.model, geometry, SECRET, **told)
    return base.model, geometry, wiretap(piece, scheme)


@pytest.mark.parametrize(("family", "scheme"), SENT)
def test_layer_0_is_a_table_of_the_vocabulary(family, scheme):
    model, geometry, piece = sent(family, scheme)
    table = leakage.value_table(model, geometry, batch=100)
    assert len(table) == VOCABULARY
    found = leakage.lookup(piece, table)
    assert leakage.recovery_rate(found, SECRET) == 1
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    assert leakage.recovery_rate(leakage.lookup(piece, table[order]), SECRET) <= 0.1


def test_half_the_tokens_are_read_as_well():
    model, geometry, piece = sent("llama", "int8", keep=9, by="value-norm")
    table = leakage.value_table(model, geometry)
    assert leakage.lookup(piece, table) == [SECRET[place] for place in piece.places]


@pytest.mark.parametrize(("family", "scheme"), SENT)
def test_the_last_layer_alone_gives_the_text(family, scheme):
    """Keeping layer 0 back does not help."""
    model, geometry, piece = sent(family, scheme, layers=[1])
    with pytest.raises(Refusal, match="lookup needs layer 0"):
        leakage.lookup(piece, torch.zeros(1, 1))
    read = leakage.of_layers(1)
    seen = leakage.captured(piece, read)
    found = leakage.collide(model, geometry, seen, read, [1], batch=130)
    assert leakage.recovery_rate(found, SECRET) == 1


def test_another_models_weights_read_nothing():
    """The attack needs the model, which is public; with another one it is at chance."""
    _, _, piece = sent("llama", "bf16", layers=[1])
    base, geometry = room("qwen2", "float32")
    read = leakage.of_layers(1)
    seen = leakage.captured(piece, read)
    found = leakage.collide(base.model, geometry, seen, read, [1])
    assert leakage.recovery_rate(found, SECRET) <= 0.2


@pytest.mark.parametrize(("sender", "receiver"), [("qwen2", "gemma3")])
def test_what_a_public_fuser_makes_of_it_is_read_as_well(sender, receiver):
    base, geometry = room(sender, "float32")
    fuser = fuser_of(sender, receiver, "float32")
    piece = export_cache(base.model, geometry, SECRET)
    seen = leakage.guest_features(fuser(batch_of([piece])))[0]
    read = leakage.of_fuser(fuser)
    found = leakage.collide(base.model, geometry, seen, read, fuser.sender_layers)
    assert leakage.recovery_rate(found, SECRET) == 1
    shuffled = seen.flip(0)[:6]
    lost = leakage.collide(base.model, geometry, shuffled, read, fuser.sender_layers)
    assert leakage.recovery_rate(lost, SECRET[:6]) <= 0.2


def test_what_is_known_before_need_not_be_guessed():
    """A template that the slice leaves out is public; the text after it is read on top of it."""
    base, geometry = room("llama", "float32")
    piece = export_cache(base.model, geometry, SECRET, own=range(6), sink=False, layers=[1])
    read = leakage.of_layers(1)
    seen = leakage.captured(piece, read)
    told = {"model": base.model, "geometry": geometry, "seen_TW": seen, "read": read}
    found = leakage.collide(**told, layers=[1], known=SECRET[:6])
    assert found == SECRET[6:]
    everything = leakage.collide(**told, layers=[1], known=SECRET[:6], shortlist=VOCABULARY)
    assert everything == found


def test_the_attack_leaves_the_model_as_it_was():
    base, geometry = room("llama", "float32")
    ids = torch.tensor([SECRET])
    with torch.no_grad():
        before = base.model(ids).logits
        leakage.value_table(base.model, geometry)
        assert torch.equal(base.model(ids).logits, before)


def test_features_of_ones_own_cache_are_its_layers():
    base, geometry = room("llama", "float32")
    piece = export_cache(base.model, geometry, SECRET)
    shown = leakage.guest_features(pass_through(batch_of([piece])))
    assert torch.equal(shown[0], leakage.captured(piece, leakage.of_layers(0, 1)))


def test_rates_are_counted_place_by_place():
    assert leakage.recovery_rate([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="expected as many"):
        leakage.recovery_rate([1], [1, 2])
