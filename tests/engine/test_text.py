"""The text of tokens that arrive one by one."""

import pytest

from pagewise.engine.text import Text
from pagewise.models.load import ByteTokenizer


class Words:
    """A tokenizer that puts a space before every word but the first, like sentencepiece."""

    words = ("one", "two", "three", "<end>", "Hello", "world")

    def decode(self, ids, *, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(self.words[i] for i in ids if i != 3)


def fed(tokens, tokenizer=None, stop=(), prompt=()):
    """Return all pieces as they come, and the whole text."""
    sequence = list(prompt)
    text, pieces = Text(tokenizer or ByteTokenizer(), tuple(stop), sequence), []
    for token in tokens:
        if not text.stopped:
            pieces.append(text.add(token))
            sequence.append(token)
    pieces.append(text.end())
    assert "".join(pieces) == text.text
    return pieces, text


@pytest.mark.parametrize("string", ["plain", "Zürich", "漢字 🙂 done", ""])
def test_pieces_add_up_and_no_character_comes_in_halves(string):
    pieces, text = fed(string.encode())
    assert text.text == string
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_bytes_that_are_no_text_come_out_when_it_is_clear_that_they_are_none():
    pieces, _ = fed([*b"a\xff", *b"bc", 0xE6])
    assert pieces == ["a", "", "\N{REPLACEMENT CHARACTER}b", "c", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_token_is_decoded_with_the_one_before_it():
    pieces, text = fed([0, 1, 3, 2], Words())
    assert text.text == "one two three"
    assert pieces == ["one", " two", "", " three", ""]


@pytest.mark.parametrize("prompt", [[4], [0, 1, 2, 0, 1, 4], [4, 3]])
def test_the_space_between_prompt_and_text_is_kept(prompt):
    pieces, text = fed([5, 0], Words(), prompt=prompt)
    assert text.text == " world one"
    assert pieces == [" world", " one", ""]


def test_a_stop_string_is_not_looked_for_in_the_prompt():
    _, text = fed(b"llo", prompt=b"he", stop=["el"])
    assert (text.text, text.stopped) == ("llo", False)


@pytest.mark.parametrize("at", range(7))
def test_a_character_that_the_prompt_begins_is_part_of_the_text(at):
    tokens = "a漢é".encode()
    _, text = fed(tokens[at:], prompt=tokens[:at])
    assert text.text == tokens.decode()[len(tokens[:at].decode(errors="ignore")) :]


@pytest.mark.parametrize(
    ("string", "stop", "expected"),
    [
        ("hello world", ["wor"], "hello "),
        ("hello world", ["d"], "hello worl"),
        ("hello world", ["xyz"], "hello world"),
        ("aaab", ["aab"], "a"),
        ("one two", ["two", "ne"], "o"),
        ("abc", ["abc"], ""),
        ("ab", ["abc"], "ab"),
        ("a🙂b", ["🙂"], "a"),
    ],
)
def test_text_ends_before_a_stop_string(string, stop, expected):
    _, text = fed(string.encode(), stop=stop)
    assert text.text == expected
    assert text.stopped == (expected != string)


def test_the_first_of_two_stop_strings_in_one_token_ends_the_text():
    _, text = fed([0, 1, 3, 2], Words(), stop=["ee", "hr"])
    assert text.text == "one two t"


def test_what_may_begin_a_stop_string_waits_until_it_does_not():
    pieces, _ = fed(b"xabab.", stop=["abc"])
    assert pieces == ["x", "", "", "ab", "", "ab.", ""]
