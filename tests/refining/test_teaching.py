"""A fuser is taught on frozen models; a run that was stopped goes on to the same bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.data.questions import Question
from fedloom.errors import Refusal
from fedloom.models.base import DTYPES
from fedloom.refining import prefixed
from fedloom.refining.classroom import Classroom
from fedloom.refining.hearing import Party, Shelf, Turn, hear
from fedloom.refining.lessons import encode_lessons, open_lesson, question_lesson
from fedloom.refining.scoring import accuracy, nats, score, shuffled, zeroed
from fedloom.refining.teaching import TeachConfig, calibrate, handed, teach
from fedloom.slices.slice import batch_of

from rooms import fuser_of, room, shut

HOW = [
    {},
    {"tail": 1},
    {"tail": 3},
    {"sink": "receiver"},
    {"sink": "none"},
    {"tail": 2, "sink": "receiver"},
]
PROMPTS = ["what is it?", "who?"]


def shelf_of(family: str, dtype: str = "float64") -> Shelf:
    return Shelf(Party(*room(family, dtype)), dtype=getattr(torch, dtype))


def turns() -> list[Turn]:
    return [
        Turn(tuple(p.encode()), tuple(b"abc"[:n])) for p, n in zip(PROMPTS, (3, 1), strict=True)
    ]


@torch.no_grad()
def plain(family: str, turn: Turn) -> torch.Tensor:
    """The model's own logits at the answer, by transformers alone."""
    row = torch.tensor([[*turn.prompt, *turn.answer[:-1]]])
    return room(family)[0].model(row).logits[0, len(turn.prompt) - 1 :]


@pytest.mark.parametrize("told", HOW, ids=str)
@pytest.mark.parametrize("shut_all", [False, True], ids=["nobody", "shut"])
def test_without_guests_every_reading_is_the_receivers_own(told, shut_all):
    shelf, fuser = shelf_of("qwen3"), None
    slices = [shelf_of("llama").slice(b"ein"), shelf_of("llama").slice(b"zwei")]
    if shut_all:
        fuser = shut(fuser_of("llama", "qwen3", **told))
    with torch.no_grad():
        got = hear(shelf, turns(), fuser, slices, config=FuserConfig(**told))
    for row, turn in zip(got, turns(), strict=True):
        wanted = plain("qwen3", turn)
        torch.testing.assert_close(row[: len(wanted)], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("told", [*HOW, {"mode": "residual"}], ids=str)
def test_what_is_served_is_what_was_taught(told):
    """A batch of the trainer and one request of ``prefixed`` give the same logits."""
    shelf, fuser = shelf_of("qwen3"), fuser_of("llama", "qwen3", **told)
    sender, contexts = shelf_of("llama"), ["zwei", "der dritte"]
    ends = [tuple(range(1, len(x) + 1)) for x in (*contexts, *PROMPTS)]
    asked = [replace(t, ends=e) for t, e in zip(turns(), ends[2:], strict=True)]
    slices = [sender.slice(c.encode(), e) for c, e in zip(contexts, ends[:2], strict=True)]
    with torch.no_grad():
        batch = hear(shelf, asked, fuser, slices, config=fuser.config)
    for i, (turn, piece) in enumerate(zip(asked, slices, strict=True)):
        alone = prefixed(*room("qwen3"), turn.prompt, [(fuser, piece)], ends=turn.ends)
        torch.testing.assert_close(batch[i, 0], alone.logits[-1], rtol=0, atol=1e-6)


def test_fusers_that_were_taught_differently_do_not_mix():
    pair = [
        (fuser_of(s, "qwen3", tail=t), shelf_of(s).slice(b"x"))
        for s, t in (("llama", 0), ("qwen2", 1))
    ]
    with pytest.raises(Refusal, match="different tail"):
        prefixed(*room("qwen3"), list(b"what"), pair)


def test_a_receiver_with_windows_reads_nothing_alone():
    with pytest.raises(Refusal, match="where a window slides"):
        fuser_of("llama", "gemma3", tail=1)
    for apart in ({"tail": 1}, {"sink": "none"}):
        with pytest.raises(Refusal, match="in residual mode"):
            FuserConfig(mode="residual", **apart)


@pytest.fixture(scope="module")
def facts():
    """Which of four letters the sender reads; the receiver is asked without seeing it."""
    rows = [
        {"question": "Which?", "answer": letter, "context": f"{a}{b}{letter}"}
        for letter, a, b in itertools.product("KLMN", "xyz", "uvw")
    ]
    made = [replace(open_lesson(r, "row", "context"), options=tuple("KLMN")) for r in rows]
    tokenizer = room("llama")[0].tokenizer
    return encode_lessons(made, tokenizer, tokenizer)


def taught(facts, folder=None, steps=60, stop=None, **told):
    sender, receiver = shelf_of("llama", "float32"), shelf_of("qwen3", "float32")
    config = FuserConfig(width=16, tail=1, **told)
    fuser = CacheFuser(sender.party.geometry, receiver.party.geometry, config)
    calibrate(fuser, sender, receiver, facts, seed=0)
    how = TeachConfig(steps=steps, batch=8, learning_rate=5e-3, checkpoint_every=10)

    def progress(step: int, loss: float) -> None:
        if step == stop:
            raise KeyboardInterrupt

    report = teach(fuser, sender, receiver, facts, how, seed=3, folder=folder, progress=progress)
    return fuser, sender, receiver, report


def test_a_fact_that_the_sender_alone_reads_is_learnt(facts):
    fuser, sender, receiver, report = taught(facts, steps=80)
    assert report.loss_last < 0.5 * report.loss_first
    slices = [handed(sender, lesson) for lesson in facts]
    alone = score(receiver, facts, None, config=fuser.config)
    refined = score(receiver, facts, fuser, slices)
    assert accuracy(alone) == 0.25  # it always says the same
    assert accuracy(refined) >= 0.9
    assert accuracy(score(receiver, facts, fuser, shuffled(slices, seed=0))) < 0.5
    assert accuracy(score(receiver, facts, fuser, [zeroed(s) for s in slices])) <= 0.3
    assert nats(refined) < nats(alone)


def test_a_stopped_training_goes_on_to_the_same_bits(facts, tmp_path):
    whole, *_ = taught(facts, steps=24)
    with pytest.raises(KeyboardInterrupt):
        taught(facts, tmp_path, steps=24, stop=13)
    resumed, _, _, report = taught(facts, tmp_path, steps=24)
    assert report.resumed == 10
    pairs = zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True)
    assert [name for (name, x), y in pairs if not torch.equal(x, y)] == []
    with pytest.raises(Refusal, match="another training"):
        taught(facts, tmp_path, steps=25)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"short")
    with pytest.raises(Refusal, match="cannot be read"):
        taught(facts, tmp_path, steps=24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fuser_can_be_taught_in_every_dtype(facts, tmp_path, dtype):
    """Rather in 32 bits than in 16, as a classroom does: but to be kept and gone on from in any."""
    sender, receiver = shelf_of("llama", dtype), shelf_of("qwen3", dtype)
    config = FuserConfig(width=8, tail=1)
    wide = dtype if dtype != "float16" else "float32"  # AdamW's squares are zeros in float16
    how = TeachConfig(steps=2, batch=4, checkpoint_every=1)
    made = []
    for _ in range(2):
        fuser = CacheFuser(sender.party.geometry, receiver.party.geometry, config)
        fuser.to(getattr(torch, wide))
        report = teach(fuser, sender, receiver, facts[:8], how, seed=3, folder=tmp_path)
        made.append(fuser.state_dict())
    assert report.resumed == 2
    assert all(torch.equal(x, made[1][name]) for name, x in made[0].items())
    assert all(x.isfinite().all() for x in made[0].values())


def test_a_classroom_teaches_in_32_bits_at_least(facts):
    for dtype, wide in (("bfloat16", torch.float32), ("float64", torch.float64)):
        room_ = Classroom(shelf_of("llama", dtype), shelf_of("qwen3", dtype), facts, facts)
        fuser = room_.fresh(FuserConfig(width=8), seed=0)
        assert {x.dtype for x in fuser.state_dict().values()} == {wide}


def test_room_on_the_shelf_changes_no_bit(tmp_path):
    base = Party(*room("llama", "float32"))
    shelves = [Shelf(base), Shelf(base, budget=0), Shelf(base, folder=tmp_path, budget=0)]
    ids = list(b"ein Text")
    pieces = [shelf.slice(ids) for shelf in shelves for _ in range(2)]
    for piece in pieces[1:]:
        assert all(torch.equal(piece.keys[n], pieces[0].keys[n]) for n in piece.layers)
    assert len(list(tmp_path.iterdir())) == 1
    worst = max(float((pieces[0].keys[n]).abs().max()) for n in (0, 1))
    assert worst < 65504


def test_kept_tokens_are_the_first_and_the_last(facts):
    shelf, lesson = shelf_of("llama"), facts[0]
    piece = handed(shelf, lesson, 4)
    n = len(lesson.shown_ids)
    assert piece.places == (0, n - 3, n - 2, n - 1)
    assert batch_of([piece], sink=False).real_BT.tolist() == [[False, True, True, True]]


def test_lessons_of_questions():
    question = Question("s", "Two and two?", ("3", "4", "5"), 1)
    same, context = (question_lesson(question, s) for s in ("same", "context"))
    assert same.shown == same.prompt == context.shown
    assert context.prompt == "A. 3\nB. 4\nC. 5\nAnswer:"
    tokenizer = room("llama")[0].tokenizer
    (made,) = encode_lessons([same], tokenizer, tokenizer, ends=True)
    assert made.option_ids == tuple((32, x) for x in b"ABC")
    assert made.gold == 1
    assert len(made.prompt_ends) == len(made.prompt_ids)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"decay": "cosin"}, "did you mean cosine"),
        ({"steps": 0}, "steps = 0"),
        ({"keep": -1}, "keep"),
    ],
)
def test_bad_settings_are_refused(told, match):
    with pytest.raises(Refusal, match=match):
        TeachConfig(**told)
