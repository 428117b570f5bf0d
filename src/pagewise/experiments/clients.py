"""Eight clients ask one model: when does each see its first token, and when is its answer complete? (lesson 9)

Time is counted in steps of the model, so the result is the same on every machine. The engine is used as a client uses
it: `add_request` and `step`.
"""

from typing import NamedTuple

import torch

from pagewise.engine import LLM, SamplingParams
from pagewise.models import tiny_model
from pagewise.models.load import TINY

ARRIVALS = (0, 0, 1, 2, 4, 6, 9, 12)  # the step before which each client asks
ANSWERS = (12, 30, 6, 18, 9, 24, 5, 15)  # tokens of each answer
PROMPT = 24  # tokens


class Client(NamedTuple):
    """The steps at which a client asks, has its first token, and has its whole answer."""

    asked: int
    first: int
    done: int


def serve(scheduler: str, seats: int = 8) -> list[Client]:
    """Serve the clients with one of the engine's schedulers, and return when each was served.

    A running request gets one token in each step, so its first token comes len(answer) − 1 steps before its last.
    """
    llm = LLM(tiny_model()[0], num_blocks=256, scheduler=scheduler, max_num_seqs=seats, prefix_cache=False)
    prompts = [[i + 1] * PROMPT for i in range(len(ARRIVALS))]
    served: dict[int, Client] = {}
    step = 0
    while len(served) < len(prompts):
        for i in (i for i, arrival in enumerate(ARRIVALS) if arrival == step):
            llm.add_request(prompts[i], SamplingParams(max_tokens=ANSWERS[i], temperature=0, ignore_eos=True))
        with torch.no_grad():
            outputs = llm.step()
        step += 1
        for output in outputs:
            i = prompts.index(output.prompt_token_ids)
            served[i] = Client(ARRIVALS[i], step - ANSWERS[i] + 1, step)
    return [served[i] for i in range(len(prompts))]


def pieces_by_step(prompt: str, *, drafts: int, temperature: float = 0.0, tokens: int = 64) -> list[str]:
    """Return the piece of text that each step gives. `drafts` is the number of tokens that a step guesses at most."""
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=3, ignore_eos=True)
    with torch.no_grad():
        return list(LLM(TINY, num_blocks=64, speculate=drafts).stream(prompt, sampling))
