"""From texts to tokens and back, as the server needs them: within bounds, and token by token (lesson 9)."""

from math import ceil, isnan
from threading import Event
from typing import Any, NamedTuple

from pagewise.engine import LLM
from pagewise.engine.request import NOT_FINITE
from pagewise.engine.serve.answer import Failure
from pagewise.models.vocabulary import Vocabulary

TOO_LONG = "context_length_exceeded"
LEAST_LOGPROB = -9999.0  # in place of −∞, which JSON does not have


class Token(NamedTuple):
    """A token as an answer shows it."""

    text: str  # of half a character: its bytes, as in "\\xe2\\x88"
    utf8: bytes | None  # None: unknown
    logprob: float | None  # None: of the first token of a prompt
    key: str  # the text, or "bytes:…" for a part of a character, as OpenAI writes it


class Tokens:
    """The tokenizer of an engine, and the number of tokens that the engine can hold: its `context`."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokenizer = llm, llm.tokenizer
        self.context = llm.max_new_tokens([0]) + 1
        self.vocabulary = Vocabulary(llm.tokenizer, llm.model.config.vocab_size)

    def encode(self, text: str, field: str, left: Event, **options: Any) -> list[int]:
        """Return the tokens of a text from the `field` of a body.

        Refuse a text that cannot fit before all of it is read. End at the next piece if the client has `left`.
        """
        longest = self.vocabulary.longest
        least, piece = ceil(len(text) / longest), 8 * self.context  # a text that fits is rarely a longer piece
        while least <= self.context and piece < len(text) and not left.is_set():
            least = len(self.tokenizer.encode(text[:piece], **options)) - 4 * longest  # the cut makes at most so many
            piece *= 2
        if left.is_set():
            raise Failure("the client has left", field)
        if least > self.context:
            raise self.too_long(f"more than {self.context}", field)
        return self.tokenizer.encode(text, **options)

    def too_long(self, prompt: int | str, field: str, max_tokens: int | None = None) -> Failure:
        """Return the refusal of a prompt of so many tokens.

        litellm looks for its first words, and LangChain for the code, which openai-python leaves out of its exception.
        """
        said = f"your {field} resulted in {prompt} tokens"
        said += "" if max_tokens is None else f", and you requested {max_tokens} in the completion"
        context = f"This model's maximum context length is {self.context} tokens. However, {said}"
        return Failure(f"{context}. Please reduce the length of the {field}. ({TOO_LONG})", field, code=TOO_LONG)

    def steps(self, logprobs: list[dict[int, float | None]] | None, most: int | None) -> list[list[Token]] | None:
        """Return the tokens of each step: the chosen one, and then at most `most` likeliest ones in falling order."""
        if logprobs is None:
            return None
        steps = [[self.token(token, log_p) for token, log_p in step.items()] for step in logprobs]
        return [[step[0], *sorted(step, key=lambda token: -(token.logprob or 0.0))[:most]] for step in steps]

    def token(self, token: int, logprob: float | None) -> Token:
        """Return a token with its text and bytes."""
        if logprob is not None and isnan(logprob):  # which JSON does not have either
            raise Failure(NOT_FINITE, status=500)
        logprob = None if logprob is None else max(logprob, LEAST_LOGPROB)
        utf8 = self.vocabulary.utf8(token)
        try:
            text = key = self.tokenizer.decode([token]) if utf8 is None else utf8.decode()
        except UnicodeDecodeError:
            text = "".join(f"\\x{byte:02x}" for byte in utf8)
            key = f"bytes:{text}"
        return Token(text, utf8, logprob, key)
