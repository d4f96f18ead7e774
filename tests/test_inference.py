"""Sessions: chunked reading is one pass, the loop is transformers' own, saving loses no bit."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedloom import inference, states
from fedloom.adapters.attach import attach
from fedloom.adapters.memory import MemoryCache
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.models.base import Base
from fedloom.models.sources import Source
from fedloom.models.tokenizer import ByteTokenizer

from grafts import FAMILIES, HEARD

WINDOWED = HEARD.replaced(memory__window=8, memory__sinks=2)
SETTINGS = {
    "windowed": WINDOWED,
    "no sinks": HEARD.replaced(memory__window=8),
    "all keys": HEARD,
    "one layer": WINDOWED.replaced(last_layers=1),
    "no memory": HEARD.replaced(memory__enabled=False),
    "wide taps": WINDOWED.replaced(memory__key_taps="learnt", memory__tap_width=4),
    "shut": WINDOWED.replaced(memory__gate="shut"),
}
PROMPT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def made(config=WINDOWED, family="llama"):
    model = tiny.build(family).eval().requires_grad_(False)
    base = Base(model, ByteTokenizer(), "b" * 64, "t" * 64, Source("tiny", family))
    adapter = attach(model, config)
    return adapter, inference.owner_of(base, adapter)


def equal_caches(a, b) -> bool:
    mine, theirs = inference._tensors(a), inference._tensors(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_generate(family):
    adapter, _ = made(family=family)
    session = inference.Session(adapter, chunk=7)
    session.read(PROMPT)
    own = list(session.generate(20))
    model = adapter.model.get_base_model()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    theirs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=MemoryCache(model.config),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
    )
    assert theirs[0, 40:].tolist() == own
    if model.config.model_type != "gemma3_text":  # whose random weights repeat one token
        assert len(set(own)) > 3


@pytest.mark.parametrize("chunk", [1, 7, 40, 256])
def test_a_prompt_read_in_chunks_and_pieces_is_a_prompt_read_at_once(chunk):
    adapter, _ = made()
    adapter.model.double()
    whole, parts = inference.Session(adapter), inference.Session(adapter, chunk=chunk)
    whole.read(PROMPT)
    for piece in (PROMPT[:1], [], PROMPT[1:30], PROMPT[30:]):
        parts.read(piece)
    assert whole.tokens == parts.tokens == 40
    for name, x in inference._tensors(whole).items():
        torch.testing.assert_close(inference._tensors(parts)[name], x, rtol=0, atol=1e-10)


def test_what_is_held_does_not_grow_with_the_context():
    adapter, _ = made()
    session, sizes = inference.Session(adapter, chunk=16), []
    for _ in range(4):
        session.read(PROMPT)
        list(session.generate(5))
        sizes.append(inference.cache_bytes(session.cache))
    assert len(sizes) == 4
    assert all(size == sizes[0] for size in sizes)
    # two layers, two KV heads of 16: S and two raw keys; two sinks and seven keys and values
    assert sizes[0] == {"memory": 4 * 2 * 2 * (256 + 32), "attention": 4 * 2 * 2 * 16 * 2 * (2 + 7)}


def test_without_a_window_all_keys_are_held():
    adapter, _ = made(HEARD)
    session = inference.Session(adapter)
    session.read(PROMPT)
    assert inference.cache_bytes(session.cache)["attention"] == 4 * 2 * 2 * 16 * 2 * 39


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_saved_session_goes_on_to_the_bit(tmp_path, name, temperature):
    adapter, owner = made(SETTINGS[name])
    session, told = inference.Session(adapter), {"temperature": temperature, "seed": 5}
    session.read(PROMPT)
    list(session.generate(3, **told))
    inference.save_state(tmp_path / "s.safetensors", session, owner)
    loaded = inference.load_state(tmp_path / "s.safetensors", adapter, owner)
    assert equal_caches(session, loaded)
    went_on = list(session.generate(12, **told))
    assert list(loaded.generate(12, **told)) == went_on
    for each in (session, loaded):
        each.read(PROMPT[:11])
    assert equal_caches(session, loaded)
    assert session.tokens == loaded.tokens == 40 + 3 + 12 + 11


def test_one_token_can_be_kept_too(tmp_path):
    adapter, owner = made()
    session = inference.Session(adapter)
    session.read([65])
    inference.save_state(tmp_path / "s.safetensors", session, owner)
    loaded = inference.load_state(tmp_path / "s.safetensors", adapter, owner)
    assert list(loaded.generate(4)) == list(session.generate(4))


def test_the_untouched_model_has_sessions_too(tmp_path):
    adapter, owner = made()
    with adapter.off():
        session = inference.Session(adapter)
        session.read(PROMPT)
        inference.save_state(tmp_path / "s.safetensors", session, owner)
        loaded = inference.load_state(tmp_path / "s.safetensors", adapter, owner)
        assert inference.cache_bytes(loaded.cache)["memory"] == 0
        assert list(loaded.generate(5)) == list(session.generate(5))


def test_sampling_depends_on_seed_and_place():
    adapter, _ = made()
    answers = []
    for seed in (1, 1, 2):
        session = inference.Session(adapter)
        session.read(PROMPT)
        answers.append(list(session.generate(12, temperature=1.0, seed=seed)))
    assert answers[0] == answers[1] != answers[2]


def test_drawn_tokens_follow_their_probabilities():
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    drawn = [inference._choose(logits, 1.0, 0, place) for place in range(4000)]
    share = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    # four standard errors of a share near a half
    torch.testing.assert_close(share, logits.softmax(0), rtol=0, atol=4 * 0.5 / 4000**0.5)
    assert share[2] == 0


def test_an_answer_ends_at_a_stop_token():
    adapter, _ = made()
    session = inference.Session(adapter)
    session.read(PROMPT)
    first = list(session.generate(8))
    again = inference.Session(adapter)
    again.read(PROMPT)
    assert list(again.generate(8, stop={first[2]})) == first[: first.index(first[2]) + 1]


def test_text_of_an_answer_and_going_on_with_more_text():
    adapter, _ = made()
    session = inference.Session(adapter)
    made_text = "".join(inference.generate(session, ByteTokenizer(), "hello", max_new_tokens=9))
    assert isinstance(made_text, str)
    assert session.tokens == 1 + 5 + 9  # bos, hello, answer
    list(inference.generate(session, ByteTokenizer(), "more", max_new_tokens=0))
    assert session.tokens == 15 + 4  # no second bos


def test_characters_of_several_tokens_come_whole():
    ids = list("naïve 漢字!".encode())
    assert "".join(inference.text_of(ids, ByteTokenizer())) == "naïve 漢字!"
    assert list(inference.text_of(ids[-4:], ByteTokenizer())) == ["字", "!"]
    assert list(inference.text_of([195], ByteTokenizer())) == ["\ufffd"]  # broken, but not lost


def test_nothing_read_is_refused(tmp_path):
    adapter, owner = made()
    session = inference.Session(adapter)
    with pytest.raises(Refusal, match="give a prompt"):
        list(session.generate(1))
    with pytest.raises(Refusal, match="nothing to keep"):
        inference.save_state(tmp_path / "s.safetensors", session, owner)
    with pytest.raises(Refusal, match="temperature = -1"):
        list(session.generate(1, temperature=-1))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A saved session, its adapter and owner."""
    adapter, owner = made()
    session = inference.Session(adapter)
    session.read(PROMPT)
    path = tmp_path_factory.mktemp("state") / "s.safetensors"
    inference.save_state(path, session, owner, expires=timedelta(days=7))
    return path, adapter, owner


def test_a_state_is_private_and_says_what_it_is(kept):
    path, _, owner = kept
    assert path.stat().st_mode & 0o777 == 0o600
    header = states.read_header(path)
    assert header.owner == owner
    assert header.tokens == 40
    held = states.contents(path)
    assert (held.layers, held.memory_bytes, held.attention_bytes) == (2, 4608, 4608)
    assert all(norm > 0 for norm in held.norms)
    assert list(path.parent.iterdir()) == [path]  # no draft left


def rewritten(kept, folder, change):
    """The state with its tensors or metadata changed."""
    path, _, _ = kept
    tensors = load_file(path)
    with states._opened(path) as file:
        metadata = file.metadata()
    change(tensors, metadata)
    save_file(tensors, folder / "x.safetensors", metadata=metadata)
    return folder / "x.safetensors"


def _nan(tensors, metadata):
    tensors["memory.001.S"][0, 0, 3, 3] = torch.nan


def _narrow(tensors, metadata):
    tensors["attention.000.keys"] = tensors["attention.000.keys"][..., :8].contiguous()


def _wide(tensors, metadata):
    tensors["attention.000.keys"] = tensors["attention.000.keys"].repeat(1, 1, 2, 1)


def _double(tensors, metadata):
    tensors["memory.000.S"] = tensors["memory.000.S"].double()


def _less(tensors, metadata):
    del tensors["memory.000.S"]


def _more(tensors, metadata):
    tensors["text"] = torch.zeros(3)


def _token(tensors, metadata):
    tensors["pending"][0] = 259


def _fewer_tokens(tensors, metadata):
    metadata["tokens"] = "5"


def _expired(tensors, metadata):
    metadata["expires"] = json.dumps("2020-01-01T00:00:00+00:00")


def _base(tensors, metadata):
    metadata["owner"] = json.dumps({**json.loads(metadata["owner"]), "base": "c" * 64})


def _adapter(tensors, metadata):
    metadata["owner"] = json.dumps({**json.loads(metadata["owner"]), "adapter": "c" * 64})


def _format(tensors, metadata):
    metadata["format"] = '"fedloom-state-0"'


def _naive_time(tensors, metadata):
    metadata["created"] = json.dumps("2020-01-01T00:00:00")


BROKEN = {
    "memory.001.S holds a value that is not finite": _nan,
    "attention.000.keys is": _narrow,
    r"attention.000.keys is \(1, 2, 14, 16\)": _wide,
    "memory.000.S is .* torch.float64": _double,
    "memory.000.S .* is missing": _less,
    "text .* is not known here": _more,
    "not in the vocabulary": _token,
    "this model's is": _fewer_tokens,
    "expired at 2020": _expired,
    "differs in base: it was made with c+, this is b+": _base,
    "differs in adapter": _adapter,
    "is no fedloom-state-1 file": _format,
    "is no fedloom-state-1 .*file": _naive_time,
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_state_that_does_not_fit_is_refused_in_one_line(kept, tmp_path, said):
    path = rewritten(kept, tmp_path, BROKEN[said])
    with pytest.raises(Refusal, match=said) as refused:
        inference.load_state(path, *kept[1:])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_state_cut_short_is_refused(kept, tmp_path, share):
    path, adapter, owner = kept
    data = path.read_bytes()
    (tmp_path / "x").write_bytes(data[: int(share * len(data))])
    with pytest.raises(Refusal, match="cut short"):
        inference.load_state(tmp_path / "x", adapter, owner)
    with pytest.raises(Refusal, match="no such file"):
        inference.load_state(tmp_path / "none", adapter, owner)


def test_an_adapter_that_trained_on_or_has_another_window_is_another_owner():
    adapter, owner = made()
    name = next(n for n in adapter.arrays() if "lora_B" in n)
    model = adapter.model.get_base_model()
    base = Base(model, ByteTokenizer(), "b" * 64, "t" * 64, Source("tiny", "llama"))
    adapter.parameters()[name].data += 1e-6
    assert inference.owner_of(base, adapter).adapter != owner.adapter
    _, other = made(WINDOWED.replaced(memory__window=9))
    assert other.settings != owner.settings
    _, same = made(WINDOWED.replaced(memory__chunk=5, rounds=9, name="else"))
    assert same == owner
