"""The memory that a step takes beside weights and KV cache, measured on a GPU before the cache is made (lesson 9)."""

import torch
from torch import Tensor, nn

from pagewise.engine.request import Request
from pagewise.engine.sampling import Row, sample
from pagewise.engine.sampling_params import SamplingParams


@torch.inference_mode()
def step_nbytes(model: nn.Module, num_tokens: int, num_seqs: int) -> int:
    """Compute a step of `num_tokens` tokens that draws `num_seqs` tokens, and return the most bytes that it takes.

    Attention returns its queries, because its own memory is small. vLLM's profile run leaves it out, too.
    """
    device, config = next(model.parameters()).device, model.config

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    attend.sliding_window = getattr(config, "sliding_window", None)
    torch.cuda.reset_peak_memory_stats(device)
    before, tokens = torch.cuda.memory_allocated(device), torch.arange(num_tokens, device=device)
    positions = tokens % config.max_position_embeddings
    logits = model(tokens[None] % config.vocab_size, positions[None], attend, logits_for=tokens[:num_seqs])[0]
    request = Request([0], SamplingParams(top_p=0.5), None)  # whose draw sorts the vocabulary
    sample(logits, [Row(i, request, request.live[0]) for i in range(num_seqs)])
    peak = torch.cuda.max_memory_allocated(device) - before
    del tokens, positions, logits
    torch.cuda.empty_cache()  # the cache of keys and values may have it
    return peak
