"""The bodies of the two endpoints, completions and chat, and the prompt of a conversation (lesson 9)."""

import reprlib
from threading import Event
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from pagewise.engine.request import Request
from pagewise.engine.serve.body import Body, NumLogprobs, Prompt, Strict, Whole
from pagewise.engine.serve.errors import Refused
from pagewise.engine.serve.tokens import Token, Tokens

Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=2**14, fail_fast=True)]
ListsOfIds = Annotated[list[Ids], Field(max_length=2**14, fail_fast=True)]


class CompletionBody(Body):
    """POST /v1/completions: prompts as texts or token ids."""

    id_prefix, object, chunk_object, prompt_field = "cmpl-", "text_completion", "text_completion", "prompt"

    # stops at the first item of the wrong kind, so that a large wrong value costs other clients little time
    prompt: Annotated[str | Texts | ListsOfIds | Ids, Field(union_mode="left_to_right")]
    logprobs: NumLogprobs | None = None

    @property
    def num_likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Prompt]:
        if self.prompt == []:
            raise Refused("prompt must hold at least one prompt, got none", "prompt")
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    def requests(self, tokens: Tokens, left: Event) -> list[Request]:
        sampling, requests = self.sampling(tokens), []
        for prompt in self.prompts:
            ids = tokens.encode(prompt, "prompt", left) if isinstance(prompt, str) else prompt
            requests.append(self.prepared(tokens, ids, sampling))
        return requests

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: list[list[Token]] | None) -> dict:
        columns = None
        if logprobs is not None:
            columns = {
                "tokens": [_key(step[0]) for step in logprobs],
                "token_logprobs": [step[0].logprob for step in logprobs],
                # of tokens with the same bytes, the chosen one or else the likeliest
                "top_logprobs": [{_key(token): token.logprob for token in reversed(step)} for step in logprobs],
            }
        return {"index": index, "text": text, "logprobs": columns, "finish_reason": finish_reason}


def _key(token: Token) -> str:
    """Return the text of a token, or "bytes:…" for a part of a character, as OpenAI writes it."""
    return f"bytes:{token.text}" if token.utf8 is not None and token.text.encode() != token.utf8 else token.text


MOST_MESSAGES, MOST_PARTS = 4096, 4096  # per body and per message; other clients wait while each of them is read


class Part(TypedDict):  # which is read five times as fast as a model
    """A part of a message: text only."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | Annotated[list[Part], Field(max_length=MOST_PARTS)], Field(union_mode="left_to_right")]

    @property
    def text(self) -> str:
        """The text of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part["text"] for part in self.content)


class ChatBody(Body):
    """POST /v1/chat/completions: a conversation."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"

    messages: Annotated[list[Message], Field(max_length=MOST_MESSAGES)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def num_likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[Prompt]:
        return [""]  # a conversation is always one prompt

    def requests(self, tokens: Tokens, left: Event) -> list[Request]:
        if self.top_logprobs and not self.logprobs:
            raise Refused(f"top_logprobs = {self.top_logprobs} needs logprobs = true", "top_logprobs")
        text, template = chat_prompt(self.messages, tokens.tokenizer)
        # a template has written the first token of a text
        ids = tokens.encode(text, "messages", left, **({"add_special_tokens": False} if template else {}))
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is None:  # fill the context, or the memory
            if len(ids) >= tokens.context:
                raise tokens.too_long(len(ids), "messages")
            most = max(1, tokens.llm.max_new_tokens(ids, n=self.width))
        return [self.prepared(tokens, ids, self.sampling(tokens, max_tokens=most))]

    def openings(self) -> list[dict]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self.width)]

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: list[list[Token]] | None) -> dict:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}

    def choice(self, index: int, text: str, finish_reason: str, logprobs: list[list[Token]] | None) -> dict:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}


def chat_prompt(messages: list[Message], tokenizer: Any) -> tuple[str, bool]:
    """Return a conversation as a text, and whether the chat template of its tokenizer wrote it.

    Without a template, each message is a line "role: …", and the model continues after a last "assistant:". The role
    "developer" is OpenAI's newer name of "system". A template that does not know this name gets "system".
    """
    if not messages:
        raise Refused("messages must hold at least one message, got none", "messages")
    template = getattr(tokenizer, "chat_template", None)
    known = template.get("default", "") if isinstance(template, dict) else template or ""
    conversation = [{"role": message.role, "content": message.text} for message in messages]
    for message in conversation:
        if message["role"] == "developer" and "developer" not in known:
            message["role"] = "system"
    if not template:
        return "".join("{role}: {content}\n".format_map(message) for message in conversation) + "assistant:", False
    try:
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template may raise anything
        raise Refused(f"messages do not fit the model's chat template: {error}", "messages") from error
    for message in conversation:
        # the thoughts of an assistant may be left out
        if message["role"] != "assistant" and message["content"].strip() not in text:
            raise Refused(f"messages: the model's chat template leaves out {reprlib.repr(message)}", "messages")
    return text, True


def _logprobs(logprobs: list[list[Token]] | None) -> dict | None:
    def entry(token: Token) -> dict:
        utf8 = None if token.utf8 is None else list(token.utf8)
        return {"token": token.text, "logprob": token.logprob, "bytes": utf8}

    if logprobs is None:
        return None
    return {"content": [entry(step[0]) | {"top_logprobs": [*map(entry, step[1:])]} for step in logprobs]}
