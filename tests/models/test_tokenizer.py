from hypothesis import given
from hypothesis import strategies as st

from fedloom.models.tokenizer import ByteTokenizer


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text)[1:] == tokenizer.encode(text, add_special_tokens=False)
    assert max(tokenizer.encode(text)) < tokenizer.vocab_size


def test_special_tokens_are_not_text():
    tokenizer = ByteTokenizer()
    special = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert special == {256, 257, 258}
    assert tokenizer.decode(sorted(special)) == ""
    assert tokenizer.digest() != ByteTokenizer(pad_token_id=259).digest()
