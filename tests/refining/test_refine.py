"""An answer with whoever answers in time: what falls away is named, and nothing else changes."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch

from fedloom.refining import Sender, Terms, export, local, prefixed
from fedloom.slices.slice import export_cache

from asking import (
    OTHERS,
    PROMPT,
    QUICK,
    asked,
    broken,
    frames,
    lost,
    receiver,
    sender,
    standing,
)
from rooms import fuser_of, piece_of, room, shut


def test_no_sender_is_standalone_token_for_token():
    answer = asked([])
    assert answer.ids == standing()
    assert (answer.receipt.mode, answer.receipt.fallback) == ("standalone", "")


def test_order_of_senders_and_of_arrival_does_not_matter():
    def slow(family, seconds):
        def ask(request):
            time.sleep(seconds)
            return frames(family, request)

        return sender(family, ask)

    plain = [asked(order) for order in itertools.permutations(map(sender, OTHERS))]
    late = [
        asked([slow(f, s) for f, s in zip(OTHERS, seconds, strict=True)])
        for seconds in ((0.0, 0.1, 0.2), (0.2, 0.1, 0.0))
    ]
    first = plain[0]
    assert first.ids != standing()
    assert all(torch.equal(a.logits, first.logits) and a.ids == first.ids for a in plain + late)
    assert [s.model for s in first.receipt.sources] == sorted(
        s.model for s in first.receipt.sources
    )


def test_receipt_counts_what_was_on_the_wire_and_is_json():
    terms = Terms(scheme="int8", share=0.5)
    sizes = []

    def ask(request):
        sent = frames("llama", request)
        sizes.append(sum(map(len, sent)))
        return sent

    receipt = asked([sender("llama", ask)], terms).receipt
    (source,) = receipt.sources
    assert source.bytes == receipt.bytes == sizes[0]
    assert source.tokens == 6  # half of bos and eleven bytes
    assert (source.status, source.gates_open, source.gates) == ("used", 2, 2)
    assert 0 < source.norm < 100
    tree = json.loads(json.dumps(receipt.to_dict()))
    assert {"wait", "fuse", "prefill", "guard", "decode", "total"} <= tree["seconds"].keys()
    assert PROMPT not in json.dumps(tree)


def test_one_who_is_too_late_is_not_waited_for():
    def never(request):
        time.sleep(30)
        return frames("llama", request)

    def dribbles(request):
        for frame in frames("gemma3", request):
            time.sleep(0.5)
            yield frame

    senders = [sender("llama", never), sender("gemma3", dribbles), sender("qwen2")]
    began = time.monotonic()
    answer = asked(senders, Terms(deadline=0.8))
    assert time.monotonic() - began < 2.5
    assert lost(answer) == {"llama": "deadline", "gemma3": "deadline"}
    assert answer.receipt.fallback == "fewer"
    assert answer.ids == asked([sender("qwen2")]).ids


def test_missing_and_foreign_fusers_are_a_fallback():
    base, geometry = room("llama")
    bare = Sender(geometry, lambda request: export(base, geometry, request), None, "bare")
    other = Sender(geometry, bare.ask, fuser_of("llama", "qwen2"), "other")
    answer = asked([bare, other, sender("qwen2")])
    assert lost(answer) == {"bare": "no-fuser", "other": "no-fuser"}
    assert answer.receipt.bytes > 0
    own = local(*room("qwen3"), None, "own")  # one's own model needs none
    assert not lost(asked([own]))


def test_who_is_shut_is_not_asked():
    def ask(request):
        raise AssertionError("asked")

    answer = asked([sender("llama", ask, shut(fuser_of("llama", "qwen3")))])
    assert [s.status for s in answer.receipt.sources] == ["shut"]
    assert answer.receipt.fallback == ""
    assert answer.ids == standing()


def test_words_take_over_when_no_cache_is_left():
    said = []

    def words(seconds, fallen):
        said.append(seconds)
        assert [sender.name for sender in fallen] == ["llama"]
        return receiver().tokenizer.encode("they say: a cheese. " + PROMPT)

    answer = asked([sender("llama", broken("raises"))], words=words)
    assert (answer.receipt.mode, answer.receipt.fallback) == ("t2t", "t2t")
    assert answer.ids != standing()
    assert 0 < said[0] <= QUICK.deadline
    assert answer.receipt.prompt_tokens == len(words(1.0, [sender("llama")]))
    said.pop()
    silent = asked([sender("llama", broken("raises"))], words=lambda *_: None)
    assert silent.receipt.fallback == "standalone"
    asked([sender("llama")], words=words)
    assert len(said) == 1  # not where a cache was heard


def test_a_cache_out_of_range_is_left_out():
    fuser = fuser_of("llama", "qwen3")
    base, geometry = room("llama")

    def loud(request):
        piece = export_cache(base.model, geometry, base.tokenizer.encode(request.text))
        for values in piece.values.values():
            values *= 50
        return piece

    quiet = asked([sender("llama", fuser=fuser)]).receipt.sources[0].norm
    terms = Terms(max_norm=2 * quiet)
    assert not lost(asked([sender("llama", fuser=fuser)], terms))
    assert lost(asked([sender("llama", loud, fuser)], terms)) == {"llama": "guard"}


def test_answers_that_are_too_far_off_lose_senders_one_by_one():
    senders = [sender(f) for f in OTHERS]
    free = asked(senders, Terms(max_kl=1e6))
    assert not lost(free)
    far = free.receipt.guards["kl"]
    assert far > 0.01
    none = asked(senders, Terms(max_kl=1e-9))
    assert set(lost(none).values()) == {"guard"}
    assert none.ids == standing()
    calm = asked(senders, Terms(max_kl=0.7 * far))
    assert 0 < calm.receipt.guards["kl"] <= 0.7 * far or calm.receipt.fallback == "standalone"
    assert calm.receipt.guards["kl-before"] == far


def test_a_fuser_that_makes_infinities_is_left_out():
    fuser = fuser_of("llama", "qwen3")
    with torch.no_grad():
        fuser.receiver_mean[0, 0] = torch.inf
    answer = asked([sender("llama", fuser=fuser), sender("qwen2")])
    assert lost(answer) == {"llama": "not-finite"}
    assert answer.ids == asked([sender("qwen2")]).ids


def test_a_bias_that_ruins_the_logits_is_left_out():
    fuser = fuser_of("llama", "qwen3")
    with torch.no_grad():
        fuser.bias.fill_(torch.nan)
    answer = asked([sender("llama", fuser=fuser), sender("qwen2")])
    assert lost(answer) == {"llama": "not-finite"}
    assert torch.equal(answer.logits, asked([sender("qwen2")]).logits)


def test_senders_read_what_they_are_shown():
    seen = []

    def ask(request):
        seen.append(request.text)
        return frames("llama", request)

    asked([sender("llama", ask)], shown="and what might it be?")
    assert seen == ["and what might it be?"]


def test_residual_fusers_work_the_same_way():
    fuser = fuser_of("llama", "qwen3", mode="residual")
    answer = asked([sender("llama", fuser=fuser)])
    assert answer.receipt.mode == "residual"
    assert not lost(answer)
    gone = asked([sender("llama", broken("raises"), fuser)])
    assert gone.ids == standing()


def test_a_text_that_is_too_long_is_refused_by_the_sender():
    answer = asked([sender("llama")], Terms(max_tokens=4))
    assert lost(answer) == {"llama": "failed"}
    assert "at most 4" in answer.receipt.sources[0].reason


def test_the_vote_needs_three_and_finds_the_one_who_decides():
    from fedloom.refining.guards import voted_out

    def read(names):  # "c" wins wherever it is heard
        return torch.tensor([0.0, 1.0] if "c" in names else [1.0, 0.0])

    assert voted_out(["a", "b", "c"], read) == "c"
    assert voted_out(["a", "c"], read) is None
    assert voted_out(["a", "b", "d"], read) is None
    answer = asked([sender(f) for f in OTHERS], Terms(vote=True))
    assert sum(cause == "guard" for cause in lost(answer).values()) <= 1


@pytest.mark.parametrize("taught", [{"tail": 1}, {"sink": "receiver"}, {"tail": 3}])
def test_a_fuser_is_heard_as_it_was_taught(taught):
    """The part of the prompt that its fuser's training read alone is read alone here."""
    fuser, ids = fuser_of("llama", "qwen3", **taught), receiver().tokenizer.encode(PROMPT)
    # The same ids at both ends: what travels is 16 bits wide, hence a sender that hands over all.
    piece = piece_of("llama", room("llama")[0].tokenizer.encode(PROMPT))
    answer = asked([Sender(room("llama")[1], lambda request: piece, fuser, "llama")])
    wanted = prefixed(*room("qwen3"), ids, [(fuser, piece)])
    assert torch.equal(answer.logits, wanted.logits[-1])
    plain = fuser_of("llama", "qwen3")
    among_all = prefixed(*room("qwen3"), ids, [(plain, piece)])
    assert not torch.equal(answer.logits, among_all.logits[-1])
