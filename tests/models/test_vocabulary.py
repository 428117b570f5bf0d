"""The bytes of single tokens, for both kinds of tokenizers."""

import pytest
from scripted import SPECIAL, byte_fallback, byte_level

from pagewise.models.load import ByteTokenizer
from pagewise.models.vocabulary import Vocabulary, byte_of

TEXTS = [
    "the cat",
    " then  the",
    "softmax(QKᵀ)·V ≤ ∞\n\t",
    "日本語 🙂🇫🇷",
    "\N{REPLACEMENT CHARACTER}the",
    "aĠb ▁c <0x41>",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", [byte_level, byte_fallback, ByteTokenizer])
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(kind, text):
    tokenizer = kind()
    vocabulary = Vocabulary(tokenizer, len(getattr(tokenizer, "get_vocab", dict)()) or 257)
    options = {} if kind is ByteTokenizer else {"add_special_tokens": False}
    found = b"".join(map(vocabulary.utf8, tokenizer.encode(text, **options)))
    if kind is byte_fallback:  # sentencepiece puts a space before each text, and writes every space as ▁
        text = " " + text.replace("▁", " ")
    assert found == text.encode()


def test_tokens_with_one_text_have_bytes_of_their_own():
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    parts = [tokenizer.convert_tokens_to_ids(name) for name in ("â", "Ī", "âĪ")]
    assert {tokenizer.decode([token]) for token in parts} == {"\N{REPLACEMENT CHARACTER}"}
    assert [*map(vocabulary.utf8, parts)] == [b"\xe2", b"\x88", b"\xe2\x88"]
    tokenizer = byte_fallback()
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    words = [tokenizer.convert_tokens_to_ids(name) for name in ("the", "▁the")]
    assert {tokenizer.decode([token]) for token in words} == {"the"}
    assert [*map(vocabulary.utf8, words)] == [b"the", b" the"]


def test_special_tokens_are_spelled_as_they_are():
    tokenizer = byte_level(pad_token="<｜pad▁it｜>")
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    for name in (*SPECIAL, "<｜pad▁it｜>"):
        assert vocabulary.utf8(tokenizer.convert_tokens_to_ids(name)) == name.encode()
    assert Vocabulary(ByteTokenizer(), 257).utf8(256) == b""


class Texts:
    """A tokenizer that only decodes."""

    def decode(self, ids):
        return "".join("ab\N{REPLACEMENT CHARACTER}"[token] for token in ids)


def test_a_tokenizer_that_only_decodes_tells_no_bytes_of_half_a_character():
    assert [*map(Vocabulary(Texts(), 3).utf8, range(3))] == [b"a", b"b", None]


@pytest.mark.parametrize(
    ("kind", "vocab_size", "longest"),
    [(byte_level, 263, 13), (byte_level, 260, 4), (byte_fallback, 300, 5), (ByteTokenizer, 257, 1), (Texts, 3, 1)],
)
def test_no_token_stands_for_more_characters_than_the_longest(kind, vocab_size, longest):
    assert Vocabulary(kind(), vocab_size).longest == longest


def test_gpt2_has_a_character_for_each_byte():
    table = byte_of()
    assert sorted(table.values()) == [*range(256)]
    assert [table[character] for character in "AĠĊâĪ¡Ń"] == [65, 32, 10, 0xE2, 0x88, 0xA1, 0xAD]
