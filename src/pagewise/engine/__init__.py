"""The serving engine: many prompts through one model at once (lesson 9).

- llm: the class LLM, which generates, streams, and computes step by step.
- config: all options of an engine as one value, with their checks.
- prompts: what a caller gives, as the engine needs it.
- scheduler: chooses the work of the next step.
- request: a request, its sequences and its output.
- text: the text of a sequence, as it grows.
- memory, paged_memory: what keeps keys and values. `pagewise.experiments` has two rivals.
- batch: the inputs of a step as one value.
- model_runner: runs the model once for a step.
- sampling_params, sampling: draw tokens from logits.
- beam_search: finds the likeliest sequences instead of drawing tokens.
- speculation: drafts of the next tokens, which one step verifies.
- leader: several processes. Process 0 decides every step, and other processes follow.
- sharded_memory: context parallelism. A cache whose tokens are spread over processes.
- flash_decoding_plus_plus: lesson 8's products in a step.
- profile: measures the parts of a step.
- command_line: the options that both commands share.
- interrupts: delays Ctrl-C until the bookkeeping of a step is complete.
"""

from pagewise.engine.llm import LLM
from pagewise.engine.request import Choice, Output, Piece
from pagewise.engine.sampling_params import SamplingParams
