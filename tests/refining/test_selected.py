"""A choice is acted on as it stands: who was taken is heard in that way, nobody else is asked."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

from fedloom.errors import Refusal
from fedloom.gains import Gains, Help
from fedloom.intervals import Interval
from fedloom.refining import Sender, Terms, Written, decide, local, refine, refine_selected
from fedloom.refining.text import in_context
from fedloom.slices.fitting import plain_bytes

from rooms import fuser_of, room, shut

PROMPT, TOKENS = "what is it?", 4
LONG = "which of all of these many words is the longest one? " * 9
QUICK = Terms(deadline=20.0)


def named(family: str, fuser="own", **told) -> Sender:
    base, geometry = room(family)
    made = fuser_of(family, "qwen3") if fuser == "own" else fuser
    return replace(local(base, geometry, made, f"tiny:{family}"), **told)


def helped(family: str, way: str, gain: float = 0.1, **told) -> Help:
    speed = {"prefill": 1e3, "fuse": 1e3, "gains": {"any": Interval(gain, gain / 2, 0.3)}}
    words = {"decode_seconds": 0.5, "nbytes": 40.0} if way == "text" else {}
    return Help(sender=f"tiny:{family}", way=way, **{**speed, **words, **told})


def measured(*rows: Help, **told) -> Gains:
    given = {"mbit": {"any": 100.0}, "rtt": {"any": 0.01}, "message_tokens": 6}
    return Gains(helps=rows, **{**given, **told})


def choice(gains: Gains, senders, terms=QUICK, **told):
    told = {"tokens": 12, **told}
    return decide(gains, room("qwen3")[0], senders, terms=terms, **told)


def answered(senders, log, prompt=PROMPT, terms=QUICK):
    how = {"terms": terms, "max_new_tokens": TOKENS, "stop": ()}
    base = room("qwen3")[0]
    return refine_selected(base, prompt, senders, log, **how)


def plain(senders, prompt=PROMPT, terms=QUICK):
    base = room("qwen3")[0]
    return refine(base, prompt, senders, terms=terms, max_new_tokens=TOKENS, stop=())


def never(request):
    raise AssertionError("nobody was to ask it")


def test_a_cache_is_taken_in_its_own_precision_and_the_rest_is_left():
    senders = [named("llama"), named("qwen2", ask=never), named("gemma3", ask=never)]
    gains = measured(
        helped("llama", "int4", 0.2), helped("llama", "bf16", 0.1), helped("qwen2", "int8", -0.2)
    )
    log = choice(gains, senders)
    assert (log["chosen"], log["way"]) == ({"tiny:llama": "int4"}, "cache")
    answer = answered(senders, log)
    (source,) = answer.receipt.sources
    assert (source.way, source.status, answer.receipt.fallback) == ("int4", "used", "")
    assert answer.ids == plain([named("llama")], terms=replace(QUICK, scheme="int4")).ids
    tree = json.loads(json.dumps(answer.receipt.to_dict(), allow_nan=False))
    why = {(r["sender"], r["way"]): r["why"] for r in tree["selection"]["candidates"]}
    assert "the lower end" in why["tiny:qwen2", "int8"]
    assert why["tiny:gemma3", "any"] == "nothing was measured of it"
    assert why["tiny:llama", "bf16"] == "the same sender is taken by int4"
    assert why["none", "none"] == "help is worth more"
    assert PROMPT not in json.dumps(tree)


def test_words_stand_before_the_prompt_beside_a_cache_and_alone():
    said = Written("?", "it is  cheese", 3, 0, 0.1)
    asked = []

    def tell(text, tokens, seconds):
        asked.append((text, tokens))
        return said

    senders = [named("llama"), named("qwen2", ask=never, tell=tell)]
    both = choice(measured(helped("llama", "int8"), helped("qwen2", "text")), senders)
    assert both["way"] == "both"
    told = in_context(PROMPT, [said])
    # the cache is of the question as it was; what the receiver reads has the message in it
    with_words = answered(senders, both)
    base, terms = room("qwen3")[0], replace(QUICK, scheme="int8")
    how = {"shown": PROMPT, "terms": terms, "max_new_tokens": TOKENS, "stop": ()}
    assert with_words.ids == refine(base, told, [named("llama")], **how).ids
    assert with_words.receipt.mode == "prefix"
    assert [s.way for s in sorted(with_words.receipt.sources, key=lambda s: s.name)] == [
        "int8",
        "text",
    ]
    only = choice(measured(helped("qwen2", "text")), senders)
    answer = answered(senders, only)
    assert answer.ids == plain([], told).ids
    (source,) = answer.receipt.sources
    assert (answer.receipt.mode, source.status, source.bytes) == ("t2t", "used", 13)
    assert source.model == room("qwen2")[1].model
    assert answer.receipt.prompt_tokens == len(base.tokenizer.encode(told))
    assert asked == [(PROMPT, 6)] * 2


@pytest.mark.parametrize(
    ("tell", "cause"),
    [
        (lambda *_: time.sleep(5), "deadline"),
        (lambda *_: Written("", " ", 0, 0, 0.0), "failed"),
        (lambda *_: Written("", "x" * 999, 6, 999, 0.0), "integrity"),
        (lambda *_: 1 / 0, "failed"),
        (None, "failed"),
    ],
)
def test_a_message_that_does_not_come_is_a_fallback(tell, cause):
    senders = [named("qwen2", tell=tell)]
    terms = Terms(deadline=0.8)
    log = choice(measured(helped("qwen2", "text", decode_seconds=0.1)), senders, terms)
    answer = answered(senders, log, terms=terms)
    (source,) = answer.receipt.sources
    assert (source.status, source.cause) == ("fallback", cause)
    assert (answer.receipt.mode, answer.receipt.fallback) == ("standalone", "standalone")
    assert answer.ids == plain([]).ids


def test_none_is_a_choice_and_no_fallback():
    senders = [named("llama", ask=never, tell=never)]
    rows = (helped("llama", "int8"), helped("llama", "text"))
    for gains, told in (
        (measured(*rows, mbit={"any": 1e-6}), {}),
        (measured(*rows), {"privacy": 1}),
        (measured(*rows, own_seconds=30.0), {}),
        (measured(*rows, memory=10.0, senders=0), {}),
    ):
        log = choice(gains, senders, **told)
        assert (log["chosen"], log["way"]) == ({}, "none")
        assert log["candidates"][-1]["taken"]
        answer = answered(senders, log)
        assert (answer.receipt.mode, answer.receipt.fallback) == ("standalone", "")
        assert answer.ids == plain([]).ids


def test_a_worse_link_goes_from_cache_to_words_and_a_trusted_one_is_found():
    senders = [named("llama"), named("qwen2", source="tiny:qwen2")]
    rows = (helped("llama", "int8", 0.2), helped("llama", "text", 0.1, trust=1))
    ways = [
        choice(measured(*rows, mbit={"any": mbit, "tiny:qwen2": 9.0}), senders)["way"]
        for mbit in (10.0, 5e-4, 1e-9)
    ]
    assert ways == ["cache", "text", "none"]
    assert choice(measured(*rows), senders, privacy=1)["chosen"] == {"tiny:llama": "text"}
    tight = measured(*rows, memory=100.0)
    log = choice(tight, senders)
    assert log["chosen"] == {"tiny:llama": "text"}
    (row,) = [r for r in log["candidates"] if r["way"] == "int8"]
    fuser = senders[0].fuser
    held = sum(x.numel() * x.element_size() for x in [*fuser.parameters(), *fuser.buffers()])
    assert row["memory"] == held + 12 * len(fuser.layers) * 2 * room("qwen3")[1].width * 4


def test_who_has_no_open_fuser_can_be_asked_for_words_alone():
    rows = (helped("llama", "int8", 0.2), helped("llama", "text", 0.1))
    for fuser, said in ((None, "no fuser"), (shut(fuser_of("llama", "qwen3")), "gates")):
        log = choice(measured(*rows), [named("llama", fuser)])
        assert log["chosen"] == {"tiny:llama": "text"}
        assert any(said in r["why"] for r in log["candidates"] if r["way"] == "int8")


def test_estimated_bytes_are_those_that_come_whole_or_in_part():
    text = LONG[:400]
    senders = [named("llama")]
    fuser, geometry = senders[0].fuser, room("llama")[1]
    tokens = len(room("llama")[0].tokenizer.encode(text))
    whole = plain_bytes(geometry, fuser.sender_layers, tokens)
    for terms in (QUICK, replace(QUICK, share=0.5), replace(QUICK, part=0.25)):
        log = choice(measured(helped("llama", "int8")), senders, terms, tokens=tokens)
        receipt = answered(senders, log, text, terms).receipt
        assert receipt.bytes == pytest.approx(log["bytes"], rel=0.25)  # 400 bytes a frame, about
        assert not terms.part or receipt.bytes <= 0.25 * whole
    assert 0.2 * tokens < receipt.sources[0].tokens < 0.5 * tokens


def test_the_order_of_senders_changes_neither_choice_nor_answer():
    senders = [named(family) for family in ("llama", "qwen2", "gemma3")]
    rows = (helped("llama", "int8"), helped("qwen2", "text"), helped("gemma3", "bf16"))
    one, two = (
        (choice(measured(*r), s), s) for r, s in ((rows, senders), (rows[::-1], senders[::-1]))
    )
    assert one[0] == two[0]
    assert answered(one[1], one[0]).ids == answered(two[1], two[0]).ids


def test_what_cannot_be_chosen_from_is_refused():
    twice = [named("llama"), named("llama")]
    with pytest.raises(Refusal, match="comes twice: give it once"):
        choice(measured(helped("llama", "int8")), twice)
    apart = (helped("llama", "int8"), helped("llama", "int8", receiver="tiny:qwen3"))
    with pytest.raises(Refusal, match="come twice by int8"):
        choice(measured(*apart), [named("llama")])
    residual = [named("llama", fuser_of("llama", "qwen3", mode="residual"))]
    with pytest.raises(Refusal, match="residual"):
        choice(measured(helped("llama", "text")), residual)
    assert choice(measured(helped("llama", "int8")), residual)["way"] == "cache"
    assert math.isinf(measured().memory)
