"""What a receipt says of a question that was reworded before others saw it."""

from __future__ import annotations

import pytest

from fedloom.errors import Refusal
from fedloom.refining import check_private, local, marked, measured, refine, reworded_text
from fedloom.refining.rephrasing import Attempt, Entity, Rephrased, Standalone

from rooms import fuser_of, room

ASKED = "Where does my neighbour Rosa Diaz buy bread?"
ENTITY = Entity("name", "Rosa Diaz")


def passes(base, question, **_):
    tried = (Attempt("x", "copied"), Attempt("Where is bread sold?", ""))
    other = type(question)(question.subject, "Where is bread sold?", question.choices, 0)
    return Rephrased(other, (ENTITY,), tried)


def fails(base, question, **_):
    return Standalone((ENTITY,), (Attempt("x", "copied"), Attempt("y", "no question")))


def test_what_passes_is_shown_and_what_does_not_stays():
    base = room("qwen3")[0]
    good = reworded_text(base, ASKED, seed=0, tries=4, reword=passes)
    assert good.question.question == "Where is bread sold?"
    assert good.facts() == {"rephrased": True, "retries": 1, "standalone": False, "removed": 1}
    bad = reworded_text(base, ASKED, seed=0, tries=2, reword=fails)
    assert bad.question is None
    assert bad.facts() == {"rephrased": False, "retries": 2, "standalone": True, "removed": 1}


def test_the_model_itself_is_asked_and_no_options_are_needed():
    found = reworded_text(room("qwen3")[0], ASKED, seed=0, tries=1)
    assert found.removed == 1
    assert found.facts()["retries"] == (0 if found.question else 1)


def test_a_receipt_says_so_and_keeps_its_answer():
    receiver = room("qwen3")[0]
    answer = refine(receiver, ASKED, [], max_new_tokens=2)
    facts = reworded_text(receiver, ASKED, seed=0, tries=2, reword=fails).facts()
    told = marked(answer, facts)
    assert (told.receipt.fallback, told.receipt.rephrasing) == ("standalone", facts)
    assert told.ids == answer.ids
    assert marked(answer, None) is answer
    assert marked(answer, {**facts, "standalone": False}).receipt.fallback == ""


def test_residual_fusers_cannot_hear_other_words():
    sender, geometry = room("llama")
    check_private([local(sender, geometry, fuser_of("llama", "qwen3"))])
    residual = local(sender, measured(sender), fuser_of("llama", "qwen3", mode="residual"), "llama")
    with pytest.raises(Refusal, match="cannot be asked in other words"):
        check_private([residual])
