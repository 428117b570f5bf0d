"""The serving engine: many prompts through one model at once (lesson 9).

llm            LLM: generate, stream, or step by step
scheduler      who computes what in the next step
sequence       what is kept of a request
memory         where keys and values lie: paged, or dense
batch          a step as one value
model_runner   one forward pass for a step
sampling       from logits to tokens
beam_search    the likeliest sequences instead of drawn ones
text           from tokens to text as they come
profile        where a step's time goes
workload       requests to measure an engine with, and what serving them took
results        what that says: in words, as ratios, as records
benchmark      every scheduler and cache on the same requests (python -m pagewise.engine.benchmark)
"""

from pagewise.engine.llm import LLM
from pagewise.engine.sampling import SamplingParams
from pagewise.engine.sequence import Choice, Output, Piece
