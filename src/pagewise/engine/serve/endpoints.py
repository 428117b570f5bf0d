"""The bodies of the two endpoints, completions and chat, and the prompt of a conversation (lesson 9)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pagewise.engine import LLM
from pagewise.engine.request import Request
from pagewise.engine.serve.body import Body, NumLogprobs, Prompt, Refused, Strict, TokenLogprobs

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
        if not self.prompt:
            raise Refused("prompt must hold at least one prompt, got none", "prompt")
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    def requests(self, llm: LLM) -> list[Request]:
        sampling = self.sampling()
        return [self.prepared(llm, prompt, sampling) for prompt in self.prompts]

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: list[TokenLogprobs] | None) -> dict:
        columns = None
        if logprobs is not None:
            columns = {
                "tokens": [one.token for one in logprobs],
                "token_logprobs": [one.logprob for one in logprobs],
                "top_logprobs": [dict(one.likeliest) for one in logprobs],
            }
        return {"index": index, "text": text, "logprobs": columns, "finish_reason": finish_reason}


MOST_MESSAGES, MOST_PARTS = 4096, 16  # per body and per message; other clients wait while each of them is read


class Part(Strict):
    """A part of a message: text only."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=MOST_PARTS)]

    @property
    def text(self) -> str:
        """The text of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body):
    """POST /v1/chat/completions: a conversation."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"

    messages: Annotated[list[Message], Field(max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def num_likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[Prompt]:
        return [""]  # a conversation is always one prompt

    def requests(self, llm: LLM) -> list[Request]:
        if self.top_logprobs and not self.logprobs:
            raise Refused(f"top_logprobs = {self.top_logprobs} needs logprobs = true", "top_logprobs")
        prompt, most = chat_prompt(self.messages, llm.tokenizer), self.max_completion_tokens
        if isinstance(prompt, str):
            prompt = llm.tokenizer.encode(prompt)
        if most is None:
            most = self.max_tokens
        if most is None:  # fill the context; `prepared` refuses a prompt that is already too long
            most = max(1, llm.max_new_tokens(prompt))
        return [self.prepared(llm, prompt, self.sampling(max_tokens=most))]

    def openings(self) -> list[dict]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self.width)]

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: list[TokenLogprobs] | None) -> dict:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}

    def choice(self, index: int, text: str, finish_reason: str, logprobs: list[TokenLogprobs] | None) -> dict:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}


def chat_prompt(messages: list[Message], tokenizer: Any) -> Prompt:
    """Return a conversation as a prompt, by the chat template of its tokenizer. Without a template the prompt is

        system: …
        user: …
        assistant:

    with a line for each message. The model continues after the last colon.
    """
    if not messages:
        raise Refused("messages must hold at least one message, got none", "messages")
    if not getattr(tokenizer, "chat_template", None):
        return "".join(f"{message.role}: {message.text}\n" for message in messages) + "assistant:"
    conversation = [{"role": message.role, "content": message.text} for message in messages]
    try:
        return tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template may raise anything
        raise Refused(f"messages do not fit the model's chat template: {error}", "messages") from error


def _logprobs(logprobs: list[TokenLogprobs] | None) -> dict | None:
    def entry(token: str, logprob: float) -> dict:
        part = "\N{REPLACEMENT CHARACTER}" in token  # part of a character: the text does not show its bytes
        return {"token": token, "logprob": logprob, "bytes": None if part else list(token.encode())}

    if logprobs is None:
        return None
    content = []
    for one in logprobs:
        top = [entry(*token) for token in one.likeliest]
        content.append(entry(one.token, one.logprob) | {"top_logprobs": top})
    return {"content": content}
