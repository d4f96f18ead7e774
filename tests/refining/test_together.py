"""Co-C2C by frames and with receipts is ``mutual``, bit for bit at the wire's precision."""

from __future__ import annotations

import pytest
import torch

from fedloom.errors import Refusal
from fedloom.refining import Party, Terms, mutual, together

from rooms import alone, fuser_of, room, shut

PAIR, TEXT = ("llama", "qwen3"), "what is it?"


def bases(families=PAIR):
    return [room(family)[0] for family in families]


def parties(families=PAIR):
    return [Party(base, base.tokenizer.encode(TEXT)) for base in bases(families)]


def fusers(families=PAIR, **told):
    places = range(len(families))
    return {
        (s, r): fuser_of(families[s], families[r], **told) for s in places for r in places if s != r
    }


def met(families=PAIR, made=None, rounds=1, **terms):
    made = fusers(families) if made is None else made
    told = {"rounds": rounds, "terms": Terms(**terms), "max_new_tokens": 6, "stop": ()}
    return together(bases(families), made, TEXT, **told)


def causes(answer):
    return {source.name: source.cause for source in answer.receipt.sources}


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_it_is_mutual_bit_for_bit(scheme, rounds):
    wanted = mutual(parties(), fusers(), rounds=rounds, scheme=scheme)
    answers = met(rounds=rounds, scheme=scheme)
    for answer, made in zip(answers, wanted, strict=True):
        assert torch.equal(answer.logits, made.logits[-1])
        assert answer.ids == made.generate(6)
        assert causes(answer) in ({"tiny:llama": ""}, {"tiny:qwen3": ""})
    exact = mutual(parties(), fusers(), rounds=rounds)
    assert not torch.equal(exact[0].logits, wanted[0].logits)  # the wire's precision is a fact


def test_three_meet_and_a_pair_without_a_fuser_is_named():
    families = (*PAIR, "qwen2")
    some = fusers(families)
    del some[0, 1], some[2, 1]
    answers = met(families, some, rounds=2)
    assert causes(answers[0]) == {"tiny:qwen3": "", "tiny:qwen2": ""}
    assert causes(answers[1]) == {"tiny:llama": "no-fuser", "tiny:qwen2": "no-fuser"}
    assert answers[1].receipt.fallback == "standalone"
    ids = parties()[1].prompt
    assert answers[1].ids == alone(bases()[1], ids, 6)[1]
    wanted = mutual(parties(families), some, rounds=2, scheme="bf16")
    assert all(torch.equal(a.logits, w.logits[-1]) for a, w in zip(answers, wanted, strict=True))


def test_shut_fusers_leave_everyone_alone():
    closed = {pair: shut(fuser) for pair, fuser in fusers().items()}
    for base, answer in zip(bases(), met(made=closed, rounds=2), strict=True):
        assert answer.ids == alone(base, base.tokenizer.encode(TEXT), 6)[1]
        assert (answer.receipt.mode, answer.receipt.fallback) == ("standalone", "")


def test_a_refined_cache_has_no_windows_to_hand_over():
    """After one round it has; in a second one it is missing, and the other is still heard."""
    families = ("gemma3", "llama")
    assert causes(met(families)[1]) == {"tiny:gemma3": ""}
    windowed, other = met(families, rounds=2)
    assert causes(windowed) == {"tiny:llama": ""}
    assert causes(other) == {"tiny:gemma3": "failed"}
    assert "slides a window" in other.receipt.sources[0].reason
    assert other.receipt.fallback == "standalone"


def test_what_cannot_be_is_refused():
    with pytest.raises(Refusal, match="two or more"):
        met(PAIR[:1], {})
    with pytest.raises(Refusal, match="two or more, and 1 or more"):
        met(rounds=0)
    with pytest.raises(Refusal, match="whole caches"):
        met(share=0.5)
    with pytest.raises(Refusal, match="a residual fuser"):
        met(made=fusers(mode="residual"))
    with pytest.raises(Refusal, match="take one round"):
        met(made=fusers(tail=1), rounds=2)
    assert len(met(made=fusers(tail=1))) == 2
    answers = met(max_tokens=64)
    assert all(answer.receipt.mode == "prefix" for answer in answers)
    with pytest.raises(Refusal, match="at most 4"):
        met(max_tokens=4)
