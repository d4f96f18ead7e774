"""A sender's fault costs the answer this sender and no more, and the receipt names its kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedloom.refining import Request, Terms, local
from fedloom.slices.frames import encode
from fedloom.slices.slice import export_cache

from asking import asked, broken, lost, sender, standing
from rooms import fuser_of, room

WRONG = {
    "mutated": "integrity",
    "oversized": "integrity",
    "truncated": "gone",
    "noise": "integrity",
    "raises": "failed",
    "dies midway": "failed",
    "nan": "integrity",
    "another model": "integrity",
    "no bytes": "failed",
}


@pytest.mark.parametrize(("what", "cause"), WRONG.items(), ids=WRONG)
def test_what_is_wrong_with_one_sender_costs_that_sender(what, cause):
    answer = asked([sender("llama", broken(what)), sender("qwen2")])
    assert lost(answer) == {"llama": cause}
    assert answer.receipt.fallback == "fewer"
    assert answer.ids == asked([sender("qwen2")]).ids
    only = asked([sender("llama", broken(what))])
    assert (only.receipt.mode, only.receipt.fallback) == ("standalone", "standalone")
    assert only.ids == standing()


def test_frames_of_an_earlier_request_are_not_believed():
    replays = sender("llama", broken("replayed"))
    assert not lost(asked([replays]))
    again = asked([replays])
    assert lost(again) == {"llama": "integrity"}
    assert again.ids == standing()


def bare(what: str):
    """A slice that comes as it is, and is not what was asked for."""

    def ask(request: Request):
        base, geometry = room("llama")
        ids = base.tokenizer.encode(request.text)
        piece = export_cache(base.model, geometry, ids, ends=range(len(ids)))
        changed = {
            "a layer short": {part: {1: getattr(piece, part)[1]} for part in ("keys", "values")},
            "values short": {"values": {1: piece.values[1]}},
            "a layer too many": {"keys": {**piece.keys, 9: piece.keys[1]}},
            "another shape": {"keys": {n: x[:, :, :4] for n, x in piece.keys.items()}},
            "whole numbers": {"keys": {n: x.long() for n, x in piece.keys.items()}},
            "tokens short": {"places": piece.places[1:]},
            "no token": {"places": ()},
            "no ends": {"ends": ()},
            "ends short": {"ends": piece.ends[1:]},
        }
        return replace(piece, **changed[what])

    return ask


SHORT = ("a layer short", "values short", "a layer too many", "another shape", "whole numbers")
UNALIGNED = ("no ends", "ends short")


@pytest.mark.parametrize("what", [*SHORT, "tokens short", "no token"])
def test_a_slice_in_this_process_is_held_to_what_frames_are(what):
    answer = asked([sender("llama", bare(what)), sender("qwen2")])
    assert lost(answer) == {"llama": "integrity"}
    assert answer.ids == asked([sender("qwen2")]).ids


@pytest.mark.parametrize("what", [*UNALIGNED, "a layer short"])
@pytest.mark.parametrize("way", ["slice", "frames"])
def test_residual_fusion_needs_all_layers_and_where_each_token_ends(what, way):
    fuser = fuser_of("llama", "qwen3", mode="residual")

    def framed(request):
        piece = bare(what)(request)
        return encode(piece, request.scheme, request.key, request.session)

    answer = asked([sender("llama", bare(what) if way == "slice" else framed, fuser)])
    assert lost(answer) == {"llama": "integrity"}
    assert answer.ids == standing()
    whole = asked([sender("llama", None, fuser)])
    assert not lost(whole)


def bare_whole(request):
    base, geometry = room("llama")
    return export_cache(base.model, geometry, base.tokenizer.encode(request.text))


def test_a_text_longer_than_was_asked_for_is_not_taken_in():
    answer = asked([sender("llama", bare_whole)], Terms(max_tokens=4))
    assert lost(answer) == {"llama": "integrity"}


def test_a_receiver_that_cannot_hold_a_prefix_drops_it(monkeypatch):
    """A rotary embedding whose frequencies change (longrope) has no room behind a long prefix."""
    from fedloom.adapters import fused

    base = room("qwen3")[0]
    short = [replace(rotary, limit=14) for rotary in fused.rotaries_of(base.model)]
    monkeypatch.setattr(fused, "rotaries_of", lambda model: short)
    answer = asked([sender("llama"), sender("qwen2")])  # twelve tokens each
    first, second = answer.receipt.sources
    assert (first.status, second.status, second.cause) == ("used", "fallback", "unfit")
    assert "position 23" in second.reason
    assert answer.ids == asked([sender(first.name)]).ids


@pytest.mark.parametrize("odd", [{"tail": 1}, {"sink": "receiver"}, {"mode": "residual"}], ids=str)
def test_of_fusers_taught_differently_the_most_are_heard(odd):
    plain = [sender("qwen2"), sender("gemma3")]
    for other in ("llama", "qwen2"):
        mixed = [sender(other, fuser=fuser_of(other, "qwen3", **odd)), *plain[other == "qwen2" :]]
        answer = asked(mixed)
        rest = mixed[1:]
        if len(rest) == 1:  # of equals, the first by its model's hash
            rest = [min(mixed, key=lambda s: s.geometry.model)]
        names = {s.name for s in mixed} - {s.name for s in rest}
        assert lost(answer) == dict.fromkeys(names, "unfit")
        assert answer.ids == asked(rest).ids
        assert answer.receipt.fallback == "fewer"
    reason = next(s.reason for s in answer.receipt.sources if s.status == "fallback")
    assert "heard in another way: mode" in reason


def test_ones_own_model_goes_with_any_prefix_and_with_no_residual():
    own = local(*room("qwen3"), None, "own")
    assert not lost(asked([own, sender("llama", fuser=fuser_of("llama", "qwen3", tail=1))]))
    residual = sender("llama", fuser=fuser_of("llama", "qwen3", mode="residual"))
    assert lost(asked([own, residual])) == {"own": "unfit"}
