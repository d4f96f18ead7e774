"""The laws of a prefix: a longer prompt where it is one's own, nothing at all where it is shut."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from fedloom.adapters.columns import teach
from fedloom.adapters.fused import FusedContext
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.models.offsets import token_ends
from fedloom.refining import prefixed
from fedloom.slices.geometry import geometry_of
from fedloom.slices.slice import batch_of, export_cache

from grafts import FAMILIES
from rooms import PAIRS, PROMPT, TEXT, alone, fuser_of, piece_of, room, shut

WIDE = ("llama", "qwen2", "qwen3")  # every layer sees everything


def refined(receiver, sources, prompt=PROMPT, **told):
    base, geometry = room(receiver)
    return prefixed(base, geometry, prompt, sources, **told)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", WIDE)
def test_own_cache_as_prefix_is_a_longer_prompt(family, dtype):
    base, geometry = room(family, dtype)
    logits, answer = alone(base, TEXT + PROMPT)
    got = prefixed(base, geometry, PROMPT, [(None, piece_of(family, dtype=dtype))])
    # float64 keeps the float32 rounding of sines at places counted from elsewhere
    tolerance = 1e-4 if dtype == "float32" else 1e-6
    torch.testing.assert_close(got.logits, logits[len(TEXT) :], rtol=0, atol=tolerance)
    assert got.generate(8) == answer


@torch.no_grad()
def test_a_layer_that_slides_a_window_never_sees_the_prefix():
    """Gemma3 against the same model under masks written here, layer kind by layer kind."""
    base, geometry = room("gemma3")
    T, N = len(TEXT), len(PROMPT)
    query, key = torch.arange(T + N)[:, None], torch.arange(T + N)[None]
    causal = key <= query
    window = causal & (query - key < geometry.windows[0])
    apart = window & ~((query >= T) & (key < T))
    masks = {"full_attention": causal[None, None], "sliding_attention": apart[None, None]}
    wanted = base.model(torch.tensor([TEXT + PROMPT]), attention_mask=masks).logits[0, T:]
    got = refined("gemma3", [(None, piece_of("gemma3"))])
    torch.testing.assert_close(got.logits, wanted, rtol=0, atol=1e-6)
    assert (got.logits - alone(base, PROMPT)[0]).abs().max() > 1e-2
    assert len(got.generate(20)) == 20  # beyond the window, step by step


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sender_is_standalone_bit_for_bit(family):
    base, _ = room(family)
    logits, answer = alone(base, PROMPT)
    got = refined(family, [])
    assert torch.equal(got.logits, logits)
    assert got.generate(8) == answer


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_shut_gates_are_standalone_bit_for_bit(sender, receiver):
    base, _ = room(receiver)
    logits, answer = alone(base, PROMPT)
    fuser, piece = fuser_of(sender, receiver), piece_of(sender)
    heard = refined(receiver, [(fuser, piece)])
    assert heard.senders == (piece.geometry.model,)
    assert (heard.logits - logits).abs().max() > 1e-2  # noise, but it is heard
    got = refined(receiver, [(shut(fuser), piece)])
    assert got.senders == ()
    assert torch.equal(got.logits, logits)
    assert got.generate(8) == answer
    assert torch.equal(base.model(torch.tensor([PROMPT])).logits[0], logits)  # as it was before


@pytest.mark.parametrize("closed", [0, 1])
@torch.no_grad()
def test_a_shut_layer_computes_what_it_would_alone(closed):
    """One layer of two: against the same slots hidden from that layer by a mask of minus infinity.

    Values of zero would not do: the keys still take their share of the attention.
    """
    base, geometry = room("qwen3")
    fuser, piece = fuser_of("llama", "qwen3"), piece_of("llama")
    wanted = FusedContext(base.model, [fuser(batch_of([piece]))])
    wanted.columns.bias[closed] = torch.full((1, piece.tokens), -torch.inf)
    ids = torch.tensor([PROMPT])
    logits = wanted.read(ids)[0]
    got = prefixed(base, geometry, PROMPT, [(shut(fuser, closed), piece)])
    torch.testing.assert_close(got.logits, logits, rtol=0, atol=1e-10)
    zeroed = fuser_of("llama", "qwen3")(batch_of([piece]))
    zeroed.values[closed].zero_()
    assert (FusedContext(base.model, [zeroed]).read(ids)[0] - logits).abs().max() > 1e-3


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
@pytest.mark.parametrize("start", [1, 700])
def test_where_zero_is_does_not_matter(sender, receiver, start):
    source = [(fuser_of(sender, receiver), piece_of(sender))]
    here, there = (refined(receiver, source, start=at) for at in (0, start))
    # angles of places further out are rounded in float32
    torch.testing.assert_close(here.logits, there.logits, rtol=0, atol=2e-3)
    assert here.generate(8) == there.generate(8)


@pytest.mark.parametrize("receiver", ["qwen3", "gemma3"])
@torch.no_grad()
def test_the_order_of_slots_in_memory_does_not_matter(receiver):
    """Positions are in the keys: the slots themselves may stand in any order."""
    base, _ = room(receiver)
    guests = fuser_of("llama", receiver)(batch_of([piece_of("llama")]))
    ids = torch.tensor([PROMPT])
    plain, mixed = (FusedContext(base.model, [guests]) for _ in range(2))
    order = torch.randperm(plain.slots, generator=torch.Generator().manual_seed(0))
    for n in guests.keys:
        layer = mixed.cache.layers[n]
        layer.keys, layer.values = layer.keys[:, :, order], layer.values[:, :, order]
    torch.testing.assert_close(mixed.read(ids), plain.read(ids), rtol=0, atol=1e-10)


def test_the_order_of_arrival_does_not_matter_and_that_of_seats_does(record_property):
    """Three senders: sorted by hash, so one answer; seated otherwise, others."""
    senders = ("llama", "qwen2", "gemma3")
    sources = [(fuser_of(s, "qwen3"), piece_of(s)) for s in senders]
    logits = [refined("qwen3", order).logits for order in itertools.permutations(sources)]
    assert all(torch.equal(logits[0], x) for x in logits)
    base, _ = room("qwen3")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        made = [f(batch_of([piece])) for f, piece in sources]
        seated = [FusedContext(base.model, o).read(ids)[0] for o in itertools.permutations(made)]
    gap = max(float((x - seated[0]).abs().max()) for x in seated[1:])
    record_property("largest difference between orders of seats", gap)
    assert 1e-6 < gap < 50
    spread = [x.log_softmax(-1) for x in seated]
    assert all(x.isfinite().all() for x in spread)


def test_two_senders_with_different_open_layers_share_a_cache():
    """Layers then hold different numbers of slots, which one mask for all could not say."""
    one, two = fuser_of("llama", "qwen3"), fuser_of("qwen2", "qwen3")
    pieces = piece_of("llama"), piece_of("qwen2", TEXT[:5])
    both = refined("qwen3", [(shut(one, 0), pieces[0]), (shut(two, 1), pieces[1])])
    assert len(both.senders) == 2
    first_shut = refined("qwen3", [(shut(one), pieces[0]), (two, pieces[1])])
    only = refined("qwen3", [(two, pieces[1])])
    assert torch.equal(first_shut.logits, only.logits)
    assert (both.logits - only.logits).abs().max() > 1e-3
    assert len(both.generate(5)) == 5


@pytest.mark.parametrize("receiver", ["qwen3", "gemma3"])
@torch.no_grad()
def test_ragged_batches_are_each_row_alone(receiver):
    """Prefixes of different lengths from two senders, prompts padded on the left, then decoding."""
    base, geometry = room(receiver)
    texts = (TEXT, TEXT[:4], TEXT[:11])
    prompts = (PROMPT, PROMPT[:6], PROMPT[:2])
    fusers = [fuser_of("llama", receiver), fuser_of("qwen2", receiver)]
    pieces = [
        [piece_of("llama", t) for t in texts],
        [piece_of("qwen2", t[::-1][: 3 + i]) for i, t in enumerate(texts)],
    ]
    made = [f(batch_of(p)) for f, p in zip(fusers, pieces, strict=True)]
    made.sort(key=lambda guests: guests.sender)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    used = torch.tensor([[t >= longest - len(p) for t in range(longest)] for p in prompts])
    if receiver == "gemma3":  # its sliding cache counts padding as tokens: keep within the window
        assert longest + 3 <= geometry.windows[0] + 2
    context = FusedContext(base.model, made)
    got = [context.read(ids, used)[:, -1]]
    for step in (65, 66, 67):
        got.append(context.read(torch.full((3, 1), step))[:, -1])
    for row in range(3):
        sources = [(f, p[row]) for f, p in zip(fusers, pieces, strict=True)]
        single = prefixed(base, geometry, [*prompts[row], 65, 66, 67], sources).logits[-4:]
        batched = torch.stack([x[row] for x in got])
        torch.testing.assert_close(batched, single, rtol=0, atol=1e-5)


def test_requests_do_not_disturb_each_other():
    """A slice serves many requests, and another thread's request sees no slot of ours."""
    base, _ = room("qwen3")
    logits, _ = alone(base, PROMPT)
    source = [(fuser_of("llama", "qwen3"), piece_of("llama"))]
    first = refined("qwen3", source)
    before, answer = first.logits.clone(), first.generate(6)
    again = refined("qwen3", source)
    assert torch.equal(again.logits, before)
    found = []
    busy = threading.Thread(target=lambda: found.extend(again.generate(6)))
    busy.start()
    plain = [base.model(torch.tensor([PROMPT])).logits[0] for _ in range(5)]
    busy.join()
    assert found == answer
    assert all(torch.equal(x, logits) for x in plain)


@pytest.mark.parametrize("text", ["Zoë jí 🍎 и хлеб", "a" * 90], ids=["unicode", "long"])
def test_a_sender_may_read_anything_of_any_length(text):
    base, _ = room("llama")
    piece = piece_of("llama", base.tokenizer.encode(text))
    assert piece.tokens > len(PROMPT)
    got = refined("gemma3", [(fuser_of("llama", "gemma3"), piece)])
    assert got.logits.isfinite().all()
    assert got.logits.shape[0] == len(PROMPT)


def test_wrong_pairs_are_refused():
    base, geometry = room("qwen3")
    piece = piece_of("llama")
    with pytest.raises(Refusal, match="fetch the fuser of this pair"):
        prefixed(base, geometry, PROMPT, [(fuser_of("llama", "qwen2"), piece)])
    with pytest.raises(Refusal, match="fetch the fuser of this pair"):
        prefixed(base, geometry, PROMPT, [(fuser_of("qwen2", "qwen3"), piece)])
    with pytest.raises(Refusal, match="fetch the fuser of this pair"):
        prefixed(base, geometry, PROMPT, [(None, piece)])
    fuser, half = fuser_of("llama", "qwen3"), piece_of("llama", layers=[1])
    with pytest.raises(Refusal, match="lacks the sender's layer 0"):
        prefixed(base, geometry, PROMPT, [(fuser, half)])
    with pytest.raises(Refusal, match="empty prompt"):
        prefixed(base, geometry, [], [])
    other = fuser_of("qwen2", "qwen3", mode="residual")
    mixed = [(fuser, piece), (other, piece_of("qwen2"))]
    with pytest.raises(Refusal, match="one kind"):
        prefixed(base, geometry, PROMPT, mixed)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_residual_fusion_with_shut_gates_is_standalone(sender, receiver):
    base, geometry = room(receiver)
    ids, ends = token_ends(base.tokenizer, "Käse?")
    logits, answer = alone(base, ids)
    fuser = fuser_of(sender, receiver, mode="residual")
    piece = piece_of(sender, ids, ends=ends)
    heard = prefixed(base, geometry, ids, [(fuser, piece)], ends=ends)
    assert (heard.logits[-1] - logits[-1]).abs().max() > 1e-3
    assert len(heard.generate(4)) == 4
    got = prefixed(base, geometry, ids, [(shut(fuser), piece)], ends=ends)
    assert torch.equal(got.logits, logits)
    assert got.generate(8) == answer


def test_residual_fusion_adds_what_it_says_and_nothing_elsewhere():
    """By hand: the receiver's own cache, plus the fuser's output turned to each token's place."""
    base, geometry = room("qwen3")
    ids, ends = token_ends(base.tokenizer, "ein Haus")  # a byte a character: tokens pair one by one
    fuser, piece = fuser_of("llama", "qwen3", mode="residual"), piece_of("llama", ids, ends=ends)
    own = batch_of([export_cache(base.model, geometry, ids[:-1])])
    with torch.no_grad():
        made = fuser(batch_of([piece_of("llama", ids[:-1])]), own)
    values = {n: own.values[n] + made.values[n] for n in made.values}
    got = prefixed(base, geometry, ids, [(fuser, piece)], ends=ends)
    for n, wanted in values.items():
        held = got._context.cache.layers[n].values[:, :, : len(ids) - 1]
        torch.testing.assert_close(held, wanted, rtol=0, atol=1e-9)
    with pytest.raises(Refusal, match="without its tokens' ends"):
        prefixed(base, geometry, ids, [(fuser, piece_of("llama", ids))], ends=ends)
    with pytest.raises(Refusal, match="with 0 ends"):
        prefixed(base, geometry, ids, [(fuser, piece)])


def test_a_model_that_attends_otherwise_is_refused():
    model = tiny.build("llama")
    model.set_attn_implementation("eager")
    geometry_of(model, "m", "t")
    with pytest.raises(Refusal, match="attends by eager"):
        teach(model)
