"""The fields that the bodies of both endpoints share, and how an answer becomes JSON (lesson 9).

Both endpoints take the options of `SamplingParams` by their names. OpenAI's client sends the options that OpenAI does
not have (top_k, min_p, beam_width, …) as `extra_body`. An option that is left out has the
value that the checkpoint recommends, or that of `SamplingParams`. This module checks types, and `SamplingParams` checks
values. An option of OpenAI's that would change the answer and is not implemented is refused.

Each prompt of a body has width = max(n, beam_width) choices. Choice c of prompt i has the index i · width + c, in a
stream and in a whole answer. Beams are sorted, best first.
"""

import reprlib
from codecs import BOM_UTF8
from dataclasses import fields
from threading import Event
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pagewise.engine import Output, SamplingParams
from pagewise.engine.request import Piece, Request
from pagewise.engine.serve.errors import Refused
from pagewise.engine.serve.tokens import Token, Tokens

Prompt = str | list[int]
MOST_STOPS, LONGEST_STOP = 16, 256  # all are searched for in every new piece of text, while others wait
MOST_BIASES = 1024  # all are added in every step
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
# JavaScript and some tools write 16 as 16.0
Whole = Annotated[int, BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)]
NumLogprobs = Annotated[Whole, Field(ge=0, le=20)]  # 20: OpenAI's limit

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
    "skip_special_tokens": True,
    "suffix": "",
    "echo": False,
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "response_format": {"type": "text"},
}
"""Options of OpenAI's and vLLM's that are not implemented: the value of each that changes nothing."""


class Strict(BaseModel):
    """A body that is refused if a field has a wrong type."""

    model_config = ConfigDict(strict=True, extra="allow")


class Body(Strict):
    """The fields that both endpoints share. None means the same as a field that is left out."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None  # include_usage: a last chunk counts the tokens
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    n: Whole | None = None
    beam_width: Whole | None = None
    stop: Stop | Annotated[list[Stop | int], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_STOPS)] | None = None
    seed: Whole | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[int, float], Field(max_length=MOST_BIASES)] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @classmethod
    def read(cls, body: bytes) -> "Body":
        """Parse a body. Refuse it if a type does not fit, or if it asks for something that is not implemented."""
        try:
            self = cls.model_validate_json(body.removeprefix(BOM_UTF8))
        except ValidationError as error:
            raise _refused(error) from error
        neutral = NEUTRAL | {"best_of": self.n or 1}
        for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
            if self.model_extra.get(choice) == "none":
                neutral[tools] = self.model_extra.get(tools)
        for name, value in self.model_extra.items():
            if value is not None and name not in NO_EFFECT and (name not in neutral or value != neutral[name]):
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

    def sampling(self, tokens: Tokens, **more: Any) -> SamplingParams:
        """Return the sampling parameters of every prompt."""
        names = {field.name for field in fields(SamplingParams)} - {"logprobs"}
        given = {name: value for name, value in self if name in names and value is not None}
        try:
            return tokens.llm.sampling_params(**given | more, logprobs=self.num_likeliest)
        except (ValueError, TypeError) as error:
            raise refused(error, self, None) from error

    @property
    def prompts(self) -> list[Prompt]:
        """Each prompt, or a placeholder for it. The server counts the prompts before it works on them."""
        raise NotImplementedError

    def requests(self, tokens: Tokens, left: Event) -> list[Request]:
        """Return a checked request for each prompt. A worker thread calls this; it ends if the client has `left`."""
        raise NotImplementedError

    def prepared(self, tokens: Tokens, ids: list[int], sampling: SamplingParams) -> Request:
        """Return a request that the engine accepts. Refuse one that it does not."""
        if len(ids) + sampling.max_tokens > tokens.context:
            raise tokens.too_long(len(ids), self.prompt_field, sampling.max_tokens)
        try:
            return tokens.llm.prepare(ids, sampling)
        except (ValueError, TypeError) as error:
            raise refused(error, self, self.prompt_field) from error

    def openings(self) -> list[dict]:
        """The choices that a stream begins with."""
        return []

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: list[list[Token]] | None) -> dict:
        """Return what is new of a choice, as a stream sends it. `logprobs` are those of `Tokens.steps`."""
        raise NotImplementedError

    def choice(self, index: int, text: str, finish_reason: str, logprobs: list[list[Token]] | None) -> dict:
        """All of a choice."""
        return self.part(index, text, finish_reason, logprobs)

    def piece(self, prompt: int, piece: Piece, tokens: Tokens) -> dict:
        """Return what a step added to a choice of a prompt."""
        logprobs = tokens.steps(piece.logprobs, self.num_likeliest)
        return self.part(prompt * self.width + piece.choice, piece.text, piece.finish_reason, logprobs)

    def choices(self, prompt: int, output: Output, tokens: Tokens) -> list[dict]:
        """The choices of a prompt."""
        first, logprobs = prompt * self.width, (tokens.steps(one, self.num_likeliest) for one in output.logprobs)
        return [
            self.choice(first + c, choice.text, choice.finish_reason, steps)
            for c, (choice, steps) in enumerate(zip(output.choices, logprobs, strict=True))
        ]


def refused(error: Exception, body: Body, otherwise: str | None) -> Refused:
    """Turn an error of the engine into a refusal. The first word of its message is the name of the field."""
    name = str(error).split()[0]
    return Refused(str(error), name if name in type(body).model_fields else otherwise)


def _refused(error: ValidationError) -> Refused:
    """Return a refusal that names the first wrong field and lists its errors."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    field = errors[0]["loc"][0] if errors[0]["loc"] else None
    said = dict.fromkeys(one["msg"] for one in errors if field in (None, *one["loc"][:1]))
    hint = " (half of a surrogate pair is not a character)" if "hex escape" in errors[0]["msg"] else ""
    return Refused(f"{field or 'the body'}: {'; or: '.join(list(said)[:4])}{hint}", field)


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
