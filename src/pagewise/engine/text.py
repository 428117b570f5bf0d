"""From tokens to text as they come, and where a stop string ends it (lesson 9)."""

from typing import Any


class Text:
    """The text of tokens that arrive one by one.

    A tokenizer decodes tokens, not streams: a character may take several tokens, and a token's text may depend on the
    one before it. So the last piece is decoded together with what precedes it, text that ends in half a character
    ("\N{REPLACEMENT CHARACTER}") waits, and so does an end that may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.text = ""  # released
        self.stopped = False  # by a stop string, which the text ends before
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._first, self._decoded = 0, 0  # tokens to decode along, and the first not yet in the text
        self._held = ""  # decoded, not released

    def add(self, token: int, *, last: bool = False) -> str:
        """One more token; returns the text that is now certain: all of it, if that was the last."""
        new = self._new(token)
        self._tokens.append(token)  # not before: should the tokenizer raise, nothing has changed
        if new and (last or not new.endswith("\N{REPLACEMENT CHARACTER}")):
            self._held += new
            self._first, self._decoded = self._decoded, len(self._tokens)
        return self._release(self._safe(ended=last))

    def end(self) -> str:
        """No token follows: the rest of the text."""
        if not self.stopped:
            self._held += self._new()
            self._decoded = len(self._tokens)
        return self._release(self._safe(ended=True))

    def _new(self, *more: int) -> str:
        """What the tokens that are not yet in the text, and these, add to it."""
        tokens, old = [*self._tokens[self._first :], *more], self._decoded - self._first
        before, whole = self._text(tokens[:old]), self._text(tokens)
        return whole[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

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
