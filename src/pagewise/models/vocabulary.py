"""The bytes of single tokens, for every kind of tokenizer.

A tokenizer decodes texts. A token alone may be a part of a character, which decodes to "\N{REPLACEMENT CHARACTER}" like
any other part, and sentencepiece drops the space that begins the first token. The bytes of a token are in its name:

    GPT-2, Llama 3, Qwen    a character for each byte: "Ġthe" is b" the", and "âĪ" is b"\\xe2\\x88"
    Llama 2                 "▁the" is b" the", and "<0xE2>" is b"\\xe2", a byte of a character that has no token
"""

import re
from typing import Any

BYTE = re.compile("<0x([0-9A-F]{2})>")


class Vocabulary:
    """The tokens 0 … vocab_size − 1 of a tokenizer, one by one. None stands for more than `longest` characters."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._name = getattr(tokenizer, "convert_ids_to_tokens", None)
        self._decode = tokenizer.decode
        names = [name for name in map(self._name or self._text, range(vocab_size)) if name is not None]
        self.longest = max(1, *(1 if BYTE.fullmatch(name) else len(name) for name in names))
        first = [name[:1] for name in names]  # both characters begin a word
        self._byte_of = byte_of() if first.count("Ġ") > first.count("▁") else {}
        self._known: dict[int, bytes | None] = {}

    def utf8(self, token: int) -> bytes | None:
        """Return the bytes of a token, or None if the tokenizer does not tell."""
        if token not in self._known:
            self._known[token] = self._utf8(token)
        return self._known[token]

    def _text(self, token: int) -> str:
        return self._decode([token])

    def _utf8(self, token: int) -> bytes | None:
        if self._name is None:
            text = self._text(token)
            return None if "\N{REPLACEMENT CHARACTER}" in text else text.encode()
        if (name := self._name(token)) is None:  # models may have more rows than their tokenizers have tokens
            return b""
        if byte := BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        if not self._byte_of:
            return name.replace("▁", " ").encode()
        if any(character not in self._byte_of for character in name):  # an added token
            return name.encode()
        return bytes(self._byte_of[character] for character in name)


def byte_of() -> dict[str, int]:
    """Return the byte for which each character of GPT-2's vocabulary stands (Radford et al. 2019).

    Bytes that print stand for themselves. The others have the characters from 256 on, in their order.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
