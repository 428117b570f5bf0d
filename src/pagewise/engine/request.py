"""A request in the engine: its sequences, what they have drawn, and its output (lesson 9).

A request has one sequence, or several that share their prompt: n samples, or the beams of a beam search. They are
scheduled, preempted and resumed together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pagewise.engine.sampling_params import Pick, SamplingParams
from pagewise.engine.speculation import Drafter
from pagewise.engine.text import Text
from pagewise.paged_blocks.pool import PagedSequence
from pagewise.paged_blocks.prefix_cache import TokenBlocks

FinishReason = Literal["stop", "length", "error"]
NOT_FINITE = "the model's logits are not finite"


class Choice(NamedTuple):
    """One of a request's n samples or beams."""

    token_ids: list[int]  # without the prompt, with the token that ended the sequence
    text: str | None  # without the end token or stop string; None without a tokenizer
    # "stop": an end token or a stop string; "length": max_tokens; "error": `Output.error` says why
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
    error: str | None = None  # why the first choice with finish_reason "error" ended
    prompt_logprobs: list[dict[int, float]] | None = None  # if requested: of each prompt token but the first

    @property
    def token_ids(self) -> list[int]:
        """The new tokens of choice 0."""
        return self.choices[0].token_ids

    @property
    def text(self) -> str | None:
        """The text of choice 0."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why choice 0 ended."""
        return self.choices[0].finish_reason


class Piece(NamedTuple):
    """The tokens and text that a step added to one choice, for a request's listener."""

    request_id: int
    choice: int
    token_ids: list[int]
    text: str  # may be behind the tokens: half a character or the beginning of a stop string waits
    finish_reason: FinishReason | None
    logprobs: list[dict[int, float]] | None
    error: str | None = None  # with finish_reason "error": why


Listener = Callable[[Piece], None]


@dataclass(eq=False, kw_only=True)
class Sequence(PagedSequence):
    """Tokens, the blocks of their K and V, the number of computed tokens, and the text of the new tokens.

    A token is drawn first and told later: `untold` holds the picks whose tokens are in `tokens` but not in the text.
    """

    index: int = 0
    text: Text | None = None  # None for beams
    drafter: Drafter | None = None  # from the first draft on
    counts: Any = None  # the `TokenCounts` of `sampling`, from the first penalty on
    untold: list[Pick] = field(default_factory=list)
    score: float = 0.0
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    def take(self, picks: list[Pick | None], drafts: tuple[int, ...], ends: frozenset[int], longest: int) -> int:
        """Append picks up to the first that ends the sequence or is no draft. Return how many drafts were right.

        Args:
            picks: after the newest token and after each draft. A missing one (None) ends the sequence with an error.
        """
        if len(self.tokens) == longest and None not in picks:  # max_tokens is 0
            self.finish_reason = "length"
            return 0
        right = 0
        for pick, draft in zip(picks, (*drafts, None), strict=True):
            if pick is None:
                self.finish_reason, self.error = "error", NOT_FINITE
                break
            self.tokens.append(pick.token)
            self.untold.append(pick)
            right += pick.token == draft
            if pick.token in ends or len(self.tokens) == longest:
                self.finish_reason = "stop" if pick.token in ends else "length"
            if self.finish_reason is not None or pick.token != draft:
                break
        return right

    def cut(self, finish_reason: FinishReason, error: str | None = None) -> None:
        """End the sequence before the tokens that are not told yet."""
        del self.tokens[len(self.tokens) - len(self.untold) :]
        self.untold.clear()
        self.finish_reason, self.error = finish_reason, error


class Request:
    """A prompt, the parameters of its continuation, and the sequences that continue it.

    The `live` sequences are not finished. They have the same length unless drafts were accepted for some of them. While
    the request waits, no sequence is in memory. Then the first sequence alone computes the `num_common` tokens with
    which all sequences begin. Once these tokens are computed, all sequences are in memory (`forked`).
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        tokenizer: Any,
        ends: frozenset[int] = frozenset(),  # all tokens that end a sequence
        seed: int = 0,  # of all draws
    ) -> None:
        self.prompt, self.sampling, self.tokenizer = prompt, sampling, tokenizer
        self.ends, self.seed = ends, seed
        self.id = -1  # not added yet
        self.listener: Listener | None = None
        self.width = sampling.width  # the most sequences at once
        self.longest = len(prompt) + sampling.max_tokens  # the most tokens of a sequence
        # the last token needs no slot, because no token attends to it
        self.most_slots = max(len(prompt), self.longest - 1)
        # of the prompt's tokens from the second on, as far as they are computed; None: not requested
        self.prompt_logprobs: list[dict[int, float]] | None = None if sampling.prompt_logprobs is None else []
        self.live: list[Sequence] = []
        for index in range(sampling.n):
            text = Text(tokenizer, sampling.stop_strings, prompt, sampling.min_tokens)
            self.live.append(Sequence(prompt.copy(), index=index, text=text if sampling.beam_width == 1 else None))
        self.finished: list[Sequence] = []
        self.beams: list[Choice] = []  # the hypotheses of a beam search, best first
        self.error: str | None = None  # why a beam search ended early
        self.common: TokenBlocks | None = None  # the common tokens, while the request waits
        self.num_common = 0
        self.forked = False
        self.num_cached_tokens: int | None = None

    def common_tokens(self) -> list[int]:
        """Return the tokens with which all live sequences begin: at least the prompt.

        If the sequences have different lengths, the newest token of the shortest is left out. It computes that itself.
        """
        lists = list(map(attrgetter("tokens"), self.live))
        lengths = set(map(len, lists))
        length = min(lengths) - (len(lengths) > 1)
        for other in lists[1:]:
            length = next((i for i in range(length) if lists[0][i] != other[i]), length)
        return lists[0][:length]

    def scored(self, start: int, stop: int) -> range:
        """Return the prompt tokens whose log p a step gives that computes the tokens start … stop − 1.

        Only for requests with prompt_logprobs.
        """
        first = max(start, len(self.prompt_logprobs))
        return range(first + 1, max(first, min(stop, len(self.prompt) - 1)) + 1)


class Chunk(NamedTuple):
    """The tokens start … stop − 1 of a sequence, which one step computes. The last of them may be drafts."""

    request: Request
    sequence: Sequence
    start: int
    stop: int
    num_logits: int  # of its last tokens, which give logits: those before scored tokens, the newest, and each draft
    drafts: tuple[int, ...] = ()  # guesses at the tokens after the newest one, see `speculation`
