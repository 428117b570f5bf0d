"""A request in the engine: its sequences, their text as it grows, and its output (lesson 9).

A request has one sequence, or several that share their prompt: n samples, or the beams of a beam search. They are
scheduled, preempted and resumed together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pagewise.engine.sampling import Pick, SamplingParams
from pagewise.engine.speculation import Drafter
from pagewise.paged_blocks.prefix_cache import TokenBlocks

FinishReason = Literal["stop", "length", "error"]


class Choice(NamedTuple):
    """One of a request's n samples or beams."""

    token_ids: list[int]  # without the prompt, with the token that ended the sequence
    text: str | None  # without the end token or stop string; None without a tokenizer
    # "stop": an end token or a stop string; "length": max_tokens; "error": the model's logits were not finite
    finish_reason: FinishReason
    score: float  # Σ log p of its tokens; for a beam, the mean


@dataclass(frozen=True)
class Output:
    """The result of a request. Its token_ids, text and finish_reason are those of choice 0."""

    request_id: int
    prompt_token_ids: list[int]
    choices: list[Choice]  # samples in the order of their index, as in a stream; beams best first
    logprobs: list[list[dict[int, float]] | None]  # of each choice, if requested: {token: log p} at each step
    num_cached_tokens: int  # prompt tokens that the prefix cache had when the request was first admitted

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str | None:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


class Piece(NamedTuple):
    """The tokens and text that a step added to one choice, for a request's listener."""

    request_id: int
    choice: int
    token_ids: list[int]
    text: str  # may be behind the tokens: half a character or the beginning of a stop string waits
    finish_reason: FinishReason | None
    logprobs: list[dict[int, float]] | None

    def followed_by(self, later: "Piece") -> "Piece":
        """Return both as one piece, where a step adds several tokens to a choice."""
        logprobs = [*(self.logprobs or []), *(later.logprobs or [])] or None
        token_ids, text = self.token_ids + later.token_ids, self.text + later.text
        return later._replace(token_ids=token_ids, text=text, logprobs=logprobs)


Listener = Callable[[Piece], None]


CONTEXT = 5  # prompt tokens that are decoded together with the first new tokens; vLLM uses 5 too


class Text:
    """The text of a sequence's new tokens, which arrive one by one.

    A tokenizer decodes whole texts, not streams. A character may take several tokens, and the text of a token may
    depend on the token before it: sentencepiece drops the space that begins the first token. Therefore new tokens are
    decoded together with earlier tokens, which may belong to the prompt. Text is held back while it ends in half a
    character ("\N{REPLACEMENT CHARACTER}"), or while its end may be the beginning of a stop string.

    Args:
        tokens: the sequence's own list of tokens, which now holds the prompt.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], tokens: list[int]) -> None:
        self.text = ""  # released
        self.stopped = False  # whether a stop string ended the text
        self._tokenizer, self._stop, self._tokens = tokenizer, stop, tokens
        # the first token to decode, and the first that is not in the text yet
        self._first, self._decoded = max(0, len(tokens) - CONTEXT), len(tokens)
        self._held = ""  # decoded, but not released yet

    def add(self, token: int, *, last: bool = False) -> str:
        """Return the text that is final once the sequence has this token. After the last token, all text is final.

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
        """Cut the held text at a stop string, if it has one. Return the number of characters that can be released."""
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
    """Return the text that the tokens after the first `old` add to the text of the first `old`."""
    before, whole = (
        tokenizer.decode(part, skip_special_tokens=True) if part else "" for part in (tokens[:old], tokens)
    )
    if not whole.startswith(before):  # the old text ended in half a character
        before = before.rstrip("\N{REPLACEMENT CHARACTER}")
    return whole[len(before) :]


class Sequence:
    """Tokens, and the number of them whose K and V are in memory. The object is its own id in the BlockManager."""

    def __init__(self, tokens: list[int], index: int = 0) -> None:
        self.tokens, self.index = tokens, index
        self.drafter: Drafter | None = None  # None until the first draft
        self.text: Text | None = None  # None for beams, and without a tokenizer
        self.num_computed = 0
        self.score = 0.0
        self.logprobs: list[dict[int, float]] = []
        self.finish_reason: FinishReason | None = None

    def add(self, pick: Pick, finish_reason: FinishReason | None) -> None:
        """Add a token. `finish_reason` says why this token is the last one, or is None."""
        self.finish_reason = finish_reason
        self.tokens.append(pick.token)
        self.score += pick.logprob
        if pick.likeliest is not None:
            self.logprobs.append(pick.likeliest)

    def __repr__(self) -> str:
        return f"Sequence({len(self.tokens)} tokens, {self.num_computed} computed)"


class Request:
    """A prompt, the parameters of its continuation, and the sequences that continue it.

    The `live` sequences are not finished. They have the same length unless drafts were accepted for some of them. While
    the request waits, no sequence is in memory. Then the first sequence alone computes the `num_common` tokens with
    which all sequences begin. Once these tokens are computed, all sequences are in memory (`forked`).
    """

    def __init__(self, prompt: list[int], sampling: SamplingParams, tokenizer: Any) -> None:
        self.prompt, self.sampling, self.tokenizer = prompt, sampling, tokenizer
        self.id = -1  # not added yet
        self.listener: Listener | None = None
        self.live = [Sequence(prompt.copy(), index) for index in range(sampling.n)]
        if tokenizer is not None:
            for sequence in self.live:
                sequence.text = Text(tokenizer, sampling.stop_strings, sequence.tokens)
        self.finished: list[Sequence] = []
        self.beams: list[Choice] = []  # the hypotheses of a beam search, best first
        self.num_common = 0
        self.common_blocks: TokenBlocks | list[int] | None = None  # the common tokens for the memory
        self.forked = False
        self.num_cached_tokens: int | None = None
        self.seed = sampling.chosen_seed()

    @property
    def width(self) -> int:
        """The largest number of sequences that the request may have at once."""
        return self.sampling.width

    @property
    def seats(self) -> int:
        """The number of sequences that the request may still have at once. A sample that has ended needs no seat."""
        return self.width if self.width > self.sampling.n else len(self.live)

    @property
    def longest(self) -> int:
        """The most tokens that one of its sequences can have."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def most_slots(self) -> int:
        """The most slots that a sequence can need. The last token needs no slot, because no token attends to it."""
        return self.longest - 1

    @property
    def described(self) -> str:
        """The size of the request, for messages."""
        return self.sampling.described(len(self.prompt))

    def ends(self, ends: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end the request's sequences, given the model's end tokens."""
        return (frozenset() if self.sampling.ignore_eos else ends) | frozenset(self.sampling.stop_ids)

    def common_tokens(self) -> list[int]:
        """Return the tokens with which all live sequences begin: at least the prompt.

        If the sequences have different lengths, the newest token of the shortest is left out. It computes that itself.
        """
        first, *others = (sequence.tokens for sequence in self.live)
        lengths = {len(sequence.tokens) for sequence in self.live}
        length = min(lengths) - (len(lengths) > 1)
        for other in others:
            length = next((i for i in range(length) if first[i] != other[i]), length)
        return first[:length]

    def text_of(self, token_ids: list[int]) -> str | None:
        """Return the text of new tokens that are decoded all at once."""
        context = self.prompt[-CONTEXT:]
        return self.tokenizer and new_text(self.tokenizer, context + token_ids, len(context))

    def in_memory(self) -> list[Sequence]:
        """Return the sequences that hold memory while the request runs."""
        return self.live if self.forked else self.live[:1]


class Chunk(NamedTuple):
    """The tokens start … stop − 1 of a sequence, which one step computes. The last of them may be drafts."""

    request: Request
    sequence: Sequence
    start: int
    stop: int
    drafts: tuple[int, ...] = ()  # guesses at the tokens after the newest one, see `speculation`

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.stop], *self.drafts]

    @property
    def num_logits(self) -> int:
        """The number of its last tokens that give logits: the newest token of the sequence, and each draft."""
        return max(0, self.stop - len(self.sequence.tokens) + 1)

    def with_drafts(self, drafts: tuple[int, ...]) -> "Chunk":
        """Return the chunk with these drafts in place of its own."""
        return self._replace(stop=self.stop - len(self.drafts) + len(drafts), drafts=drafts)
