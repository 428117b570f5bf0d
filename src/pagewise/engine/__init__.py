"""The serving engine: many prompts through one model at once (lesson 9).

- llm: the class LLM, which makes an engine, generates and streams.
- steps: the class Engine, which computes step by step.
- checks: all checks of the arguments of LLM and of requests.
- scheduler: chooses the work of the next step, and gives the new tokens to their requests.
- sequence: the state of a request, and its text as it grows.
- memory, block_tensors, dense_memory: three ways to keep keys and values.
- batch: the inputs of a step as one value.
- model_runner: runs the model once for a step, and chooses the next tokens.
- followers, follow: tensor parallelism. Process 0 decides every step, and other processes follow.
- sampling: draws tokens from logits.
- beam_search: finds the likeliest sequences instead of drawing tokens.
- flash_decoding_plus_plus: lesson 8's products and unified maximum in a step.
- profile: measures the parts of a step.
- command_line: the options of LLM that both commands share.
- interrupts: delays Ctrl-C until the bookkeeping of a step is complete.

`pagewise.experiments.engine_benchmark` measures the engine, with `engine_workload` and `engine_results`.
"""

from pagewise.engine.llm import LLM
from pagewise.engine.sampling import SamplingParams
from pagewise.engine.sequence import Choice, Output, Piece
