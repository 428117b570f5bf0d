"""From tokens to text as they come, and where a stop string ends it (lesson 9)."""

from os.path import commonprefix
from typing import Any


CONTEXT = 5  # tokens of the prompt that the first new ones are decoded with, as many as vLLM takes


class Text:
    """The text of a sequence's new tokens, which arrive one by one.

    A tokenizer decodes tokens, not streams. A character may take several tokens, and the text of a token may depend on
    the token before it: sentencepiece drops the space that begins the first one. So new tokens are decoded together
    with those before them, the prompt's last ones too. Text that ends in half a character ("\N{REPLACEMENT CHARACTER}")
    waits, and so does an end that may be the beginning of a stop string.

    Args:
        tokens: the sequence's own list, which holds its prompt now.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], tokens: list[int]) -> None:
        self.text = ""  # released
        self.stopped = False  # by a stop string, which the text ends before
        self._tokenizer, self._stop, self._tokens = tokenizer, stop, tokens
        # the first token to decode, and the first that is not in the text yet
        self._first, self._decoded = max(0, len(tokens) - CONTEXT), len(tokens)
        self._held = ""  # decoded, not released

    def add(self, token: int, *, last: bool = False) -> str:
        """Return the text that is certain once the sequence gets this token: all of it, if the token is the last.

        Nothing changes if the tokenizer raises. The caller appends the token to the sequence afterwards.
        """
        new = new_text(self._tokenizer, [*self._tokens[self._first :], token], self._decoded - self._first)
        if new and (last or not new.endswith("\N{REPLACEMENT CHARACTER}")):
            self._held += new
            self._first, self._decoded = self._decoded, len(self._tokens) + 1
        return self._release(self._safe(ended=last))

    def end(self) -> str:
        """Return the rest of the text: no token follows."""
        if not self.stopped:
            self._held += new_text(self._tokenizer, self._tokens[self._first :], self._decoded - self._first)
            self._decoded = len(self._tokens)
        return self._release(self._safe(ended=True))

    def _safe(self, ended: bool = False) -> int:
        """How much of the held text can be released. Finds out whether a stop string is in it."""
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, self._held[: min(found)]
        if found or ended:
            return len(self._held)
        most = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return len(self._held) - length
        return len(self._held)

    def _release(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        return piece


def new_text(tokenizer: Any, tokens: list[int], old: int) -> str:
    """Return what all tokens but the first `old` add to the text of those."""
    before, whole = (
        tokenizer.decode(part, skip_special_tokens=True) if part else "" for part in (tokens[:old], tokens)
    )
    return whole[len(commonprefix((before, whole))) :]  # the old text may end in half a character
