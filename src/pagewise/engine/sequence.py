"""What the engine keeps of a request: its sequences, and what it says about them in the end (lesson 9).

A request has one sequence, or several that share their prompt: n samples, or the beams of a beam search. They are
scheduled, preempted and resumed together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pagewise.engine.sampling import Pick, SamplingParams
from pagewise.engine.text import CONTEXT, Text, new_text
from pagewise.paged_blocks.prefix_cache import TokenBlocks

FinishReason = Literal["stop", "length", "error"]


class Choice(NamedTuple):
    """One of a request's n samples or beams."""

    token_ids: list[int]  # without the prompt; the token that ended it included
    text: str | None  # without what ended it; None without a tokenizer
    # "stop": an end token or a stop string; "length": max_tokens; "error": the model's logits were not finite
    finish_reason: FinishReason
    score: float  # Σ log p of its tokens; of a beam divided by their number


@dataclass(frozen=True)
class Output:
    """What became of a request. Its token_ids, text and finish_reason are those of choice 0."""

    request_id: int
    prompt_token_ids: list[int]
    choices: list[Choice]  # samples in the order of their index, which a stream gives too; beams best first
    logprobs: list[list[dict[int, float]] | None]  # of each choice, where asked for: {token: log p} at each step
    num_cached_tokens: int  # of the prompt, that the prefix cache had when the request was first admitted

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
    """What a step added to one choice, for a request's listener."""

    request_id: int
    choice: int
    token_ids: list[int]
    text: str  # may lag behind the tokens: half a character, or the beginning of a stop string, waits
    finish_reason: FinishReason | None
    logprobs: list[dict[int, float]] | None


Listener = Callable[[Piece], None]


class Sequence:
    """Tokens, and how many of them have their K and V in memory. It is its own id in the BlockManager."""

    def __init__(self, tokens: list[int], index: int = 0) -> None:
        self.tokens, self.index = tokens, index
        self.text: Text | None = None  # without a tokenizer, and of beams
        self.num_computed = 0
        self.score = 0.0
        self.logprobs: list[dict[int, float]] = []
        self.finish_reason: FinishReason | None = None

    def add(self, pick: Pick, finish_reason: FinishReason | None) -> None:
        """Add a token; `finish_reason` says why it is the last, or is None."""
        self.finish_reason = finish_reason
        self.tokens.append(pick.token)
        self.score += pick.logprob
        if pick.likeliest is not None:
            self.logprobs.append(pick.likeliest)

    def __repr__(self) -> str:
        return f"Sequence({len(self.tokens)} tokens, {self.num_computed} computed)"


class Request:
    """A prompt, how to continue it, and the sequences that do.

    `live` ones are not finished and all of the same length. In memory are either none of them (waiting), or the first
    alone with the `common` tokens that all begin with (until these are computed), or all (`forked`).
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
        self.common = 0
        self.waiting_for: TokenBlocks | list[int] | None = None  # common tokens, as the memory looks them up; kept
        self.forked = False
        self.num_cached_tokens: int | None = None
        self.seed = sampling.chosen_seed()

    @property
    def width(self) -> int:
        """How many sequences it may have at once."""
        return self.sampling.width

    @property
    def seats(self) -> int:
        """How many sequences it may still have at once: a sample that has ended needs no seat any more."""
        return self.width if self.width > self.sampling.n else len(self.live)

    @property
    def longest(self) -> int:
        """The most tokens that one of its sequences can have."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def most_slots(self) -> int:
        """The most slots that one of its sequences can need. The last token needs none: no token attends to it."""
        return self.longest - 1

    @property
    def described(self) -> str:
        """Its size, for messages."""
        return self.sampling.described(len(self.prompt))

    def common_tokens(self) -> list[int]:
        """The tokens that all live sequences begin with: the prompt at least."""
        first, *others = (sequence.tokens for sequence in self.live)
        length = min(len(sequence.tokens) for sequence in self.live)
        for other in others:
            length = next((i for i in range(length) if first[i] != other[i]), length)
        return first[:length]

    def text_of(self, token_ids: list[int]) -> str | None:
        """Return the text of new tokens that come all at once."""
        context = self.prompt[-CONTEXT:]
        return self.tokenizer and new_text(self.tokenizer, context + token_ids, len(context))

    def in_memory(self) -> list[Sequence]:
        """Its sequences that hold memory, while it runs."""
        return self.live if self.forked else self.live[:1]


class Chunk(NamedTuple):
    """Tokens start … stop − 1 of a sequence, to be computed in one step."""

    request: Request
    sequence: Sequence
    start: int
    stop: int

    @property
    def gives_logits(self) -> bool:
        """Whether its last token is the newest of the sequence, which the next one follows."""
        return self.stop == len(self.sequence.tokens)
