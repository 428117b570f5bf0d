"""Exercises of lesson 4: copy-on-write, a leak, reading through a table, and a prompt in the prefix cache.

Block tables, reference counts and free lists are plain lists.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise


def copy_on_write(table: list[int], ref_counts: list[int], free_blocks: list[int]) -> tuple[int, int] | None:
    """Give a sequence a last block of its own before the sequence writes there.

    ref_counts[block] is the number of tables that hold the block. If other tables hold the last block too, put the
    first of `free_blocks` in its place and return the copy (from, to). If no other table holds it, change nothing and
    return None. Keep table, ref_counts and free_blocks up to date.
    """
    old = table[-1]
    if ref_counts[old] == 1:
        return None
    new = free_blocks.pop(0)
    ref_counts[old] -= 1
    ref_counts[new] = 1
    table[-1] = new
    return old, new


def _all_of(copy: object, table: list[int], ref_counts: list[int], free_blocks: list[int]) -> object:
    return {"returned": copy, "table": table, "ref_counts": ref_counts, "free_blocks": free_blocks}


COPY_ON_WRITE = python_exercise(
    copy_on_write,
    [
        call([0], [1, 0], [1], of=_all_of),
        call([0], [2, 0], [1], of=_all_of),
        call([3, 1], [0, 3, 0, 3], [2, 0], of=_all_of),
    ],
    [
        "nothing: Another table holds the last block too, so the write would change the text of another sequence. Look "
        "at ref_counts[table[-1]], and take a new block if it is above 1.",
        ("if ref_counts[old] == 1:", "if True:"),
        "one block more: The copy takes the place of the shared block in the table. The sequence does not get longer.",
        ("    table[-1] = new\n", "    table.append(new)\n"),
        "always: No other table holds the block, so the sequence may write into it. Copy only if its count is above 1.",
        ("    if ref_counts[old] == 1:\n        return None\n", ""),
        "still free: The new block is still in the free list, so the next sequence gets it too. `pop(0)` removes it.",
        ("free_blocks.pop(0)", "free_blocks[0]"),
        "last free block: The copy goes to the wrong free block. Take the first of `free_blocks`, not the last.",
        ("free_blocks.pop(0)", "free_blocks.pop()"),
        "old count: The count of the old block still includes this table, so the old block will never become free. "
        "Subtract 1.",
        ("    ref_counts[old] -= 1\n", ""),
        "new count: The new block is in a table, and its count is 0. Set the count to 1.",
        ("    ref_counts[new] = 1\n", ""),
        "table: The table still names the old block, so the write goes where the other tables read. Replace table[-1].",
        ("    table[-1] = new\n", ""),
        "direction: The copy goes from the old block to the new block. Return (from, to).",
        ("return old, new", "return new, old"),
    ],
    "the other sequences keep their text, and every count is right.",
)


def free_sequence(table: list[int], ref_counts: list[int], free_blocks: list[int]) -> None:
    """End a sequence. Each of its blocks loses one owner. A block without an owner becomes free, the last block first.

    The table is empty afterwards.
    """
    for block in reversed(table):
        ref_counts[block] -= 1
        if ref_counts[block] == 0:
            free_blocks.append(block)
    table.clear()


def _frees(what: str, num_blocks: int, *tables: list[int]) -> Case:
    """Free the sequences with these tables, one after another. Compare the table, counts and free blocks after each."""

    def run(theirs: Callable) -> object:
        ref_counts = [sum(table.count(block) for table in tables) for block in range(num_blocks)]
        free_blocks = [block for block in range(num_blocks) if not ref_counts[block]]
        after = {}
        for name, table in zip("ABC", tables, strict=False):
            mine = table.copy()
            theirs(mine, ref_counts, free_blocks)
            left = {"table": mine, "ref_counts": ref_counts.copy(), "free_blocks": free_blocks.copy()}
            after |= {f"after {name}: {key}": value for key, value in left.items()}
        return after

    return Case(what, run)


_LEAK = (
    "        ref_counts[block] -= 1\n        if ref_counts[block] == 0:\n",
    "        if ref_counts[block] == 1:\n            ref_counts[block] = 0\n",
)
_TASK = "The table is empty afterwards."

FIND_THE_LEAK = python_exercise(
    free_sequence,
    [
        _frees("A holds block 0; A ends", 1, [0]),
        _frees("A holds blocks 1, 0; A ends", 3, [1, 0]),
        _frees("A and B share block 0; A ends, then B", 1, [0], [0]),
        _frees("A holds 0, 1; B holds 0, 2; A ends, then B", 4, [0, 1], [0, 2]),
    ],
    [
        "the leak: After both sequences have ended, block 0 still counts two owners, so it never becomes free. Follow "
        "ref_counts[0] line by line while A ends: no line subtracts A.",
        _LEAK,
        "freed under the other: B still holds the block when A ends. A block is free only when its count is 0.",
        ("ref_counts[block] == 0", "True"),
        "all owners at once: Only A ends, and B still holds the block. Subtract 1 from the count.",
        ("ref_counts[block] -= 1", "ref_counts[block] = 0"),
        "table kept: The table still names blocks that another sequence may get. Call `table.clear()`.",
        ("    table.clear()", ""),
        "first block first: Free the last block first. A chain of cached blocks then loses its end before its "
        "beginning. Use `reversed`.",
        ("reversed(table)", "table"),
    ],
    "each ending sequence subtracts 1, and the last owner frees the block.",
    name="find_the_leak",
    bug=[_LEAK, (_TASK, f"{_TASK} This version has a mistake: shared blocks never become free. Find it.")],
)


def attend_through_table(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: list[int], length: int) -> Tensor:
    """Return the attention [D] of one query [D] over the `length` tokens of a sequence, block by block.

    The caches are [N, P, D]. The table may have more entries than the sequence has blocks. Slots past the end may hold
    anything, also NaN.
    """
    P = k_cache.shape[1]
    m, l, acc = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(len(q))
    for start in range(0, length, P):
        tokens = min(P, length - start)
        block = table[start // P]
        keys, values = k_cache[block, :tokens], v_cache[block, :tokens]
        scores = keys @ q / len(q) ** 0.5
        m_new = torch.maximum(m, scores.max())
        alpha, weights = torch.exp(m - m_new), torch.exp(scores - m_new)
        l = alpha * l + weights.sum()
        acc = alpha * acc + weights @ values
        m = m_new
    return acc / l


def _reads(what: str, table: list[int], length: int, *, nan_token: int | None = None) -> Case:
    """Read a sequence from a pool of 4 blocks of 2 slots, D = 2. Slots without a token of the sequence hold NaN."""

    def run(theirs: Callable) -> object:
        k_cache, v_cache = torch.full((2, 4, 2, 2), math.nan)
        for i in range(length):
            block, offset = table[i // 2], i % 2
            k_cache[block, offset] = torch.tensor([0.5 * i, 1.0])
            v_cache[block, offset] = torch.tensor([1.0 + i, -1.0]) if i != nan_token else math.nan
        return theirs(torch.tensor([1.0, 2.0]), k_cache, v_cache, table, length)

    return Case(f"{what}: table {table}, {length} tokens, blocks of 2; every other slot is NaN", run)


ATTEND_THROUGH_TABLE = python_exercise(
    attend_through_table,
    [
        _reads("one token", [1], 1),
        _reads("two full blocks", [2, 0], 4),
        _reads("a partly filled block", [2, 0], 3),
        _reads("a table longer than the sequence", [3, 0, 1], 2),
        _reads("token 0 of the sequence has NaN as its value", [1, 2], 3, nan_token=0),
    ],
    [
        "slots past the end: The last block has slots past the end of the sequence, and you read them. A weight of 0 "
        "does not hide them, because 0 · NaN is NaN. Keep only the rows of the block that are tokens.",
        ("k_cache[block, :tokens], v_cache[block, :tokens]", "k_cache[block], v_cache[block]"),
        ("        m_new = torch.maximum", "        scores[tokens:] = -torch.inf\n        m_new = torch.maximum"),
        "no table: You read the first blocks of the cache. The table says which blocks hold the sequence: entry i of "
        "the table is the block of tokens i · P to (i + 1) · P − 1.",
        ("block = table[start // P]", "block = start // P"),
        "last block lost: The last, partly filled block is missing. The loop must reach it, with fewer tokens.",
        ("range(0, length, P)", "range(0, length - P + 1, P)"),
        "every entry: The table has more entries than the sequence has blocks. Stop at `length`, not at the end of "
        "the table.",
        ("range(0, length, P)", "range(0, len(table) * P, P)"),
        ("min(P, length - start)", "P if start >= length else min(P, length - start)"),
        "nothing rescaled: l and acc of the earlier blocks are relative to the old maximum. Multiply both by "
        "exp(m − m_new) before you add.",
        ("alpha, weights = torch.exp(m - m_new)", "alpha, weights = torch.tensor(1.0)"),
        "only acc rescaled: acc is rescaled and l is not. Both are relative to the old maximum.",
        ("l = alpha * l", "l = l"),
        "the mean of the blocks: Each block has a softmax of its own here, and the outputs are averaged. A block with "
        "larger scores must count more: merge (m, l, acc), and divide once at the end.",
        ("m_new = torch.maximum(m, scores.max())", "m_new = scores.max()"),
        ("alpha, weights = torch.exp(m - m_new), torch.exp(scores - m_new)", "weights = torch.softmax(scores, dim=0)"),
        ("l = alpha * l", "l = l"),
        ("acc = alpha * acc", "acc = acc"),
        "not divided: The weights do not sum to 1. Divide acc by l after the last block.",
        ("return acc / l", "return acc"),
        "NaN hidden: A token of the sequence has NaN, and your output hides it. Leave the slots past the end out, and "
        "leave the numbers of the sequence as they are.",
        ("v_cache[block, :tokens]", "v_cache[block, :tokens].nan_to_num()"),
        "no scale: The scores are not scaled. Divide them by the root of the head size.",
        (" / len(q) ** 0.5", ""),
    ],
    "every token is read through the table, one block at a time, and nothing past the end.",
    imports="import torch\nfrom torch import Tensor",
)


def cached_tokens(prompt: list[int], others: list[list[int]], block_size: int) -> int:
    """Return how many tokens of a prompt the prefix cache has, if the full blocks of `others` are cached.

    Only whole blocks are shared, and each block needs an equal past. At least one token of the prompt is computed.
    """
    longest = 0
    for other in others:
        same = 0
        while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
            same += 1
        longest = max(longest, same)
    return min(longest, len(prompt) - 1) // block_size * block_size


CACHED_TOKENS = python_exercise(
    cached_tokens,
    [
        call([1, 2, 3], [[1, 2]], 2),
        call([1, 2], [[1, 2]], 2),
        call([1, 2, 3, 4, 5], [[1, 2, 3, 9]], 2),
        call([5, 6, 3, 4, 7], [[1, 2, 3, 4]], 2),
        call([1, 2, 3, 4, 5], [[1, 2, 3, 4], [1, 2]], 2),
        call([1, 2, 3, 4, 5, 6, 7], [[1, 2, 9, 9], [1, 2, 3, 4, 5, 6]], 3),
        call([5, 6, 1, 2, 7], [[5, 6, 8, 8], [9, 9, 1, 2]], 2),
        call([4, 5, 6], [], 2),
    ],
    [
        "nothing found: Blocks of the prompt are in the cache. Count the first tokens that the prompt has in common "
        "with one of `others`.",
        ("// block_size * block_size", "* 0"),
        "whole prompt: Every token of the prompt is in the cache, and no query is left to predict the next token. Find "
        "at most len(prompt) − 1 tokens.",
        ("min(longest, len(prompt) - 1)", "longest"),
        "part of a block: A partly equal block is no hit. Round the number of tokens down to whole blocks.",
        (" // block_size * block_size", ""),
        "another past: Equal tokens after a different past have different K and V. Stop at the first difference.",
        (
            "        while same < min(len(prompt), len(other)) and prompt[same] == other[same]:\n"
            "            same += 1\n",
            "        same = sum(a == b for a, b in zip(prompt, other))\n",
        ),
        "from one other to the next: The second block has another past in the cache, so its K and V differ. Follow one "
        "of `others` at a time.",
        (
            "while same < min(len(prompt), len(other)) and prompt[same] == other[same]:",
            "while any(same < min(len(prompt), len(each)) and prompt[same] == each[same] for each in others):",
        ),
        "the last other: The last of `others` replaces a longer match. Keep the maximum over all of `others`.",
        ("max(longest, same)", "same"),
        "the shortest: All of `others` are cached, so one match is enough. Take the maximum, not the minimum.",
        ("longest = 0", "longest = len(prompt)"),
        ("max(longest, same)", "min(longest, same)"),
    ],
    "whole blocks with an equal past, and one token left for the query.",
    start="return 0",
)

EXERCISES = [COPY_ON_WRITE, FIND_THE_LEAK, ATTEND_THROUGH_TABLE, CACHED_TOKENS]
