"""What counts as identifying, what a rephrasing must keep, and what happens when none passes."""

from __future__ import annotations

import pytest
import torch

from fedloom.data.prompts import encode_question
from fedloom.data.questions import Question
from fedloom.evaluation import score_rows
from fedloom.models.base import load_base
from fedloom.refining.rephrasing import (
    Rephrased,
    Standalone,
    checked,
    entities,
    entity_recall,
    leaked,
    rephrase,
    scrub,
)
from fedloom.refining.text import (
    Written,
    background,
    backgrounds,
    best_single,
    shortened,
    vote,
    with_context,
)
from fedloom.refining.writing import (
    chosen,
    continuation_scores,
    letter_scores,
    own_choice,
    write,
    write_many,
)

from rooms import alone

CASE = Question(
    "law",
    "On 12 March 2021 my client Rosa Diaz (rosa@diaz.example, case 2021-CV-0113) left the shop"
    " without paying for a coat. Which offence would the prosecutor charge?",
    ("Theft", "Fraud", "Arson", "None of these"),
    0,
)
GOOD = (
    "Somebody walks out of a shop wearing a coat that was never bought; what charge is the"
    " prosecutor likely to bring for that offence?"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Write to a.b+c@x-y.org now", {"a.b+c@x-y.org"}),
        ("See https://x.org/a?b=1 please", {"https://x.org/a?b=1"}),
        ("Born 1999-12-31, moved 3/4/2020", {"1999-12-31", "3/4/2020"}),
        ("We met on March 3rd, 1999 there", {"March 3rd, 1999"}),
        ("Paid late in May 2022 or Sept. 2021", {"May 2022", "Sept. 2021"}),
        ("Call +49 30 1234567 or 555-0199", {"+49 30 1234567", "555-0199"}),
        ("Badge AB-1234 and account 12345678", {"AB-1234", "12345678"}),
        ("Did Dr. Ann O'Neill see J. Smith?", {"Dr. Ann O'Neill", "J. Smith"}),
        ("Ein Brief von Zoë Ångström kam", {"Ein Brief", "Zoë Ångström"}),  # too much: German
        ("Anna Bell left. He stayed", {"Anna Bell"}),
        ("The judge. However, I asked", set()),
        ("If 3 apples cost 45 cents, what do 1200 cost?", set()),
        ("Она видела Ивана там", {"Ивана"}),
        ("谁是李明", set()),  # a script without case: the stated limit
        ("anna bell asked. Maria wept", set()),  # lower case, and a lone name that opens: likewise
        ("Ask [name 1] or [email 2]", set()),
    ],
)
def test_entities(text, found):
    assert {e.text for e in entities(text)} == found


def test_scrubbing_is_repeatable_and_leaves_nothing():
    text, removed = scrub(CASE.question)
    assert scrub(CASE.question) == (text, removed)
    assert len(removed) == 4
    assert leaked(text, removed) == []
    assert entities(text) == []
    for word in ("Rosa", "diaz", "2021", "0113", "March"):
        assert word.lower() not in text.lower()


def test_what_the_task_names_is_kept():
    text, removed = scrub("Did Rosa Diaz meet Newton?", keep=["Laws of Newton"])
    assert text == "Did [name 1] meet Newton?"
    assert [e.text for e in removed] == ["Rosa Diaz"]


def turned_down(text: str, choose=None) -> str:
    _, removed = scrub(CASE.question)
    return checked(CASE, text, removed=removed, keep=CASE.choices, choose=choose)


def test_a_good_rephrasing_passes():
    assert turned_down(GOOD) == ""
    lettered = "\nA. Theft\nB. Fraud\nC. Arson\nD. None of these\nAnswer:"
    assert turned_down(GOOD + lettered) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD + " rosa", "1 of 4 entities left"),
        (GOOD + " (ROSA@DIAZ.EXAMPLE)", "2 of 4 entities left"),
        (GOOD + " said Tom Reed", "1 entities that the original has not"),
        (GOOD + "\nA. Theft\nB. Fraud\nC. Arson\nD. None", "options changed"),
        (GOOD + "\nA. Fraud\nB. Theft\nC. Arson\nD. None of these", "options changed"),
        ("", "empty"),
        ("theft?", "1 words for"),
        (" ".join([GOOD] * 3), "words for"),
        (scrub(CASE.question)[0], "copied"),
        (GOOD.rstrip("?") + ".", "no question"),
        ("The answer to the question that was asked before is the following one, or not?", "else"),
    ],
)
def test_a_bad_one_is_turned_down_with_its_reason(text, reason):
    assert reason in turned_down(text)


def test_an_answer_that_changes_is_turned_down():
    assert turned_down(GOOD, choose=lambda q: 0) == ""
    swayed = turned_down(GOOD, choose=lambda q: int("wearing" in q.question))
    assert swayed == "the receiver answers it otherwise"


def test_a_model_that_cannot_rephrase_stands_alone_after_so_many_tries():
    base, short = load_base("tiny:llama"), Question("law", "Is it so?", ("Yes", "No"), 0)
    got = rephrase(base, short, seed=3, tries=3)
    assert isinstance(got, Standalone)
    assert len(got.attempts) == 3
    assert all(attempt.reason for attempt in got.attempts)
    assert len({attempt.text for attempt in got.attempts}) > 1  # another seed, another text
    assert rephrase(base, short, seed=3, tries=3) == got
    assert rephrase(base, short, seed=4, tries=1) != rephrase(base, short, seed=3, tries=1)


def test_one_that_can_is_used_and_keeps_options_and_gold(monkeypatch):
    """The loop, with a writer that fails once: no tiny model writes English."""
    said = iter(["rosa", "Rewritten question: " + GOOD])
    base = load_base("tiny:llama")
    monkeypatch.setattr(
        "fedloom.refining.rephrasing.write", lambda *a, **k: base.tokenizer.encode(next(said))
    )
    got = rephrase(base, CASE, seed=0, choose=lambda q: 0)
    assert isinstance(got, Rephrased)
    assert (got.question.question, got.question.choices) == (GOOD, CASE.choices)
    assert got.question.gold == CASE.gold
    assert [bool(a.reason) for a in got.attempts] == [True, False]


def test_recall_counts_what_is_still_told():
    assert entity_recall(CASE.question, CASE.question) == 1
    assert entity_recall(CASE.question, GOOD) == 0
    assert entity_recall(CASE.question, "Diaz left") == pytest.approx(0.25)
    assert entity_recall("how many apples?", "apples?") is None


def test_writing_is_transformers_own_greedy_decoding():
    base = load_base("tiny:llama", "float64")
    prompt = base.tokenizer.encode("what is it?")
    assert write(base, prompt, 8) == alone(base, prompt)[1]
    greedy = write(base, prompt, 8)
    assert write(base, prompt, 8, stop=[greedy[3]]) == greedy[:3]
    warm = [write(base, prompt, 8, temperature=2.0, seed=s) for s in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_many_at_once_are_each_by_itself(family):
    base = load_base(f"tiny:{family}", "float64")
    prompts = [base.tokenizer.encode(t) for t in ("what is it?", "a", "is it so, or not?")]
    single = [write(base, prompt, 7) for prompt in prompts]
    assert write_many(base, prompts, 7) == single
    stop = [single[1][2], single[2][5]]
    assert write_many(base, prompts, 7, stop=stop) == [
        write(base, p, 7, stop=stop) for p in prompts
    ]
    assert write_many(base, prompts, 0) == [[], [], []]
    many = backgrounds(base, ["is it?", "why"], 5, batch=1)
    assert [m.text for m in many] == [background(base, q, 5).text for q in ("is it?", "why")]


def test_letters_are_scored_as_evaluation_scores_them():
    base = load_base("tiny:llama", "float64")
    (row,) = score_rows(base.model, [encode_question(CASE, base.tokenizer)], batch_size=1)
    scores = letter_scores(base, CASE)
    assert -scores[CASE.gold] == pytest.approx(row.letter_ce, abs=1e-9)
    assert (own_choice(base, CASE) == CASE.gold) == row.correct
    assert chosen([-1.0, -0.5, -0.5]) == 1


def test_options_are_scored_as_continuations():
    """Against one forward pass for each token of each option."""
    base = load_base("tiny:qwen2", "float64")
    head = base.tokenizer.encode("He took")
    tails = [base.tokenizer.encode(o, add_special_tokens=False) for o in (" a coat", " x")]
    for tail, got in zip(tails, continuation_scores(base, head, tails), strict=True):
        ids, told = list(head), 0.0
        for token in tail:
            with torch.no_grad():
                logits = base.model(torch.tensor([ids])).logits[0, -1]
            told += float(logits.log_softmax(0)[token])
            ids.append(token)
        assert got == pytest.approx(told, abs=1e-6)


def test_a_message_of_no_tokens_is_no_message():
    base = load_base("tiny:llama")
    none = background(base, CASE.question, 0)
    assert (none.text, none.tokens, none.nbytes) == ("", 0, 0)
    assert with_context(CASE, [none]) == CASE
    some = background(base, CASE.question, 12)
    assert some.tokens <= 12
    assert some.nbytes == len(some.text.encode())
    assert background(base, CASE.question, 12, seconds=0.0).text == ""


def test_a_smaller_budget_gives_the_beginning():
    """Bytes that are no letters are lost on the way, so this one writes letters."""
    base = load_base("tiny:llama")
    long = Written(base.base_hash, "a coat is worn", 14, 14, 2.0)
    short = shortened(base, long, 6)
    assert (short.text, short.tokens, short.nbytes) == ("a coat", 6, 6)
    assert short.seconds == pytest.approx(2.0 * 6 / 14)
    assert shortened(base, long, 0).text == ""


def test_messages_stand_before_the_question_in_the_order_of_their_senders():
    one, two = (Written(s, f"said by {s}", 3, 9, 0.0) for s in "ba")
    for order in ([one, two], [two, one]):
        lines = with_context(CASE, order).question.splitlines()
        assert lines[:2] == [f"Context from another model: said by {s}" for s in "ab"]
        assert lines[2] == CASE.question
    assert with_context(CASE, [one]).choices == CASE.choices


def test_votes_and_singles_break_ties_the_same_way_each_time():
    assert vote([2, 1, 1]) == 1
    assert vote([2, 1]) == 2
    assert best_single({"b": [True, False], "a": [False, True], "c": [False, False]}) == "a"
    with pytest.raises(ValueError, match="nobody"):
        vote([])
