"""Exercises of lesson 4: a table that grows, copy-on-write, and a leak. Tables and free lists are plain lists."""

from collections.abc import Callable

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise


def allocate_and_append(table: list[int], num_tokens: int, free_blocks: list[int], block_size: int) -> int:
    """Add one token to a sequence of `num_tokens` tokens with this block table; return the slot for its K and V.

    If the last block is full, or the table is empty, move the first of `free_blocks` from that list to the table.
    """
    if num_tokens % block_size == 0:
        table.append(free_blocks.pop(0))
    return table[-1] * block_size + num_tokens % block_size


def _appends(count: int, free_blocks: list[int], block_size: int) -> Case:
    def run(theirs: Callable) -> object:
        table, free = [], free_blocks.copy()
        slots = [theirs(table, n, free, block_size) for n in range(count)]
        return {"slots": slots, "table": table, "free_blocks": free}

    tokens = f"{count} token{'s' * (count > 1)}"
    return Case(f"{tokens}, one after the other, blocks of {block_size}, free blocks {free_blocks}", run)


ALLOCATE_AND_APPEND = python_exercise(
    allocate_and_append,
    [_appends(1, [0, 1], 2), _appends(2, [2, 0], 2), _appends(3, [2, 0], 2), _appends(7, [5, 1, 3], 3)],
    [
        "logical slot: That is where the token stands in its text: the slot is where it lies in the cache, block · "
        "block_size + offset.",
        ("table[-1] * block_size + num_tokens % block_size", "num_tokens"),
        "a block too late: The block is full already, and the new token overwrites its first slot: n tokens fill the "
        "table when n == len(table) · block_size.",
        ("num_tokens % block_size == 0", "not table or num_tokens > len(table) * block_size"),
        "a block per token: A block has room for block_size tokens: take a new one only when the last is full.",
        ("num_tokens % block_size == 0", "True"),
        "still free: The block stayed in the list of free ones, and the next sequence will be given it too: `pop(0)` "
        "takes it.",
        ("free_blocks.pop(0)", "free_blocks[0]"),
        "no offset: All tokens of a block get its first slot: add the offset, num_tokens % block_size.",
        (" + num_tokens % block_size", ""),
        "offset in the text: The offset counts within the block: num_tokens % block_size, or it runs into the next "
        "one.",
        ("+ num_tokens % block_size", "+ num_tokens"),
    ],
    "tokens lie where the table says, and a block is taken only when one is needed.",
)


def copy_on_write(table: list[int], ref_counts: list[int], free_blocks: list[int]) -> tuple[int, int] | None:
    """Called before a sequence writes into its last block, which may be shared: ref_counts[block] tables hold it.

    If others hold it too, the first of `free_blocks` takes its place in this table: return the copy (from, to).
    If this table alone holds it, change nothing and return None. Update table, ref_counts and free_blocks.
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
        "always: Nobody else holds the block: write where it is. Copy only if its count is above 1.",
        ("    if ref_counts[old] == 1:\n        return None\n", ""),
        "old count: This table has left the old block, whose count still includes it: it will never become free.",
        ("    ref_counts[old] -= 1\n", ""),
        "new count: The new block stands in a table and counts 0: set its count to 1.",
        ("    ref_counts[new] = 1\n", ""),
        "table: The table still names the old block: the write will go where the others read.",
        ("    table[-1] = new\n", ""),
        "direction: The copy goes from the old block to the new one: (from, to).",
        ("return old, new", "return new, old"),
    ],
    "the others keep what they had, and no count is lost.",
)


def free_sequence(table: list[int], ref_counts: list[int], free_blocks: list[int]) -> None:
    """End a sequence: its blocks lose one owner each; those without any other become free, the last of the table first.

    After it the table is empty.
    """
    for block in reversed(table):
        ref_counts[block] -= 1
        if ref_counts[block] == 0:
            free_blocks.append(block)
    table.clear()


def _frees(what: str, num_blocks: int, *tables: list[int]) -> Case:
    """Free the sequences with these tables, one after another. Compare all that is left after each."""

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
_TASK = "After it the table is empty."

FIND_THE_LEAK = python_exercise(
    free_sequence,
    [
        _frees("A holds block 0; A ends", 1, [0]),
        _frees("A holds blocks 1, 0; A ends", 3, [1, 0]),
        _frees("A and B share block 0; A ends, then B", 1, [0], [0]),
        _frees("A holds 0, 1; B holds 0, 2; A ends, then B", 4, [0, 1], [0, 2]),
    ],
    [
        "the leak: That is what the function as it was given does: B was the last owner, and the block is not free. "
        "Follow its count, line by line.",
        _LEAK,
        "freed under the other: B still holds the block when A ends: it is free only when its count is 0.",
        ("ref_counts[block] == 0", "True"),
        "all owners at once: A leaves, not everybody: take 1 off the count instead of setting it to 0.",
        ("ref_counts[block] -= 1", "ref_counts[block] = 0"),
        "table kept: The table still names blocks that may soon be another's: `table.clear()`.",
        ("    table.clear()", ""),
        "first block first: The last block first: a chain of cached blocks should lose its tail before its parents "
        "(`reversed`).",
        ("reversed(table)", "table"),
    ],
    "counts go down with every owner, and the last one out frees the block.",
    name="find_the_leak",
    bug=[_LEAK, (_TASK, f"{_TASK} There is a mistake in here: blocks that were shared are lost for ever. Find it.")],
)

EXERCISES = [ALLOCATE_AND_APPEND, COPY_ON_WRITE, FIND_THE_LEAK]
