"""The bodies of both endpoints, completions and chat, and the prompt of a conversation (lesson 9).

Both endpoints take the options of `SamplingParams` by their names. OpenAI's client sends the options that OpenAI does
not have (top_k, min_p, beam_width, …) as `extra_body`. An option that is left out has the value that the checkpoint
recommends, or that of `SamplingParams`. This module checks types, and `SamplingParams` checks values. An option of
OpenAI's that would change the answer and is not implemented is refused.

Each prompt of a body has width = max(n, beam_width) choices. Choice c of prompt i has the index i · width + c, in a
stream and in a whole answer. Beams are sorted, best first.
"""

import re
import reprlib
from codecs import BOM_UTF8
from inspect import signature
from threading import Event
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from typing_extensions import TypedDict

from pagewise.engine import SamplingParams
from pagewise.engine.request import Piece, Request
from pagewise.engine.serve.answer import Failure
from pagewise.engine.serve.tokens import Token, Tokens

MOST_STOPS, LONGEST_STOP = 16, 256  # all are searched for in every new piece of text, while others wait
MOST_BIASES = 1024  # all are added in every step
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Key = Annotated[int, Field(strict=False)]  # JSON writes 5 as "5" where it is a key
MOST_OPTIONS = 16  # of a stream


def _at_most(most: int) -> BeforeValidator:
    """Refuse a larger object before any of its items is read: other clients wait meanwhile."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} items, got {len(value)}")
        return value

    return BeforeValidator(check)


# JavaScript and some tools write 16 as 16.0
Whole = Annotated[int, BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)]
NumLogprobs = Annotated[Whole, Field(ge=0, le=20)]  # 20: OpenAI's limit

NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"}
NO_EFFECT |= {"prompt_cache_key", "prompt_cache_retention"}
"""Options of OpenAI's that change no answer."""
NEUTRAL = {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "modalities": ["text"]}
NEUTRAL |= {"skip_special_tokens": True, "suffix": "", "echo": False, "response_format": {"type": "text"}}
"""Options of OpenAI's and vLLM's that are not implemented: the value of each that changes nothing."""
CHOICES = {"tools": "tool_choice", "functions": "function_call"}  # "none": the first ones change nothing either


class Body(BaseModel, strict=True, extra="allow"):
    """The fields that both endpoints share. None means the same as a field that is left out.

    Each endpoint adds `num_likeliest`, the number of likeliest tokens whose log p is reported (None: no log p at all),
    and two methods: `requests` returns a checked request for each prompt, in a worker thread, which ends if the client
    has `left`; `said` returns what a choice, or a piece of it, has besides its index and its end.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]
    prompts: ClassVar[list[str | list[int]]]  # the server counts them before it works on them

    model: str | None = None
    stream: bool | None = None
    # include_usage: a last chunk counts the tokens
    stream_options: Annotated[dict[str, bool | None] | None, _at_most(MOST_OPTIONS)] = None
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
    logit_bias: Annotated[dict[Key, float] | None, _at_most(MOST_BIASES)] = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @classmethod
    def read(cls, body: bytes) -> "Body":
        """Parse a body. Refuse it if a type does not fit, or if it asks for something that is not implemented."""
        try:
            self = cls.model_validate_json(body.removeprefix(BOM_UTF8))
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            field = errors[0]["loc"][0] if errors[0]["loc"] else None
            said = dict.fromkeys(one["msg"] for one in errors if field in (None, *one["loc"][:1]))
            hint = " (half of a surrogate pair is not a character)" if "hex escape" in errors[0]["msg"] else ""
            raise Failure(f"{field or 'the body'}: {'; or: '.join(list(said)[:4])}{hint}", field) from error
        neutral = NEUTRAL | {"best_of": self.n or 1}
        for name, value in self.model_extra.items():
            unused = name in NO_EFFECT or self.model_extra.get(CHOICES.get(name)) == "none"
            if value is not None and value != neutral.get(name) and not unused:
                raise Failure(f"{name} = {reprlib.repr(value)} is not supported here", name)
        return self

    def shown(self, prompt: int, request: Request, piece: Piece, tokens: Tokens, *, first: bool = True) -> dict:
        """Return a piece of a choice of a prompt as JSON. `first`: a stream has shown nothing of the choice before."""
        said = self.said(piece.text, tokens.steps(piece.logprobs, self.num_likeliest), first=first)
        return {"index": prompt * request.width + piece.choice, **said, "finish_reason": piece.finish_reason}

    def request(self, ids: list[int], tokens: Tokens, **more: Any) -> Request:
        """Return a request that the engine accepts. Refuse one that it does not: the error begins with its field."""
        given = self.model_dump(include={*SamplingParams.__match_args__}, exclude_none=True)
        try:
            sampling = tokens.llm.sampling_params(**given | more | {"logprobs": self.num_likeliest})
            if len(ids) + sampling.max_tokens > tokens.context:
                raise tokens.too_long(len(ids), self.prompt_field, sampling.max_tokens)
            return tokens.llm.prepare(ids, sampling)
        except (ValueError, TypeError) as error:
            name = str(error).split()[0].replace("prompt_logprobs", "echo")
            raise Failure(str(error), name if name in type(self).model_fields else self.prompt_field) from error


Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=2**14, fail_fast=True)]
ListsOfIds = Annotated[list[Ids], Field(max_length=2**14, fail_fast=True)]


class CompletionBody(Body):
    """POST /v1/completions: prompts as texts or token ids."""

    id_prefix, object, chunk_object, prompt_field = "cmpl-", "text_completion", "text_completion", "prompt"

    # stops at the first item of the wrong kind, so that a large wrong value costs other clients little time
    prompt: Annotated[str | Texts | ListsOfIds | Ids, Field(union_mode="left_to_right")]
    logprobs: NumLogprobs | None = None
    echo: bool | None = None  # the text, and log-probabilities if there are any, begin with the prompt

    @property
    def num_likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt."""
        if self.prompt == []:
            raise Failure("prompt must hold at least one prompt, got none", "prompt")
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    def requests(self, tokens: Tokens, left: Event) -> list[Request]:
        scored = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        most = (self.logprobs or 0) if scored else None
        encoded = (tokens.encode(one, "prompt", left) if isinstance(one, str) else one for one in self.prompts)
        return [self.request(ids, tokens, prompt_logprobs=most) for ids in encoded]

    def shown(self, prompt: int, request: Request, piece: Piece, tokens: Tokens, *, first: bool = True) -> dict:
        if self.echo and first:
            text, logprobs = self.prompts[prompt], piece.logprobs
            text = text if isinstance(text, str) else tokens.tokenizer.decode(text)
            if self.logprobs is not None:
                logprobs = [{request.prompt[0]: None}, *request.prompt_logprobs, *(logprobs or [])]
            piece = piece._replace(text=text + piece.text, logprobs=logprobs)
        return super().shown(prompt, request, piece, tokens, first=first)

    def said(self, text: str, steps: list[list[Token]] | None, *, first: bool) -> dict:
        if steps is None:
            return {"text": text, "logprobs": None}
        # of tokens with the same bytes, the chosen one or else the likeliest
        likeliest = [{token.key: token.logprob for token in reversed(step)} for step in steps]
        columns = {
            "tokens": [step[0].key for step in steps],
            "token_logprobs": [step[0].logprob for step in steps],
            "top_logprobs": [None if None in top.values() else top for top in likeliest],
        }
        return {"text": text, "logprobs": columns}


MOST_MESSAGES, MOST_PARTS = 4096, 4096  # per body and per message; other clients wait while each of them is read


MAY_BE_LEFT_OUT = {"name", "reasoning", "reasoning_content"}
"""Fields of a message that a chat template need not know."""


class Part(TypedDict):  # which is read five times as fast as a model
    """A part of a message: text only."""

    type: Literal["text"]
    text: str


Parts = Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


class Message(BaseModel, strict=True, extra="allow"):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | Parts, Field(union_mode="left_to_right")]


class ChatBody(Body):
    """POST /v1/chat/completions: a conversation, which is one prompt."""

    id_prefix, object, chunk_object, prompt_field = "chatcmpl-", "chat.completion", "chat.completion.chunk", "messages"

    messages: Annotated[list[Message], Field(max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the chat template, as enable_thinking of Qwen3

    prompts: ClassVar[list[str]] = [""]  # so many are counted

    @property
    def num_likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def requests(self, tokens: Tokens, left: Event) -> list[Request]:
        if self.top_logprobs and not self.logprobs:
            raise Failure(f"top_logprobs = {self.top_logprobs} needs logprobs = true", "top_logprobs")
        text, template = chat_prompt(self.messages, tokens.tokenizer, self.chat_template_kwargs)
        # a template has written the first token of a text
        ids = tokens.encode(text, "messages", left, **({"add_special_tokens": False} if template else {}))
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is None:  # fill the context, or the memory
            if len(ids) >= tokens.context:
                raise tokens.too_long(len(ids), "messages")
            most = max(1, tokens.llm.max_new_tokens(ids, n=max(self.n or 1, self.beam_width or 1)))
        return [self.request(ids, tokens, max_tokens=most)]

    def said(self, text: str, steps: list[list[Token]] | None, *, first: bool) -> dict:
        logprobs = None
        if steps is not None:  # of the chosen token, and of the likeliest ones
            named = [
                [{"token": text, "logprob": p, "bytes": None if utf8 is None else [*utf8]} for text, utf8, p, _ in step]
                for step in steps
            ]
            logprobs = {"content": [chosen | {"top_logprobs": likeliest} for chosen, *likeliest in named]}
        if not self.stream:
            return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"delta": delta, "logprobs": logprobs}


def chat_prompt(messages: list[Message], tokenizer: Any, variables: dict[str, Any] | None = None) -> tuple[str, bool]:
    """Return a conversation as a text, and whether the chat template of its tokenizer wrote it.

    Without a template, each message is a line "role: …", and the model continues after a last "assistant:". The role
    "developer" is OpenAI's newer name of "system". A template that does not know this name gets "system".
    """
    if not messages:
        raise Failure("messages must hold at least one message, got none", "messages")
    template = getattr(tokenizer, "chat_template", None)
    known = template.get("default", "") if isinstance(template, dict) else template or ""
    roles, chat = {} if "developer" in known else {"developer": "system"}, []
    words = set(re.findall(r"\w+", known))
    for message in messages:
        role, content, more = message.role, message.content, message.model_extra
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if unknown := [name for name, value in more.items() if value and name not in words | MAY_BE_LEFT_OUT]:
            said = f"{reprlib.repr(unknown[0])} of a message is not known to the model's chat template"
            raise Failure(f"messages: {said}", "messages")
        known_more = {name: more[name] for name in more if name in words}
        chat.append(known_more | {"role": roles.get(role, role), "content": text})
    taken = {"messages", *signature(tokenizer.apply_chat_template).parameters} if template else set()
    for name in variables or ():
        if name in taken or name not in words:
            raise Failure(f"chat_template_kwargs: the chat template has no option {name!r:.80}", "chat_template_kwargs")
    if not template:
        return "".join("{role}: {content}\n".format_map(message) for message in chat) + "assistant:", False
    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **variables or {})
    except Exception as error:  # a template may raise anything
        raise Failure(f"messages do not fit the model's chat template: {error}", "messages") from error
    end = 0  # of what was found last: most templates keep the order, and a search from the beginning takes longer
    for message in chat:
        content = message["content"].strip()
        if (start := text.find(content, end)) >= 0:
            end = start + len(content)
        elif message["role"] != "assistant" and content not in text:  # the thoughts of an assistant may be left out
            raise Failure(f"messages: the model's chat template leaves out {reprlib.repr(message)}", "messages")
    return text, True
