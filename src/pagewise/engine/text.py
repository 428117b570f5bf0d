"""The text of new tokens, which arrive one by one (lesson 9).

A tokenizer decodes whole texts, not streams. A character may take several tokens, and the text of a token may depend on
the token before it: sentencepiece drops the space that begins the first token. Therefore new tokens are decoded
together with a few tokens before them, their context, and the text of the context is cut off. Two things can go wrong:

- The context begins inside a character. Tokenizers with byte fallback, as that of Llama 2, then decode every byte up
  to the next whole word as "\N{REPLACEMENT CHARACTER}", those of new characters too.
- The context ends inside a character, or in bytes that are not UTF-8. New tokens then change its text.

So the context begins where a character begins. Its text before new tokens is compared with its text after them.
"""

from functools import partial
from typing import Any, NamedTuple

CONTEXT = 5  # tokens that are decoded together with new ones; vLLM uses 5 too
MOST_BYTES = 4  # of a character in UTF-8
NO_TEXT = "\N{REPLACEMENT CHARACTER}"


class Context(NamedTuple):
    """Tokens before new ones, what they decode to, and what they do without half a character at their end."""

    tokens: list[int]
    whole: str
    clean: str


NOTHING = Context([], "", "")


class Text:
    """The text of a sequence's new tokens. Text is held back while it may change or may begin a stop string.

    Args:
        tokenizer: or None. `text` is then None, and all pieces are empty.
        prompt: the tokens before the new ones. The text begins after them, or with the character that they began.
        min_tokens: the number of new tokens in whose text no stop string is looked for.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], prompt: list[int], min_tokens: int = 0) -> None:
        self.text = None if tokenizer is None else ""  # released
        self.stopped = False  # whether a stop string ended the text
        self._decode = None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=True)
        self._stop, self._min_tokens = stop, min_tokens
        self._longest_stop = max(map(len, stop), default=0)
        self._context = NOTHING if tokenizer is None else self._end_of(prompt)
        self._pending: list[int] = []  # new tokens whose text is not known yet
        self._held = ""  # known, but not released yet

    def add(self, token: int | None, *, last: bool = False) -> str:
        """Return the text that is final with one more token. After the last token, or with None, all text is final.

        A stop string ends the text. Nothing changes if the tokenizer raises.
        """
        if self._decode is None:
            return ""
        last, pending = last or token is None, self._pending if token is None else [*self._pending, token]
        if pending and not self.stopped:
            self._held += self._advance(pending, last)
        self._min_tokens -= token is not None
        length = len(self._held)
        if self._stop and self._min_tokens < 0:
            found = [at for at in map(self._held.find, self._stop) if at >= 0]
            if found:
                self.stopped, length = True, min(found)
                self._held = self._held[:length]
            elif not last:
                sizes = range(min(self._longest_stop - 1, length), 0, -1)  # of an end that may begin a stop string
                length -= next((n for n in sizes if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        return piece

    def give_up(self) -> str:
        """Return the text that is held, without the tokens that are not decoded yet."""
        self._pending = []
        return self.add(None)

    def following(self, tokens: list[int]) -> str:
        """Return the text of new tokens that come all at once."""
        return self._after(self._context, tokens)

    def _advance(self, pending: list[int], ended: bool) -> str:
        """Return the known text of pending tokens, and keep the others pending."""
        context, text = self._context, ""
        while True:
            new = self._after(context, pending)
            if ended or len(pending) > 4 * MOST_BYTES or (new and not new.endswith(NO_TEXT)):
                text, tokens, pending = text + new, pending, []
                whole = self._decode(tokens)
                if NO_TEXT in whole:  # the context began a character, or these bytes are not UTF-8
                    tokens = context.tokens + tokens
                    tokens = tokens if len(tokens) <= 4 * MOST_BYTES else []
                    whole = self._decode(tokens) if tokens else ""
                context = Context(tokens, whole, whole)
                break
            if len(pending) < MOST_BYTES:
                break
            # a character that is not complete yet has fewer bytes, so the first pending token belongs to none
            first = self._after(context, pending[:1])
            if not new.startswith(first):
                break
            context, text, pending = NOTHING if first else context, text + first, pending[1:]
        self._context, self._pending = context, pending
        return text

    def _after(self, context: Context, tokens: list[int]) -> str:
        """Return the text that tokens add to the text of their context."""
        whole = self._decode(context.tokens + tokens)
        if whole.startswith(context.whole):
            return whole[len(context.whole) :]
        if whole.startswith(context.clean):  # the half character at the end of the context has changed
            same = next((i for i, (a, b) in enumerate(zip(context.whole, whole, strict=False)) if a != b), len(whole))
            return whole[max(len(context.clean), same) :]
        return self._decode(tokens)

    def _end_of(self, prompt: list[int]) -> Context:
        """Return a context from the last tokens of a prompt, which begins where a character begins."""
        for stop in range(len(prompt), max(0, len(prompt) - MOST_BYTES), -1):
            for size in (*range(CONTEXT, CONTEXT + MOST_BYTES), *range(CONTEXT - 1, 0, -1)):
                start = max(0, stop - size)
                clean = self._decode(prompt[start:stop])
                if NO_TEXT not in clean:
                    tokens = prompt[start:]
                    return Context(tokens, self._decode(tokens), clean)
        tokens = prompt[1 - MOST_BYTES :]  # bytes that are not UTF-8
        return Context(tokens, self._decode(tokens), "")
