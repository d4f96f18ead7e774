from __future__ import annotations

import json
import re
from collections import Counter, defaultdict

import pytest

from fedloom.config import RunConfig
from fedloom.data.niah.encode import encode_needle, prompt
from fedloom.data.niah.events import shortened, tell
from fedloom.data.niah.examples import LEAST_FILLER, make_rows, needle_holdings
from fedloom.data.niah.haystack import share_out, weave
from fedloom.data.niah.words import Pools, load_words, side_of
from fedloom.data.partition import Partition, client_rows
from fedloom.data.text import load_text
from fedloom.errors import Refusal
from fedloom.models.tokenizer import ByteTokenizer
from fedloom.seeds import generator

BYTES = ByteTokenizer()
SMALL = {
    "niah.train-rows": 12,
    "niah.test-rows": 4,
    "niah.train-tokens-min": 700,
    "niah.train-tokens-max": 1000,
    "niah.test-tokens": "900,1800",
}
KINDS = RunConfig().niah.kind_names
WORD = 10  # tokens of the longest word of the made-up filler, and its space


def settings(filler, **changes):
    keys = {f"niah.{key.replace('_', '-')}": value for key, value in changes.items()}
    return RunConfig.from_flat({**SMALL, "niah.filler": filler, **keys}).niah


@pytest.fixture(scope="module")
def made(filler):
    rows, partition = needle_holdings(settings(filler), 0, BYTES)
    return rows, partition


def by_cell(rows):
    cells = defaultdict(list)
    for row in rows:
        cells[row.kind, row.side].append(row)
    return cells


def values_of(row):
    """Values that the haystack says, read from the sentences themselves."""
    return [re.split(r" (?:is|on) ", event.rstrip("."))[-1] for event in row.events]


def test_the_same_seed_makes_the_same_bytes(filler, made):
    needle_holdings.cache_clear()
    again, partition = needle_holdings(settings(filler), 0, BYTES)
    assert [row.to_json() for row in again] == [row.to_json() for row in made[0]]
    assert partition == made[1]
    other, _ = needle_holdings(settings(filler), 1, BYTES)
    assert not {row.row() for row in other} & {row.row() for row in again}


def test_a_row_does_not_depend_on_how_many_there_are(filler, made):
    few = make_rows(settings(filler, train_rows=5), 0, "uuid", "train", BYTES)
    assert few == [row for row in made[0] if (row.kind, row.side) == ("uuid", "train")][:5]
    alone, _ = needle_holdings(settings(filler, kinds="uuid", test_tokens="1800"), 0, BYTES)
    assert set(alone) <= set(made[0])


def test_partition_names_the_rows(made):
    rows, partition = made
    assert [client.name for client in partition.clients] == [
        "Passkey", "UUID code", "Name-date", "Phrase code", "Counter state", "MK-NIAH", "MV-NIAH",
    ]  # fmt: skip
    assert Partition.from_json(partition.to_json()) == partition
    for index, kind in enumerate(KINDS):
        train, test = client_rows(partition, rows, index)
        assert [len(train), len(test)] == [12, 8]
        assert {row.kind for row in (*train, *test)} == {kind}
    assert "{" not in json.dumps([client.train for client in partition.clients])


def test_json_is_canonical_and_whole(made):
    for row in made[0]:
        tree = json.loads(row.to_json())
        assert json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False) == (
            row.to_json()
        )
        assert tree["options"]["ABCD".index(tree["letter"])] == tree["value"] == row.value


def test_letters_and_depths_are_balanced(made):
    for (kind, side), rows in by_cell(made[0]).items():
        for budget in {row.budget for row in rows} if side == "test" else [None]:
            own = [row for row in rows if budget in (None, row.budget)]
            share = len(own) // 4
            assert Counter(row.gold for row in own) == dict.fromkeys(range(4), share)
            if kind != "counter":
                assert Counter(row.asked for row in own) == dict.fromkeys(range(4), share)


def test_wrong_options_are_other_values_of_the_same_haystack(made):
    for row in made[0]:
        assert len(set(row.options)) == 4
        assert row.options[row.gold] == row.value
        if row.kind != "counter":
            assert set(row.options) == set(values_of(row))
            assert row.value == values_of(row)[row.asked]
            assert all(row.context.count(value) == 1 for value in row.options)


def test_question_names_the_asked_key_alone(made):
    for row in made[0]:
        if row.kind == "counter":
            continue
        shared = [set(re.findall(r"[\w-]+", row.question)) & set(re.findall(r"[\w-]+", e))
                  for e in row.events]  # fmt: skip
        assert max(range(4), key=lambda i: len(shared[i])) == row.asked
        assert Counter(map(len, shared))[len(shared[row.asked])] == 1


def test_counter_adds_up(made):
    for row in made[0]:
        if row.kind == "counter":
            state = int(row.events[0].split(" is ")[1].rstrip("."))
            passed = [state]
            for event in row.events[1:]:
                passed.append(passed[-1] + {"incremented": 1, "decremented": -1}[event.split()[3]])
            assert 4 <= len(row.events) - 1 <= 8
            assert int(row.value) == passed[-1] % 8
            options = {int(option) for option in row.options}
            assert any(options == {(low + i) % 8 for i in range(4)} for low in range(8))
            assert int(row.value) in options


def test_a_shortened_counter_is_where_it_has_come_by_then():
    for index in range(50):
        whole = tell("counter", Pools("train", generator(1, "short", index)), 4, 0)
        gold = index % 4
        for count in range(1, len(whole.events) + 1):
            few = shortened(whole, count, place=count - 1)
            assert few.events == whole.events[:count]
            state = int(few.events[0].value)
            for event in few.events[1:]:
                state += 1 if "incremented" in event.text else -1
            assert int(few.answer) == state % 8
            options = [*map(int, few.wrong)]
            options.insert(gold, int(few.answer))
            assert any(set(options) == {(low + i) % 8 for i in range(4)} for low in range(8))
        assert few == whole


def test_a_counters_primers_ask_for_the_state_that_they_tell(filler):
    rows = make_rows(settings(filler, primer_rows=8, primer_events=4), 3, "counter", "train", BYTES)
    for index, row in enumerate(rows[:8]):
        assert len(row.events) == 1 + index // 2
        steps = sum(1 if "incremented" in event else -1 for event in row.events[1:])
        base = int(row.events[0].split(" is ")[1].rstrip("."))
        assert row.options[row.gold] == row.value == str((base + steps) % 8)
        assert len(set(row.options)) == 4
    assert all(len(row.events) > 4 for row in rows[8:])


def test_a_counters_options_do_not_tell_its_state():
    """Neither the right option's place among its neighbours nor the last step's direction does."""
    found: Counter[tuple[int, bool]] = Counter()
    for index in range(2000):
        story = tell("counter", Pools("train", generator(0, "balance", index)), 4, 0)
        options = {int(story.answer), *map(int, story.wrong)}
        low = next(n for n in range(8) if options == {(n + i) % 8 for i in range(4)})
        up = "incremented" in story.events[-1].text
        found[(int(story.answer) - low) % 8, up] += 1
    for up in (True, False):
        counts = [found[place, up] for place in range(4)]
        assert max(counts) < 0.3 * sum(counts)  # 0.25 and five standard errors


def test_the_budget_is_kept_and_used(made):
    for row in made[0]:
        ids = encode_needle(row, BYTES).prompt_ids
        assert row.tokens == len(ids) <= row.budget
        assert row.budget - len(ids) <= WORD + 1


def test_distance_and_depth_are_what_tokenising_says(made):
    for row in made[0]:
        event = row.events[row.asked]
        assert [
            row.context[s : s + len(e)] for s, e in zip(row.starts, row.events, strict=True)
        ] == [*row.events]
        encoded = encode_needle(row, BYTES)
        ids = BYTES.encode(event, add_special_tokens=False)
        text = list(encoded.prompt_ids)
        (start,) = [i for i in range(len(text)) if text[i : i + len(ids)] == ids]
        assert row.distance == encoded.context_tokens - (start + len(ids))
        rest = row.context[row.starts[-1] + len(row.events[-1]) :]  # a byte is a token here
        assert row.nearest == len(rest.encode()) <= row.distance
        # bos and the space before the event are tokens, too
        assert row.depth == pytest.approx((start - 1) / encoded.context_tokens, abs=2e-3)


def test_events_stand_near_the_asked_depths(filler):
    rows = make_rows(settings(filler, test_tokens="6000"), 0, "passkey", "test", BYTES)
    for row in rows:
        outside = sum(len(event) + 1 for event in row.events[: row.asked])
        share = (row.starts[row.asked] - outside) / (
            len(row.context) - sum(len(event) + 1 for event in row.events)
        )
        assert share == pytest.approx((0.1, 0.3, 0.5, 0.7)[row.asked], abs=0.02)


def test_fewer_depths_get_distractors_elsewhere(filler):
    rows = make_rows(settings(filler, depths="0.5", test_tokens="6000"), 0, "uuid", "test", BYTES)
    for row in rows:
        assert len(row.events) == 4
        assert row.depth == pytest.approx(0.5, abs=0.06)
        assert set(row.options) == set(values_of(row))
    assert len({row.asked for row in rows}) > 1
    six = settings(filler, depths="0,0.2,0.4,0.6,0.8,1")
    assert {len(row.events) for row in make_rows(six, 0, "phrase", "train", BYTES)} == {6}


def test_train_and_test_share_no_key_no_value_and_no_sentence(filler, made):
    sides = {"train": set(), "test": set()}
    filling = {"train": set(), "test": set()}
    for row in made[0]:
        context = row.context
        for event in row.events:
            context = context.replace(event, "\n")
            # what differs between events of a kind: names, words, numbers, codes
            sides[row.side] |= set(re.findall(r"[A-Z]\w+ [A-Z]\w+(?= is| was)", event))
            if row.kind not in ("counter", "multi-value"):
                sides[row.side] |= set(re.findall(r"\w+-[\w-]+|\d{4,}|\d+ \w+ \d{4}", event))
        filling[row.side] |= set(re.findall(r"Line \d+ says", context))
    assert len(sides["test"]) > 50
    assert not sides["train"] & sides["test"]
    assert len(filling["test"]) > 50
    assert not filling["train"] & filling["test"]


def test_words_of_the_two_sides_differ(words):
    drawn = {
        side: {
            part
            for i in range(200)
            for pools in [Pools(side, generator(i, side))]
            for text in (pools.phrase(), pools.person())
            for part in re.split(r"[ -]", text)
        }
        for side in ("train", "test")
    }
    assert min(map(len, drawn.values())) > 40
    assert not drawn["train"] & drawn["test"]
    share = sum(side_of(str(n)) == "test" for n in range(4000)) / 4000
    assert share == pytest.approx(0.25, abs=0.03)


def test_documents_are_shared_out_by_work_or_by_passage(filler, tmp_path):
    sides = share_out(filler, 0)
    assert {len({d.work for d in own}) for own in sides.values()} == {6, 2}
    assert not {d.work for d in sides["train"]} & {d.work for d in sides["test"]}
    text = " ".join(f"Sentence number {i} is about the sea." for i in range(400))
    (tmp_path / "one.txt").write_text(text)
    sides = share_out(f"path:{tmp_path}", 0)
    assert sorted(len(own) for own in sides.values()) == [1, 2]
    (tmp_path / "one.txt").write_text(text[:300])
    load_text.cache_clear()
    with pytest.raises(Refusal, match="give it more text"):
        share_out(f"path:{tmp_path}", 0)


def test_permuting_keeps_the_question(made):
    for row in made[0][::5]:
        moved = row.permuted((2, 0, 3, 1))
        assert moved.options == tuple(row.options[i] for i in (2, 0, 3, 1))
        assert moved.options[moved.gold] == row.value
        assert moved.permuted((1, 3, 0, 2)) == row
        assert moved.row() != row.row()


def test_prompt_and_encoding(made):
    row = made[0][0]
    text = prompt(row, "Answer:")
    assert text.startswith(row.context)
    tail = text.removeprefix(row.context)
    assert re.fullmatch(r"\n\nQuestion: .*\?\nA\) .*\nB\) .*\nC\) .*\nD\) .*\nAnswer:", tail)
    encoded = encode_needle(row, BYTES)
    assert BYTES.decode(encoded.prompt_ids) == text + " "
    assert BYTES.decode(encoded.open_ids) == f"{row.context}\n\nQuestion: {row.question}\nAnswer: "
    assert BYTES.decode(encoded.value_ids) == row.value
    assert BYTES.decode([encoded.letter_ids[encoded.gold]]) == "ABCD"[row.gold]
    both = BYTES.decode(encoded.prompt_ids[: encoded.context_tokens])
    assert both == row.context
    assert (
        encoded.open_ids[: encoded.context_tokens] == encoded.prompt_ids[: encoded.context_tokens]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_too_small_a_budget_is_refused_with_one_that_works(filler, kind):
    tight = {"kinds": kind, "train_rows": 8, "test_tokens": "1000"}
    with pytest.raises(Refusal, match="the smallest that works is") as refused:
        needle_holdings(settings(filler, train_tokens_min=40, **tight), 0, BYTES)
    assert "niah.train-tokens-min = 40" in str(refused.value)
    least = int(re.search(r"works is (\d+)", str(refused.value))[1])
    with pytest.raises(Refusal):
        needle_holdings(settings(filler, train_tokens_min=least - 1, **tight), 0, BYTES)
    good = settings(filler, train_tokens_min=least, train_tokens_max=least, **tight)
    for row in make_rows(good, 0, kind, "train", BYTES):
        assert row.tokens <= least
        assert len(row.context) > sum(map(len, row.events)) + LEAST_FILLER - WORD - 12
    with pytest.raises(Refusal, match=r"niah\.test-tokens = 50"):
        needle_holdings(settings(filler, kinds=kind, test_tokens="50,1000"), 0, BYTES)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kinds", "passkey,uuidd", "did you mean uuid"),
        ("kinds", "", "expected one of passkey"),
        ("kinds", "uuid,uuid", "names that differ, each once"),
        ("test-tokens", "512,abc", "numbers with commas"),
        ("test-tokens", "512,512", "rising lengths"),
        ("test-tokens", "-5", "at least 1"),
        ("depths", "0.5,0.2", "rising fractions"),
        ("depths", "0.5,1.5", "fractions from 0 to 1"),
        ("depths", "nan", "fractions from 0 to 1"),
        ("train-rows", 0, "at least 1"),
        ("train-tokens-max", 8, "at least 256"),
    ],
)
def test_nonsense_is_refused(key, value, said):
    with pytest.raises(Refusal, match=said):
        RunConfig.from_flat({f"niah.{key}": value})


def test_a_cut_prompt_is_refused():
    with pytest.raises(Refusal, match="cut needles off"):
        RunConfig.from_flat({"data.task": "niah", "data.max-tokens": 100})


def test_weaving_keeps_every_sentence_once():
    woven = weave(["A b c.", "D e.", "F."], ["X.", "Y.", "Z."], [0.0, 0.5, 1.0])
    assert woven.text == "X. A b c. Y. D e. F. Z."
    assert weave([], ["X.", "Y."], [0.1, 0.9]).text == "X. Y."


def test_words_are_read_without_rude_ones(words):
    assert "rude" not in words.nouns
    assert "ATM" in words.nouns
    assert words.nouns == tuple(sorted(words.nouns))
    phrase = Pools("train", generator(0, "x")).phrase()
    assert re.fullmatch(r"[a-z]+y-[a-z]+", phrase)


def test_every_kind_tells_a_story_for_each_asked_event(words):
    for kind in KINDS:
        for asked in range(5):
            story = tell(kind, Pools("test", generator(asked, kind)), 5, asked)
            assert story.answer not in story.wrong
            assert len(set(story.wrong)) == 3
            if kind != "counter":
                assert story.events[asked].value == story.answer


@pytest.mark.slow
def test_packaged_words_fill_both_sides():
    lists = load_words.__wrapped__()
    assert len(lists.nouns) > 6000
    assert len(lists.adjectives) > 800
