"""Two models refine each other: at the same time, which is not one after the other."""

from __future__ import annotations

import pytest
import torch

from fedloom.errors import Refusal
from fedloom.refining import Party, mutual, prefixed
from fedloom.refining.refine import measured

from rooms import PROMPT, alone, fuser_of, piece_of, room, shut

PAIR = ("llama", "qwen3")


def parties():
    return [Party(room(family)[0], PROMPT) for family in PAIR]


def fusers(**told):
    made = {(0, 1): fuser_of(*PAIR, **told), (1, 0): fuser_of(*PAIR[::-1], **told)}
    return made


def test_no_round_is_everyone_alone():
    for family, made in zip(PAIR, mutual(parties(), fusers(), rounds=0), strict=True):
        logits, answer = alone(room(family)[0], PROMPT)
        assert torch.equal(made.logits, logits)
        assert made.generate(8) == answer


def test_a_round_is_two_answers_from_the_caches_before_it():
    both = mutual(parties(), fusers())
    for place, made in enumerate(both):
        other = PAIR[1 - place]
        base, geometry = room(PAIR[place])
        source = (fusers()[1 - place, place], piece_of(other, PROMPT))
        wanted = prefixed(base, geometry, PROMPT, [source])
        assert torch.equal(made.logits, wanted.logits)


def test_one_by_one_is_another_thing_and_only_for_those_who_come_later():
    together, apart = (mutual(parties(), fusers(), schedule=s) for s in ("together", "one-by-one"))
    assert torch.equal(together[0].logits, apart[0].logits)
    assert (together[1].logits - apart[1].logits).abs().max() > 1e-3


def test_who_comes_first_does_not_matter_together():
    forth = mutual(parties(), fusers(), rounds=2)
    swapped = {(1 - s, 1 - r): fuser for (s, r), fuser in fusers().items()}
    back = mutual(parties()[::-1], swapped, rounds=2)
    for made, other in zip(forth, back[::-1], strict=True):
        torch.testing.assert_close(made.logits, other.logits, rtol=0, atol=1e-9)


def test_a_second_round_reads_what_the_first_has_refined():
    once, twice = mutual(parties(), fusers()), mutual(parties(), fusers(), rounds=2)
    assert (once[0].logits - twice[0].logits).abs().max() > 1e-3
    closed = {pair: shut(fuser) for pair, fuser in fusers().items()}
    still = mutual(parties(), closed, rounds=2)
    for family, made in zip(PAIR, still, strict=True):
        torch.testing.assert_close(
            made.logits, alone(room(family)[0], PROMPT)[0], rtol=0, atol=1e-9
        )


def test_a_slice_of_ones_own_is_what_a_longer_prompt_holds():
    """Keys turned back behind a prefix: the tail of the joined prompt's own export."""
    base, geometry = room("qwen3")
    text = list(b"a cheese for")
    made = prefixed(base, geometry, PROMPT, [(None, piece_of("qwen3", text))])
    got, whole = made.own_slice(geometry), piece_of("qwen3", text + PROMPT)
    for n in geometry.full:
        for mine, all_of_it in ((got.keys, whole.keys), (got.values, whole.values)):
            torch.testing.assert_close(mine[n], all_of_it[n][:, len(text) :], rtol=0, atol=1e-5)


def test_what_cannot_be_is_refused():
    with pytest.raises(Refusal, match="rounds = -1"):
        mutual(parties(), {}, rounds=-1)
    with pytest.raises(Refusal, match="residual fusers"):
        mutual(parties(), fusers(mode="residual"))
    windowed = [Party(room("gemma3")[0], PROMPT), Party(room("llama")[0], PROMPT)]
    pair = {(0, 1): fuser_of("gemma3", "llama"), (1, 0): fuser_of("llama", "gemma3")}
    assert len(mutual(windowed, pair)) == 2
    with pytest.raises(Refusal, match="lacks the sender's layer 0"):
        mutual(windowed, pair, rounds=2)
    assert measured(windowed[0].base).windows[0]


@pytest.mark.parametrize("told", [{"rounds": 2}, {"schedule": "one-by-one"}])
def test_fusers_with_a_tail_have_one_round_together(told):
    """They leave the prompt's own cache as it was: a second round would exchange the same."""
    assert len(mutual(parties(), fusers(tail=1))) == 2
    with pytest.raises(Refusal, match="one round together"):
        mutual(parties(), fusers(tail=1), **told)
