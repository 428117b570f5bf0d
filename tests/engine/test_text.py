"""The text of tokens that arrive one by one."""

import itertools
import random

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
    pieces.append(text.add(None))
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


# ------------------------------------------------------------------------------------------ bytes of the prompt


class Fallback:
    """Words of sentencepiece, and a token for each byte. Bytes in a row that are no text together are no text each.

    So does ByteFallback of `tokenizers` decode, which Llama 2 uses.
    """

    words = ("▁one", "▁two", "s", "▁", "ab", "<end>")

    def encode(self, text):
        """Return the words that have tokens as these, and everything else as bytes."""
        ids = []
        for part in text.split(" "):
            known = f"▁{part}" in self.words
            ids += [256 + self.words.index(f"▁{part}")] if known else [256 + 3, *part.encode()]
        return ids

    def decode(self, ids, *, skip_special_tokens):
        parts = []
        for is_byte, run in itertools.groupby((i for i in ids if i != 256 + 5), lambda i: i < 256):
            run = list(run)
            if not is_byte:
                parts += [self.words[i - 256] for i in run]
                continue
            try:
                parts.append(bytes(run).decode())
            except UnicodeDecodeError:
                parts.append("\N{REPLACEMENT CHARACTER}" * len(run))
        return "".join(parts).replace("▁", " ").removeprefix(" ")


TEXTS = ["麒麟麒麟", "ごはん", "one two 🇫🇷", "🇫🇷🇩🇪", "é", "one", "one é two", "aéaé", ""]


def test_the_test_tokenizer_decodes_as_the_library():
    decoders = pytest.importorskip("tokenizers").decoders
    library = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    draw, fallback = random.Random(0), Fallback()
    for _ in range(300):
        ids = [draw.choice([256, 257, 258, 259, 260, *"麒é".encode(), 0xFF]) for _ in range(draw.randrange(9))]
        tokens = [fallback.words[i - 256] if i > 255 else f"<0x{i:02X}>" for i in ids]
        assert fallback.decode(ids, skip_special_tokens=True) == library.decode(tokens)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Fallback()], ids=lambda tokenizer: type(tokenizer).__name__)
@pytest.mark.parametrize("answer", TEXTS)
@pytest.mark.parametrize("prompt", TEXTS)
def test_text_after_a_prompt_of_bytes_is_whole(prompt, answer, tokenizer):
    pieces, text = fed(tokenizer.encode(answer), tokenizer, prompt=tokenizer.encode(prompt) if prompt else [])
    if isinstance(tokenizer, Fallback) and prompt:
        assert text.text == " " * bool(tokenizer.encode(answer)) + answer
    else:
        assert text.text == answer
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Fallback()], ids=lambda tokenizer: type(tokenizer).__name__)
@pytest.mark.parametrize("before", ["", "a", "麒麟", "🌶", "one two three four "])
@pytest.mark.parametrize("character", ["🌶", "漢", "é"])
def test_a_character_that_the_prompt_begins_comes_alone(character, before, tokenizer):
    """After any number of its bytes, with and without the others: the prompt's own text does not come again."""
    encoded = character.encode()
    for at in range(1, len(encoded)):
        prompt = [*before.encode(), *encoded[:at]]
        assert fed([*encoded[at:], *b" ok"], tokenizer, prompt=prompt)[1].text == character + " ok"
    prompt = [*before.encode(), *encoded[:1]]
    assert fed(b" ok", ByteTokenizer(), prompt=prompt)[1].text == " ok"


FOREIGN = [
    b"\xff",
    b"\xff\xff\xc3",
    b"\x80" * 9,
    b"a\xf0\x9f",
    b"\xe9\xba\x92\xff\xe9\xba",
    "\ufffd".encode(),
    b"\xc3\xff",
]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Fallback()], ids=lambda tokenizer: type(tokenizer).__name__)
@pytest.mark.parametrize("end", FOREIGN, ids=str)
def test_bytes_at_the_end_of_a_prompt_that_are_no_text_stay_in_the_prompt(end, tokenizer):
    prompt = [*b"one", *end]
    assert fed([256], tokenizer, prompt=prompt)[1].text in ("", " one")
    assert fed(b"x 1", ByteTokenizer(), prompt=prompt)[1].text == "x 1"
    _, text = fed("漢漢漢漢".encode(), tokenizer, prompt=prompt)
    assert text.text.endswith("漢漢漢"), "after a few bytes that were taken for no text"
    assert len(text.text) <= 6


def test_random_cuts_of_texts_give_what_comes_after_the_cut():
    draw, tokenizer = random.Random(1), ByteTokenizer()
    letters = "aé漢🌶\n "
    for _ in range(300):
        tokens = "".join(draw.choices(letters, k=draw.randrange(1, 12))).encode()
        at = draw.randrange(len(tokens) + 1)
        _, text = fed(tokens[at:], tokenizer, prompt=tokens[:at])
        assert text.text == tokens.decode()[len(tokens[:at].decode(errors="ignore")) :]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Fallback(), Words()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("kind", ["no text", "half characters", "special"])
def test_each_token_is_decoded_with_few_others(kind, tokenizer, monkeypatch):
    """Also where nothing can be released for thousands of tokens."""
    special = {"ByteTokenizer": 256, "Fallback": 261, "Words": 3}[type(tokenizer).__name__]
    token = {"no text": 0xFF, "half characters": 0xE9, "special": special}[kind]
    token = special if isinstance(tokenizer, Words) else token
    most, decode = [0], tokenizer.decode

    def counting(ids, **options):
        most[0] = max(most[0], len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    pieces, text = fed([token] * 300, tokenizer, prompt=[0] * 5)
    assert most[0] <= 30
    if token == special:
        assert text.text == ""
    else:
        assert text.text == "\N{REPLACEMENT CHARACTER}" * 300
        assert "".join(pieces[:-1]).count("\N{REPLACEMENT CHARACTER}") >= 296


def test_the_space_before_a_word_survives_many_special_tokens():
    _, text = fed([0, *[3] * 20, 1], Words())
    assert text.text == "one two"


def test_text_that_comes_at_once_is_that_of_tokens_one_by_one():
    for prompt, answer in itertools.product(TEXTS, TEXTS):
        tokenizer = Fallback()
        ids = tokenizer.encode(answer)
        at_once = Text(tokenizer, (), tokenizer.encode(prompt)).following(ids)
        assert at_once == fed(ids, tokenizer, prompt=tokenizer.encode(prompt))[1].text


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "abca"), (6, "abcabc")])
def test_stop_strings_are_not_looked_for_in_the_first_tokens(min_tokens, expected):
    text = Text(ByteTokenizer(), ("b",), [], min_tokens)
    for token in b"abcabc":
        if not text.stopped:
            text.add(token)
    text.add(None)
    assert text.text == expected


def test_a_text_that_is_given_up_keeps_what_was_held():
    text = Text(ByteTokenizer(), ("xyz",), [])
    assert [text.add(token) for token in b"axy"] == ["a", "", ""]
    assert text.give_up() == "xy"
    assert (text.text, text.add(None)) == ("axy", "")


def test_a_foreign_byte_before_a_character_that_the_prompt_begins_stays_in_the_prompt():
    """The character is completed, and the byte before it is not shown a second time."""
    for before in (b"", b"one", "麒麟".encode()):
        _, text = fed([0xA9, *b" ok"], ByteTokenizer(), prompt=[*before, 0xFF, 0xC3])
        assert text.text == "é ok"
