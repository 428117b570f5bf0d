"""A model without weights, on which the checker runs a reader's engine (lesson 9)."""

import torch
from torch import Tensor


class PretendModel:
    """A model for the checker: its slots hold tokens, and the next token depends on all tokens before it."""

    def __init__(self, num_blocks: int, block_size: int, budget: int) -> None:
        self.num_blocks, self.block_size, self.budget, self.steps = num_blocks, block_size, budget, 0
        self.slots: dict[int, tuple[int, int]] = {}  # slot → (position, token)

    def __call__(self, token_ids: list[int], tables: list[list[int]], inputs: dict[str, list[int]]) -> Tensor:
        if not token_ids:
            raise ValueError("a step has no tokens")
        if len(token_ids) > self.budget:
            raise ValueError(f"a step has {len(token_ids)} tokens, and the budget is {self.budget}")
        if len(token_ids) != len(inputs["positions"]):
            raise ValueError(f"a step has {len(token_ids)} token ids and {len(inputs['positions'])} positions")
        blocks = [block for table in tables for block in table]
        if len(set(blocks)) < len(blocks):
            raise ValueError(f"two sequences have the same block: {tables}")
        if not set(blocks) <= set(range(self.num_blocks)):
            raise ValueError(f"a table names a block that does not exist: {tables}")
        self.steps += 1
        for slot, position, token in zip(inputs["slots"], inputs["positions"], token_ids, strict=True):
            self.slots[slot] = position, token
        return torch.stack([self._logits(table, n) for table, n in zip(tables, inputs["seq_lens"], strict=True)])

    def _logits(self, table: list[int], length: int) -> Tensor:
        P, likeliest = self.block_size, 7
        for t in range(length):
            position, token = self.slots.get(table[t // P] * P + t % P, (-1, 0))
            likeliest = (31 * likeliest + token + 1 + (position != t)) % 89
        return torch.nn.functional.one_hot(torch.tensor(likeliest), 89).float()
