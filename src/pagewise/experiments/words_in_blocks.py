"""A paged cache with readable contents: each token is a word, and its K and V are the number of the word (lesson 4)."""

import torch

from pagewise.figures.blocks import Snapshot, snapshot
from pagewise.paged_blocks import BlockManager, PagedKVCache

WORDS = ("", "the", "cat", "sat", "on", "a", "log", "and", "ran", "ate")


def write_words(manager: BlockManager, cache: PagedKVCache, name: str, start: int) -> None:
    """Write the tokens of a sequence, from token `start` on, into its slots of the cache."""
    device = cache.k[0].device
    slots = torch.tensor(manager.slots(name, start, manager.num_tokens(name)), device=device)
    numbers = torch.tensor(manager.tokens(name)[start:], device=device).float()[:, None, None]
    cache.write(0, slots, numbers, numbers)


def read_words(manager: BlockManager, cache: PagedKVCache, name: str) -> str:
    """Return the text of a sequence as the cache holds it now, read through the sequence's block table."""
    keys, _ = cache.gather(0, manager.block_table(name), manager.num_tokens(name))
    return " ".join(WORDS[int(number)] for number in keys)


def spelled(manager: BlockManager, cache: PagedKVCache | None = None) -> Snapshot:
    """Return the tables of the manager for a figure, with a word in each slot: the cache's, or else the sequence's."""
    if cache is not None:
        return snapshot(manager, [WORDS[int(number)] for number in cache.k[0].flatten().tolist()])
    shot = snapshot(manager)
    return shot._replace(contents=[WORDS[int(token or 0)] for token in shot.contents])
