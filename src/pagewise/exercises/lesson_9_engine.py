"""The last exercise of lesson 9: the loop of an engine, which joins the lesson's other exercises."""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.lesson_9 import preempted, schedule_step
from pagewise.exercises.lesson_9_batch import step_inputs
from pagewise.exercises.python import python_exercise


def small_engine(
    forward: Callable, requests: list[tuple], num_blocks: int, block_size: int, max_running: int, budget: int
) -> list[list[int]]:
    """Return the likeliest next tokens of each request (prompt, number of new tokens), from a continuous batch.

    In each step, the `preempted` requests free their blocks and wait again, in front. The oldest waiting requests whose
    tokens fit into the free blocks may join. `schedule_step` gives each request its chunk. Before `forward`, each
    request in the step gets blocks for all its tokens. `forward(token_ids, tables, inputs)` takes the token ids of all
    chunks, a block table per chunk, and `step_inputs`. It returns the logits after each chunk [B, V]. A request that
    has all its tokens frees its blocks.
    """
    P, free = block_size, list(range(num_blocks))
    tokens = [list(prompt) for prompt, _ in requests]
    done, tables = [0] * len(requests), [[] for _ in requests]
    waiting, running = list(range(len(requests))), []

    def missing(i: int) -> int:  # blocks
        return -(-len(tokens[i]) // P) - len(tables[i])

    while waiting or running:
        for i in preempted([(i, len(tables[i]), missing(i)) for i in running], len(free)):
            free += tables[i]
            tables[i], done[i] = [], 0
            running.remove(i)
            waiting.insert(0, i)
        everyone = running + waiting
        needed = dict(zip(everyone, accumulate(map(missing, everyone)), strict=True))
        joining = [i for i in waiting if needed[i] <= len(free)]
        left = [[(i, len(tokens[i]) - done[i]) for i in group] for group in (running, joining)]
        step = schedule_step(*left, max_running, budget)
        for i, _ in step:
            if i in waiting:
                waiting.remove(i)
                running.append(i)
            while missing(i):
                tables[i].append(free.pop())
        chunks = [(done[i], done[i] + count) for i, count in step]
        token_ids = [t for (i, _), chunk in zip(step, chunks, strict=True) for t in tokens[i][slice(*chunk)]]
        in_step = [tables[i] for i, _ in step]
        logits = forward(token_ids, in_step, step_inputs(chunks, in_step, P))
        for (i, count), row in zip(step, logits, strict=True):
            done[i] += count
            if done[i] == len(tokens[i]):
                tokens[i].append(int(row.argmax()))
            if len(tokens[i]) == len(requests[i][0]) + requests[i][1]:
                free += tables[i]
                running.remove(i)
    return [all_tokens[len(prompt) :] for all_tokens, (prompt, _) in zip(tokens, requests, strict=True)]


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


def _served(requests: list[tuple[int, int]], *limits: int) -> Case:
    """Return the case of requests (length of the prompt, new tokens). More steps than the solution takes are wrong."""
    drawn = [([(11 * i + 3 * t) % 89 for t in range(length)], new) for i, (length, new) in enumerate(requests)]

    def run(theirs: Callable) -> dict[str, object]:
        ours, model = (PretendModel(*limits[:2], limits[3]) for _ in range(2))
        small_engine(ours, drawn, *limits)
        tokens = theirs(model, [(list(prompt), new) for prompt, new in drawn], *limits)
        return {"tokens": tokens, "steps": max(ours.steps, model.steps)}

    shown = ", ".join(f"({length} tokens, {new})" for length, new in requests)
    blocks, P, seats, budget = limits
    return Case(f"{{name}}(forward, [{shown}], {blocks}, {P}, {seats}, {budget})", run)


SMALL_ENGINE = python_exercise(
    small_engine,
    [
        _served([(3, 1)], 4, 4, 2, 8),
        _served([(3, 4)], 4, 4, 2, 8),
        _served([(3, 3), (5, 2)], 8, 4, 2, 16),
        _served([(9, 3)], 4, 4, 2, 4),
        _served([(3, 2), (2, 5), (4, 3), (6, 2)], 12, 4, 2, 16),
        _served([(6, 10), (8, 10), (10, 10), (12, 10)], 12, 4, 4, 64),
        _served([(7, 6), (13, 3), (2, 9), (5, 5), (9, 1)], 7, 4, 3, 6),
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with one request and one step: a table with enough "
        "blocks, `step_inputs`, `forward`, and the argmax of row 0.",
        ("    P, free", "    return None\n    P, free"),
        "prompts too: Your lists begin with the prompts. Return the new tokens only.",
        ("all_tokens[len(prompt) :]", "all_tokens"),
        "a token after every chunk: A chunk in the middle of a prompt has logits, too, but the next token is known. "
        "Look at the place where you append: only a chunk that ends at the last token gives a new one.",
        ("            if done[i] == len(tokens[i]):\n    ", "            if True:\n    "),
        "keys that are gone: A preempted request has lost its keys and values. Look at what you keep: its tokens stay, "
        "and no token counts as computed.",
        ("tables[i], done[i] = [], 0", "tables[i] = []"),
        "blocks that never come back: A preempted request keeps its blocks. Look at `free` after `preempted`.",
        ("            free += tables[i]\n            tables", "            tables"),
        "blocks of the ended: A request that has ended keeps its blocks. Look at the end of the loop.",
        ("                free += tables[i]\n", ""),
        "a static batch: Your engine takes too many steps, because no request joins while others run. Look at the "
        "waiting requests in each step.",
        ("[i for i in waiting if", "[i for i in waiting if not running and"),
        "one after the other: Your engine takes too many steps, because it serves one request at a time. Look at "
        "`max_running`.",
        ("(*left, max_running,", "(*left, 1,"),
        "without a budget: Your engine computes whole prompts. Look at the chunks: the budget may cut them.",
        ("(*left, max_running, budget)", "(*left, max_running, 10**6)"),
    ],
    "with a real model, this loop gives the tokens of `LLM`.",
    imports="from collections.abc import Callable\nfrom itertools import accumulate\n\n"
    "from pagewise.exercises.lesson_9 import preempted, schedule_step\n"
    "from pagewise.exercises.lesson_9_batch import step_inputs",
)

EXERCISES = [SMALL_ENGINE]
