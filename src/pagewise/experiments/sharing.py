"""How many blocks sharing saves when one prompt has many continuations (lesson 4).

Parallel sampling forks a prompt n times. Beam search forks and frees at every step. Both run here on the real
BlockManager. Every step is counted twice: the blocks in use, and the blocks that separate copies would take.
Kwon et al. 2023, fig. 15, count the same.
"""

from typing import NamedTuple

import numpy as np

from pagewise.experiments.allocators import Request
from pagewise.paged_blocks import BlockManager
from pagewise.tools.checks import check_count
from pagewise.tools.sizes import cdiv


class Sharing(NamedTuple):
    """Block-steps (blocks in use, summed over all steps) and blocks copied on write."""

    shared: int
    separate: int
    copies: int

    @property
    def saved(self) -> float:
        """The fraction of blocks that sharing saves."""
        return 1 - self.shared / self.separate

    def __add__(self, other: "Sharing") -> "Sharing":
        return Sharing(*(a + b for a, b in zip(self, other, strict=True)))


def parallel_sampling(request: Request, num_samples: int, *, block_size: int = 16) -> Sharing:
    """Count `num_samples` continuations of one prompt, each `request.output` tokens long."""
    manager = _start(request, num_samples, block_size)
    for i in range(1, num_samples):
        manager.fork(0, i)
    counted = _count(manager)
    for _ in range(request.output):
        for i in range(num_samples):
            manager.append(i, 0)
        counted += _count(manager)
    return counted._replace(copies=manager.stats().copies)


def beam_search(
    request: Request, width: int, *, block_size: int = 16, confidence: float = 4.0, seed: int = 0
) -> Sharing:
    """Count `width` beams. At every step the best `width` of all continuations survive, whatever their parents are.

    No model runs. The next token's logits are `confidence` · normal numbers over 1000 words, new for every beam and
    step. With a confidence of 4, the likeliest word has a probability of about a third. With more confidence, more
    beams descend from a recent common ancestor, and they share more.
    """
    rng = np.random.default_rng(seed)
    manager = _start(request, width, block_size)
    for i in range(1, width):
        manager.fork(0, i)
    beams, next_id, scores, counted = list(range(width)), width, np.zeros(width), _count(manager)
    for step in range(request.output):
        logits = confidence * rng.standard_normal((1 if step == 0 else width, 1000))
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        best = -np.sort(-logprobs, axis=1)[:, :width]
        candidates = (scores[: len(best), None] + best).ravel()
        winners = np.sort(np.argsort(-candidates)[:width])  # children of one parent next to each other
        scores, parents = candidates[winners], [beams[w // width] for w in winners]
        survivors: list[int] = []
        for parent in parents:
            if parent in survivors:
                manager.fork(parent, next_id)
                survivors.append(next_id)
                next_id += 1
            else:
                survivors.append(parent)  # the first child continues its parent's sequence
        for beam in set(beams) - set(parents):
            manager.free(beam)
        beams = survivors
        for beam in beams:
            manager.append(beam, 0)
        counted += _count(manager)
    return counted._replace(copies=manager.stats().copies)


def _start(request: Request, num_sequences: int, block_size: int) -> BlockManager:
    """Return a manager that has enough blocks for separate copies and holds the prompt as sequence 0."""
    check_count("num_sequences", num_sequences)
    length = request.prompt + request.output
    manager = BlockManager((num_sequences + 1) * (cdiv(length, block_size) + 1), block_size)
    manager.allocate(0, [0] * request.prompt)
    return manager


def _count(manager: BlockManager) -> Sharing:
    manager.take_copies()  # nothing is stored here, so there is nothing to copy
    separate = sum(cdiv(manager.num_tokens(i), manager.block_size) for i in manager.sequences)
    return Sharing(manager.stats().used, separate, 0)
