"""POST /v1/completions: prompts as texts or token ids (lesson 9)."""

from typing import Annotated

from pydantic import Field

from pagewise.engine import LLM
from pagewise.engine.sequence import Request
from pagewise.engine.serve.body import Body, NumLogprobs, Prompt, Refused, Told

Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=2**14, fail_fast=True)]
ListsOfIds = Annotated[list[Ids], Field(max_length=2**14, fail_fast=True)]


class CompletionBody(Body):
    """POST /v1/completions: prompts as texts or token ids."""

    id_prefix, object, chunk_object, prompt_field = "cmpl-", "text_completion", "text_completion", "prompt"

    # a value of the wrong kind is noticed at its first item, so that a large one costs other clients little
    prompt: Annotated[str | Texts | ListsOfIds | Ids, Field(union_mode="left_to_right")]
    logprobs: NumLogprobs | None = None

    @property
    def num_rivals(self) -> int | None:
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

    def part(self, index: int, text: str, finish_reason: str | None, told: list[Told] | None) -> dict:
        logprobs = (
            None
            if told is None
            else {
                "tokens": [one.token for one in told],
                "token_logprobs": [one.logprob for one in told],
                "top_logprobs": [dict(one.rivals) for one in told],
            }
        )
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
