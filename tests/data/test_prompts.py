from dataclasses import dataclass

import pytest

from fedloom.data.prompts import encode_question, letter_tokens, prompt
from fedloom.data.questions import Question
from fedloom.errors import Refusal
from fedloom.models.tokenizer import ByteTokenizer

QUESTION = Question("global_facts", "What is 1 + 1?", ("one", "two", "three", "four"), 1)
TEXT = "What is 1 + 1?\nA. one\nB. two\nC. three\nD. four\nAnswer:"


@dataclass(frozen=True)
class WordTokenizer:
    """Spaces stick to the front of words, as in byte-level BPE; ``size`` letters a token."""

    size: int = 20

    def encode(self, text, *, add_special_tokens=True):
        words = text.replace(" ", "\0 ").replace("\n", "\0\n\0").split("\0")
        pieces = [w[i : i + self.size] for w in words for i in range(0, len(w), self.size)]
        return [int.from_bytes(piece.encode()) for piece in pieces]


def test_prompt_is_the_paper_s():
    assert prompt(QUESTION) == TEXT


def test_bytes_put_the_space_into_the_prompt():
    encoded = encode_question(QUESTION, ByteTokenizer())
    assert encoded.letter_ids == (65, 66, 67, 68)
    assert encoded.prompt_ids == (257, *f"{TEXT} ".encode())
    assert encoded.letter_ids[encoded.gold] == ord("B")


def test_words_put_the_space_into_the_letter():
    tokenizer = WordTokenizer()
    encoded = encode_question(QUESTION, tokenizer)
    answer = encoded.letter_ids[encoded.gold]
    assert [*encoded.prompt_ids, answer] == tokenizer.encode(f"{TEXT} B")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WordTokenizer()])
def test_prompt_and_letter_are_the_natural_tokens(tokenizer):
    encoded = encode_question(QUESTION, tokenizer)
    for letter, token in zip("ABCD", encoded.letter_ids, strict=True):
        assert [*encoded.prompt_ids, token] == tokenizer.encode(f"{TEXT} {letter}")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_question_has_as_many_letters_as_choices(count):
    question = Question("anatomy", "Which?", tuple("vwxyz"[:count]), count - 1)
    assert prompt(question).count("\n") == count + 1
    encoded = encode_question(question, ByteTokenizer())
    assert bytes(encoded.letter_ids) == b"ABCDE"[:count]
    assert encoded.gold == count - 1


def test_long_prompts_lose_their_beginning_but_not_bos():
    whole = encode_question(QUESTION, ByteTokenizer()).prompt_ids
    cut = encode_question(QUESTION, ByteTokenizer(), max_tokens=12).prompt_ids
    assert cut == (257, *whole[-11:])
    assert encode_question(QUESTION, ByteTokenizer(), max_tokens=len(whole)).prompt_ids == whole
    assert len(encode_question(QUESTION, ByteTokenizer(), max_tokens=1).prompt_ids) == 1


def test_letters_that_are_no_token_are_refused():
    @dataclass(frozen=True)
    class Halves(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return [half for byte in text.encode() for half in divmod(byte, 16)]

    with pytest.raises(Refusal, match="not one token"):
        letter_tokens(Halves())
