"""Tokens that hold the same character go together, whatever the tokenizers."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fedloom.adapters.alignment import align
from fedloom.errors import Refusal
from fedloom.models.offsets import token_ends
from fedloom.models.tokenizer import ByteTokenizer

TEXT = "Zoë ißt 🍎🍎 und Käse; хлеб тоже."


def trained(vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["und Käse und Brot isst Zoe", "the cheese and the bread"], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"bytes": ByteTokenizer(), "small": trained(262), "large": trained(290)}


@pytest.mark.parametrize("receiver", TOKENIZERS)
@pytest.mark.parametrize("sender", TOKENIZERS)
def test_monotone_covering_and_right(sender, receiver):
    (_, there), (_, here) = (token_ends(TOKENIZERS[n], TEXT) for n in (sender, receiver))
    found = align(here, there)
    real = [(end, at) for end, at in zip(here, found, strict=True) if end]
    assert [at for _, at in real] == sorted(at for _, at in real)
    for end, at in real:
        assert at >= 0
        assert there[at] >= end  # it holds the last character ...
        assert at == len(there) - 1 or there[at + 1] > there[at]  # ... and is the last that does
        before = [e for e in there if e < there[at]]
        assert not before or before[-1] < end
    if sender == receiver:
        last = {end: i for i, end in enumerate(here)}
        assert found == [last[end] for end in here]


def test_ends_count_characters():
    for tokenizer in TOKENIZERS.values():
        ids, ends = token_ends(tokenizer, TEXT)
        assert len(ids) == len(ends)
        assert ends == sorted(ends)
        assert ends[-1] == len(TEXT)


def test_left_out_tokens_are_nobodys_partner():
    ends = [2, 3, 6, 8]
    assert align([1, 3, 5, 8], ends) == [0, 1, 2, 3]
    # without token 1 it is not known where token 2 began: only its last character is sure
    assert align([1, 3, 5, 6, 8], [2, 6, 8], places=[0, 2, 3]) == [0, -1, -1, 1, 2]
    assert align([9], ends) == [-1]


def test_a_tokenizer_that_does_not_know_places_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(Refusal, match="use prefix fusion, which needs none"):
        token_ends(Slow(), "a")
