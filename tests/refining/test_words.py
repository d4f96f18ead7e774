"""Where no cache is left, senders are asked for words (T2T); where there are none, nobody is."""

from __future__ import annotations

from dataclasses import replace

from fedloom.refining import Terms, Written, refine_or_ask

from asking import PROMPT, QUICK, TOKENS, broken, receiver, sender, standing
from rooms import alone


def tells(text: str, **told):
    return lambda question, tokens, seconds: Written("?", text, 3, len(text), 0.0)


def or_asked(senders, terms=QUICK, **told):
    told = {"max_new_tokens": TOKENS, "stop": (), "terms": terms, **told}
    return refine_or_ask(receiver(), PROMPT, senders, **told)


def test_where_no_cache_is_left_senders_are_asked_for_words():
    speaks = replace(sender("llama", broken("raises")), tell=tells("a cheese"))
    silent = replace(sender("qwen2", broken("mutated")), tell=tells(" "))
    answer = or_asked([speaks, silent])
    assert (answer.receipt.mode, answer.receipt.fallback) == ("t2t", "t2t")
    rows = [(s.name, s.way, s.status, s.cause) for s in answer.receipt.sources]
    assert sorted(rows) == [
        ("llama", "bf16", "fallback", "failed"),
        ("llama", "text", "used", ""),
        ("qwen2", "bf16", "fallback", "integrity"),
        ("qwen2", "text", "fallback", "failed"),
    ]
    told = "Context from another model: a cheese\n" + PROMPT
    assert answer.ids == alone(receiver(), receiver().tokenizer.encode(told), TOKENS)[1]
    nobody = or_asked([silent])
    assert (nobody.receipt.mode, nobody.receipt.fallback) == ("standalone", "standalone")
    assert nobody.ids == standing()


def test_words_are_asked_of_nobody_who_was_heard_was_late_or_fell_to_a_guard():
    def never(*_):
        raise AssertionError("asked")

    heard = replace(sender("qwen2"), tell=never)
    fell = replace(sender("llama", broken("raises")), tell=never)
    assert or_asked([heard, fell]).receipt.fallback == "fewer"
    far = or_asked([heard], Terms(max_kl=1e-9))
    late = or_asked([replace(sender("llama", broken("sleeps")), tell=never)], Terms(deadline=0.2))
    for answer, cause in ((far, "guard"), (late, "deadline")):
        assert [s.cause for s in answer.receipt.sources] == [cause]
        assert answer.ids == standing()


def test_writers_read_what_senders_are_shown():
    seen = []

    def tell(question, tokens, seconds):
        seen.append((question, tokens))
        return Written("?", "a cheese", 3, 8, 0.0)

    shown = "and what might it be?"
    or_asked([replace(sender("llama", broken("raises")), tell=tell)], shown=shown, tokens=7)
    assert seen == [(shown, 7)]
