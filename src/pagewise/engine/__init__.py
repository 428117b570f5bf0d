"""The serving engine: many prompts through one model at once (lesson 9).

llm            LLM: generate, stream, or step by step
checks         the arguments of LLM and of requests, checked once
scheduler      who computes what in the next step, and what its tokens do to their requests
sequence       what is kept of a request, and its text as it comes
memory         where keys and values lie: paged, or dense
batch          a step as one value
model_runner   one forward pass for a step, and the tokens after it
sampling       from logits to tokens
beam_search    the likeliest sequences instead of drawn ones
profile        where a step's time goes
flash_decoding_plus_plus  lesson 8's products and softmax in a step
interrupts     Ctrl-C between two steps of bookkeeping

Measuring it: `pagewise.experiments.engine_benchmark`, with `engine_workload` and `engine_results`.
"""

from pagewise.engine.llm import LLM
from pagewise.engine.sampling import SamplingParams
from pagewise.engine.sequence import Choice, Output, Piece
