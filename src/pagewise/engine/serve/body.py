"""The fields that the bodies of both endpoints share, and how an answer becomes JSON (lesson 9).

Both endpoints take the options of `SamplingParams` by their names. OpenAI's client sends the options that OpenAI does
not have (top_k, min_p, beam_width, repetition_penalty, ignore_eos) as `extra_body`. This module checks types, and
`SamplingParams` checks values.
An option of OpenAI's that would change the answer and is not implemented is refused.

Each prompt of a body has width = max(n, beam_width) choices. Choice c of prompt i has the index i · width + c, in a
stream and in a whole answer. Beams are sorted, best first.
"""

import reprlib
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagewise.engine import LLM, Output, SamplingParams
from pagewise.engine.request import Piece, Request

Prompt = str | list[int]
LEAST_LOGPROB = -9999.0  # in place of −∞, which JSON does not have
MOST_STOPS, LONGEST_STOP = 16, 256  # all are searched for in every new piece of text, while others wait
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]  # 20: OpenAI's limit

SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "n",
    "beam_width",
    "stop",
    "seed",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
NO_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
}
"""Options of OpenAI's that change no answer."""
NEUTRAL = {
    "logit_bias": {},
    "best_of": 1,
    "suffix": "",
    "echo": False,
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "response_format": {"type": "text"},
}
"""Options of OpenAI's that are not implemented: the value of each that changes nothing."""


class Refused(Exception):
    """A request that gets a 4xx. The error says what is wrong, and in which field of the body."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status

    @classmethod
    def of(cls, error: Exception, body: "Body", otherwise: str | None) -> "Refused":
        """Turn an error of the engine into a refusal. The first word of its message is the name of the field."""
        name = str(error).split()[0]
        return cls(str(error), name if name in type(body).model_fields else otherwise)


class Strict(BaseModel):
    """A body that is refused if a field has a wrong type."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Strict):
    """Options of a stream: whether a last chunk counts the tokens."""

    include_usage: bool | None = None


class Body(Strict):
    """The fields that both endpoints share. None means the same as a field that is left out."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    n: int | None = None
    beam_width: int | None = None
    stop: Stop | Annotated[list[Stop | int], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @classmethod
    def read(cls, body: bytes) -> "Body":
        """Parse a body. Refuse it if a type does not fit, or if it asks for something that is not implemented."""
        try:
            self = cls.model_validate_json(body)
        except ValidationError as error:
            raise _refused(error) from error
        for name, value in self.model_extra.items():
            if value is not None and name not in NO_EFFECT and (name not in NEUTRAL or value != NEUTRAL[name]):
                raise Refused(f"{name} = {reprlib.repr(value)} is not supported here", name)
        return self

    @property
    def num_likeliest(self) -> int | None:
        """The number of likeliest tokens whose log p is reported. None: no log p at all."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """How many choices each prompt has."""
        return max(self.n or 1, self.beam_width or 1)

    def sampling(self, **more: Any) -> SamplingParams:
        """Return the sampling parameters of every prompt."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        try:
            return SamplingParams(**given | more, logprobs=self.num_likeliest)
        except (ValueError, TypeError) as error:
            raise Refused.of(error, self, None) from error

    @property
    def prompts(self) -> list[Prompt]:
        """Each prompt, or a placeholder for it. The server counts the prompts before it works on them."""
        raise NotImplementedError

    def requests(self, llm: LLM) -> list[Request]:
        """Return a checked request for each prompt. Long prompts take long: call this in a worker thread."""
        raise NotImplementedError

    def prepared(self, llm: LLM, prompt: Prompt, sampling: SamplingParams) -> Request:
        """Return `llm.prepare(prompt, sampling)`. Its errors become refusals for the client."""
        try:
            return llm.prepare(prompt, sampling)
        except (ValueError, TypeError) as error:
            raise Refused.of(error, self, self.prompt_field) from error

    def openings(self) -> list[dict]:
        """The choices that a stream begins with."""
        return []

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: list["TokenLogprobs"] | None) -> dict:
        """Return what is new of a choice, as a stream sends it."""
        raise NotImplementedError

    def choice(self, index: int, text: str, finish_reason: str, logprobs: list["TokenLogprobs"] | None) -> dict:
        """All of a choice."""
        return self.part(index, text, finish_reason, logprobs)

    def piece(self, prompt: int, piece: Piece, tokenizer: Any) -> dict:
        """Return what a step added to a choice of a prompt."""
        logprobs = self._in_text(piece.logprobs, tokenizer)
        return self.part(prompt * self.width + piece.choice, piece.text, piece.finish_reason, logprobs)

    def choices(self, prompt: int, output: Output, tokenizer: Any) -> list[dict]:
        """The choices of a prompt."""
        return [
            self.choice(prompt * self.width + c, choice.text, choice.finish_reason, self._in_text(logprobs, tokenizer))
            for c, (choice, logprobs) in enumerate(zip(output.choices, output.logprobs, strict=True))
        ]

    def _in_text(self, logprobs: list[dict[int, float]] | None, tokenizer: Any) -> list["TokenLogprobs"] | None:
        """Return the chosen and the likeliest tokens of each step as text."""
        if logprobs is None:
            return None
        texts = [
            [(tokenizer.decode([token]), max(logprob, LEAST_LOGPROB)) for token, logprob in one.items()]
            for one in logprobs
        ]
        return [TokenLogprobs(*one[0], sorted(one, key=lambda token: -token[1])[: self.num_likeliest]) for one in texts]


class TokenLogprobs(NamedTuple):
    """The text and log p of a chosen token, and of the likeliest tokens, in falling order."""

    token: str
    logprob: float
    likeliest: list[tuple[str, float]]


def _refused(error: ValidationError) -> Refused:
    """Return a refusal that names the first wrong field and lists its errors."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    field = errors[0]["loc"][0] if errors[0]["loc"] else None
    said = dict.fromkeys(one["msg"] for one in errors if field in (None, *one["loc"][:1]))
    return Refused(f"{field or 'the body'}: {'; or: '.join(list(said)[:4])}", field)


def usage(outputs: list[Output]) -> dict:
    """Count the prompt tokens, those among them that the prefix cache had, and the generated tokens."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
