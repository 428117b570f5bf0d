"""POST /v1/completions: prompts as texts or token ids (lesson 9)."""

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.serve.body import Body, NumLogprobs, Prompt, Refused, Told


class CompletionBody(Body):
    """POST /v1/completions: prompts as texts or token ids."""

    id_prefix, object, chunk_object, prompt_field = "cmpl-", "text_completion", "text_completion", "prompt"

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: NumLogprobs | None = None

    @property
    def num_rivals(self) -> int | None:
        return self.logprobs

    def requests(self, llm: LLM) -> list[tuple[Prompt, SamplingParams]]:
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts = [self.prompt] if one else self.prompt
        if not prompts:
            raise Refused("prompt must hold at least one prompt, got none", "prompt")
        return [(prompt, self.sampling()) for prompt in prompts]

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
