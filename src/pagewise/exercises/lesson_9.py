"""Exercises of lesson 9: scheduler, preemption, the numbers of a batch, the loop of an engine, sampling, drafts."""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.pretend_model import PretendModel
from pagewise.exercises.python import call, python_exercise


def schedule_step(
    running: list[tuple[object, int]], waiting: list[tuple[object, int]], max_running: int, budget: int
) -> list[tuple[object, int]]:
    """Return how many tokens each request computes in one step of a continuous batch: (name, tokens), in order.

    `running` and `waiting` hold (name, tokens not computed yet), the oldest first. Running requests with one token
    left decode, and they come first. Then come the other running requests, which read their prompts. Then waiting
    requests join, in order, while fewer than `max_running` run. Each request gets all its tokens, or the rest of the
    step's `budget`, which may be a part of its prompt. When the budget is spent, the step is full.
    """
    step = []
    admitted = waiting[: max_running - len(running)]
    for name, tokens in sorted(running, key=lambda each: each[1] > 1) + admitted:
        if budget == 0:
            break
        step.append((name, min(tokens, budget)))
        budget -= step[-1][1]
    return step


_SORTED = "sorted(running, key=lambda each: each[1] > 1)"
_DECODE_FIRST = """\
    step = [each for each in running if each[1] == 1]
    running = [each for each in running if each[1] > 1]
    budget = max(0, budget - len(step))
    for name"""

SCHEDULE_STEP = python_exercise(
    schedule_step,
    [
        call([("A", 1)], [], 4, 8),
        call([], [("B", 5)], 4, 8),
        call([("A", 1)], [("B", 5)], 4, 8),
        call([("A", 1)], [("B", 9)], 4, 6),
        call([("A", 1)], [("B", 9), ("C", 2)], 4, 6),
        call([("A", 1), ("B", 3)], [("C", 2), ("D", 4), ("E", 1), ("F", 1)], 3, 20),
        call([("A", 1), ("B", 1)], [("C", 2)], 2, 20),
        call([("A", 1), ("B", 9), ("C", 1)], [("D", 1)], 4, 7),
        call([], [("A", 2), ("B", 3), ("C", 1)], 2, 20),
        call([("A", 1), ("B", 1), ("C", 1)], [("D", 2)], 4, 2),
        call([("A", 1), ("B", 9), ("C", 4)], [], 4, 7),
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with a loop over `running`, which appends (name, tokens) "
        "to a list.",
        ("    step = []\n", "    return None\n    step = []\n"),
        "the new ones first: Your waiting requests come too early. Look at the order of your loop: running requests "
        "come before requests that join.",
        (f"{_SORTED} + admitted", f"admitted + {_SORTED}"),
        "by age alone: Your step makes decoding requests wait for a long prompt. Look at the order of `running`: "
        "requests with one token come first.",
        (_SORTED, "running"),
        "the shortest first: Your step sorts prompts by length. Look at the sort: requests that read their prompts "
        "keep the order of age.",
        ("each[1] > 1", "each[1]"),
        "one token each: Your step gives one token to a prompt. Look at the amount: a request gets all its tokens, if "
        "the budget allows it.",
        ("min(tokens, budget)", "1"),
        "nobody joins: Your batch is static. Look at `waiting`: requests join while other requests run.",
        ("max_running - len(running)", "0 if running else max_running"),
        "decodes only: Your step computes no prompt. Requests with more than one token left get tokens too, and "
        "waiting requests join.",
        (f"{_SORTED} + admitted", "[each for each in running if each[1] == 1]"),
        "nobody ever joins: Your step serves running requests only. Look at `waiting`: its requests join after them, "
        "while fewer than `max_running` run.",
        (f"{_SORTED} + admitted", _SORTED),
        "one newcomer a step: Your step lets one request join. Look at `waiting`: requests join until a limit is met.",
        ("max_running - len(running)", "min(1, max_running - len(running))"),
        "decoding for nothing: Your decoding requests cost no budget. Look at the budget: it counts every token of the "
        "step.",
        ("    for name", _DECODE_FIRST),
        "whole prompts: Your step leaves tokens over. Look at a prompt longer than the rest of the budget: it gets "
        "that rest.",
        ("budget == 0", "tokens > budget"),
        "the long one skipped: Your step lets a later request overtake a long prompt. Look at a prompt that does not "
        "fit: it gets a part, and later requests get nothing.",
        ("budget == 0", "tokens > budget"),
        ("break", "continue"),
        "the budget of each: Your step computes too many tokens. Look at the budget: subtract the tokens of each "
        "request.",
        ("        budget -= step[-1][1]\n", ""),
        "chunks of nothing: Your step holds a request with 0 tokens. Look at the end of the budget: the step is full.",
        ("        if budget == 0:\n            break\n", ""),
        "no limit: Too many requests run. Look at `max_running`: it limits the number of requests.",
        ("[: max_running - len(running)]", ""),
        "so many new ones: Too many requests join. Look at `max_running`: it counts the running requests too.",
        (" - len(running)", ""),
    ],
    "no request waits for a batch to end, and no prompt delays the others for long.",
)


def preempted(running: list[tuple[object, int, int]], num_free: int) -> list:
    """Return the requests that give their blocks back in this step, in order, so that older requests can go on.

    `running` holds (name, blocks held, more blocks needed), the oldest first. Requests are served in this order. While
    a request needs more blocks than are free, the newest request that is left gives back all its blocks. The request in
    need may be the newest itself: then it must wait.
    """
    there, gone, served = list(running), [], 0
    while served < len(there):
        if there[served][2] <= num_free:
            num_free -= there[served][2]
            served += 1
        else:
            name, held, _ = there.pop()
            gone.append(name)
            num_free += held
    return gone


_NEWEST = "there.pop()"
_LARGE_ENOUGH = """\
            enough = [i for i in range(served, len(there)) if there[i][1] + num_free >= there[served][2]]
            name, held, _ = there.pop(max(enough, default=-1))"""

PREEMPTED = python_exercise(
    preempted,
    [
        call([("A", 3, 0)], 0),
        call([("A", 3, 1)], 1),
        call([("A", 3, 1), ("B", 2, 0)], 0),
        call([("A", 2, 1), ("B", 4, 0), ("C", 1, 0)], 0),
        call([("A", 2, 0), ("B", 2, 1), ("C", 2, 0), ("D", 2, 0)], 0),
        call([("A", 2, 1), ("B", 2, 0), ("C", 2, 1)], 1),
        call([("A", 2, 3), ("B", 2, 0), ("C", 1, 0)], 0),
        call([("A", 2, 1), ("B", 2, 0), ("C", 3, 5)], 2),
        call([("A", 2, 3), ("B", 4, 0), ("C", 1, 0)], 0),
        call([("A", 1, 2), ("B", 2, 2), ("C", 1, 1), ("D", 1, 0), ("E", 2, 1)], 1),
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with the case in which all needs fit: return an empty "
        "list.",
        ("    there, gone", "    return None\n    there, gone"),
        "the oldest: Your engine preempts the oldest request, which may then never end. Look at the request that you "
        "remove: it is the newest.",
        (_NEWEST, "there.pop(0)"),
        ("num_free += held", "num_free += held\n            served = max(served - 1, 0)"),
        "the one in need: Your engine preempts the request in need. Look at the request that you remove: it is the "
        "newest, even if another one needs a block.",
        (_NEWEST, "there.pop(served)"),
        "the largest: Your engine preempts the request with most blocks, which has most to compute again. Look at the "
        "request that you remove: only its age matters.",
        (_NEWEST, "there.pop(max(range(served, len(there)), key=lambda i: there[i][1]))"),
        "the newest that is large enough: Your engine passes over small requests. Look at a need of several blocks: "
        "the newest request goes, then the next.",
        ("            name, held, _ = there.pop()", _LARGE_ENOUGH),
        "one is enough: Your engine serves a request with too few blocks. Look at a victim that holds little: repeat "
        "until the need is met.",
        ("num_free += held", "num_free += held\n            served += 1"),
        "blocks not given back: Your engine preempts too many requests. Look at `num_free`: the victim's blocks are "
        "free now.",
        ("            num_free += held\n", ""),
        "blocks not taken: Your engine gives the same block to two requests. Look at `num_free` after a request is "
        "served.",
        ("            num_free -= there[served][2]\n", ""),
        "all needs at once: Your engine adds up the needs of preempted requests. Look at the sum: a preempted request "
        "needs nothing in this step.",
        ("while served < len(there)", "while there and sum(needed for _, _, needed in running) > num_free"),
        ("if there[served][2] <= num_free", "if False"),
        "in the order of age: The names are right, and their order is wrong. Look at the order in which requests give "
        "their blocks back: the newest goes first.",
        ("return gone", "return sorted(gone)"),
    ],
    "the oldest request always advances, so every request ends. A preempted request computes its tokens again.",
)


def step_inputs(chunks: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> dict[str, list[int]]:
    """Return the numbers of one step. Sequence i computes its tokens start … stop − 1, where (start, stop) = chunks[i].

    "positions" and "slots" have a number for each of these tokens, sequence after sequence: its place in its text, and
    the slot for its K and V. "seq_lens" has the number of keys of each sequence after the step has written its K and V.
    "cu_seqlens_q" has the index of each sequence's first token in the flat row, and the length of the row at the end.
    """
    P, places = block_size, [(i, t) for i, (start, stop) in enumerate(chunks) for t in range(start, stop)]
    return {
        "positions": [t for _, t in places],
        "slots": [tables[i][t // P] * P + t % P for i, t in places],
        "seq_lens": [stop for _, stop in chunks],
        "cu_seqlens_q": [0, *accumulate(stop - start for start, stop in chunks)],
    }


_SLOTS = "tables[i][t // P] * P + t % P for i, t in places"

STEP_INPUTS = python_exercise(
    step_inputs,
    [
        call([(0, 3)], [[0]], 4),
        call([(0, 3)], [[2]], 4),
        call([(3, 4)], [[2]], 4),
        call([(5, 6)], [[2, 0]], 4),
        call([(0, 2), (0, 1)], [[1], [3]], 4),
        call([(5, 6), (0, 3), (2, 7)], [[4, 1], [0], [6, 2]], 4),
        call([(3, 5), (0, 1)], [[3, 0, 4], [1]], 2),
        call([(8, 9), (2, 3)], [[5, 0, 3], [1]], 4),
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with a list of (sequence, position) for all tokens of "
        "the step.",
        ("    P, places", "    return None\n    P, places"),
        "positions from 0: The positions are wrong. Look at a chunk that begins in the middle: positions count from "
        "the first token of the text.",
        ("[t for _, t in places]", "[t - chunks[i][0] for i, t in places]"),
        "slots from the chunk: Your slots overwrite older keys. Look at a chunk that begins in the middle: its slots "
        "go by position.",
        (_SLOTS, _SLOTS.replace("places", "[(i, t - chunks[i][0]) for i, t in places]")),
        "places in the text: Your slots are positions. Look at the table: token t has the slot table[t // P] · P + t % "
        "P.",
        (_SLOTS, "t for _, t in places"),
        "the block's first slot: All tokens of a block have the same slot. Add the offset t % P.",
        (" + t % P", ""),
        "tables cut off: Your newest tokens are in a wrong block. Look at the length of the tables: each table keeps "
        "its own.",
        ("t // P", "min(t // P, min(map(len, tables)) - 1)"),
        "keys of the past only: `seq_lens` misses the keys of this step. Look at the order: a step writes K and V "
        "before it reads.",
        ("[stop for _, stop in chunks]", "[start for start, _ in chunks]"),
        "queries for keys: `seq_lens` counts the queries of the step. Look at a chunk that begins in the middle: its "
        "queries see the older keys too.",
        ("[stop for _, stop in chunks]", "[stop - start for start, stop in chunks]"),
        "no end: `cu_seqlens_q` is too short. Look at its end: the last number is the length of the flat row.",
        ("start, stop in chunks)", "start, stop in chunks[:-1])"),
        "no beginning: `cu_seqlens_q` is too short. Look at its beginning: the first sequence begins at 0.",
        ("[0, *", "[*"),
        "lengths, not sums: `cu_seqlens_q` holds lengths. “cu” is short for cumulative: add them up.",
        ("*accumulate(", "*("),
    ],
    "the model and its attention need only these numbers to compute a step.",
    imports="from itertools import accumulate",
)


def token_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return the probabilities [V] from which the next token is drawn. No two logits [V] are equal.

    Take softmax(logits / temperature). Keep the `top_k` likeliest tokens (0: all), and scale them to sum to 1. Then
    keep the fewest likeliest tokens whose probabilities sum to at least `top_p`, and scale them again. All other
    tokens get 0. At temperature 0, the likeliest token gets 1.
    """
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    p, order = torch.softmax(logits / temperature, dim=0).sort(descending=True)
    if top_k:
        p[top_k:] = 0
    p = p / p.sum()
    p[p.cumsum(0) - p >= top_p] = 0
    return torch.zeros_like(p).scatter(0, order, p / p.sum())


def _logits(*weights: float) -> Tensor:
    """Return logits whose softmax is proportional to the weights."""
    return torch.tensor(weights).log()


_BY_TOP_P = "p[p.cumsum(0) - p >= top_p]"
_IN_ORDER = "torch.zeros_like(p).scatter(0, order, p / p.sum())"
_AS_THEY_COME = """\
    in_order = torch.zeros_like(p).scatter(0, order, p)
    p[(in_order.cumsum(0) - in_order)[order] >= top_p]"""
_BEFORE_TEMPERATURE = """\
    shares = torch.softmax(logits, dim=0)[order] * (p > 0)
    shares = shares / shares.sum()
    p[shares.cumsum(0) - shares >= top_p]"""

TOKEN_PROBABILITIES = python_exercise(
    token_probabilities,
    [
        call(_logits(10.0, 5.0, 3.0, 2.0), 1.0, 0, 1.0),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 0, 1.0),
        call(_logits(3.0, 10.0, 2.0, 5.0), 0.5, 0, 1.0),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 2, 1.0),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 0, 0.6),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 2, 0.6),
        call(_logits(3.0, 10.0, 2.0, 5.0), 1.0, 0, 0.1),
        call(_logits(3.0, 10.0, 2.0, 5.0), 0.5, 0, 0.6),
        call(_logits(3.0, 10.0, 2.0, 5.0), 0.0, 2, 0.6),
        call(_logits(8.0, 9.0, 7.0, 6.0, 30.0), 2.0, 4, 0.9),
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with torch.softmax(logits / temperature, dim=0).",
        ("    if temperature == 0:", "    return None\n    if temperature == 0:"),
        "multiplied: Your temperature works the wrong way. Divide the logits by it: a low temperature makes the "
        "likeliest token likelier.",
        ("logits / temperature", "logits * temperature"),
        "nobody for 0: No token is left. Look at top_k = 0: it means no limit.",
        ("    if top_k:\n        p[top_k:] = 0\n", "    p[top_k:] = 0\n"),
        "not scaled: The sum of the probabilities is below 1. Scale the tokens that you kept.",
        ("    p = p / p.sum()\n", "    shares = p / p.sum()\n"),
        (_BY_TOP_P, "p[shares.cumsum(0) - shares >= top_p]"),
        ("order, p / p.sum()", "order, p"),
        "logits of 0: Dropped tokens still have a probability. Look at a logit of 0: its weight is e⁰ = 1, so a "
        "dropped token needs −∞.",
        (_IN_ORDER, f"torch.softmax(torch.where({_IN_ORDER} > 0, logits / temperature, 0.0), dim=0)"),
        "sorted: Your probabilities are in falling order. Look at the end: put them back in the order of the tokens.",
        (_IN_ORDER, "p / p.sum()"),
        "the one that crosses: Your top_p drops one token too many. Look at the token with which the sum reaches "
        "top_p: it stays.",
        (_BY_TOP_P, "p[p.cumsum(0) > top_p]"),
        "as they come: Your top_p keeps the first tokens, not the likeliest ones. Sort before you add up.",
        (f"    {_BY_TOP_P}", _AS_THEY_COME),
        "top_p of all tokens: Your top_p ignores top_k. Look between the two: the kept tokens are scaled to sum to 1.",
        ("    p = p / p.sum()\n", ""),
        "the temperature last: Your top_p ignores the temperature. Divide by the temperature before all other steps.",
        (f"    {_BY_TOP_P}", _BEFORE_TEMPERATURE),
        "divided by 0: Your function divides by a temperature of 0. Look at this case first: the likeliest token gets "
        "1.",
        ("temperature == 0", "False"),
    ],
    "with these three numbers, a request says how much its text may vary.",
    imports="import torch\nfrom torch import Tensor",
)


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


def _served(requests: list[tuple[int, int]], *limits: int) -> Case:
    """Return the case of requests (length of the prompt, new tokens). More steps than the solution takes are wrong."""
    drawn = [([(11 * i + 3 * t) % 89 for t in range(length)], new) for i, (length, new) in enumerate(requests)]

    def run(theirs: Callable) -> dict[str, object]:
        ours, model = (PretendModel(*limits[:2], limits[3]) for _ in range(2))
        small_engine(ours, drawn, *limits)
        tokens = theirs(model, [(list(prompt), new) for prompt, new in drawn], *limits)
        return {"tokens": tokens, "steps": max(ours.steps, model.steps) if model.steps else 0}

    shown = ", ".join(f"({length} tokens, {new})" for length, new in requests)
    blocks, P, seats, budget = limits
    return Case(f"{{name}}(forward, [{shown}], {blocks}, {P}, {seats}, {budget})", run)


_ENGINE = """\
tokens, done = [list(prompt) for prompt, _ in requests], [0] * len(requests)
tables, free = [[] for _ in requests], list(range(num_blocks))
waiting, running = list(range(len(requests))), []
while waiting or running:
    # yours: the `preempted` requests free their blocks, and wait in front of the others
    # yours: schedule the step. Requests may join, and each one in the step gets its blocks
    # yours: call `forward`, and keep the new tokens. A request with all its tokens ends
    break
return [tokens[i][len(prompt) :] for i, (prompt, _) in enumerate(requests)]"""

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
        "nothing yet: Your engine takes no step yet. Begin with one request and one step: a table with enough "
        "blocks, `step_inputs`, `forward`, and the argmax of row 0.",
        ("    while waiting or running:", "    while False:"),
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
    start=_ENGINE,
    imports="from collections.abc import Callable\nfrom itertools import accumulate\n\n"
    "from pagewise.exercises.lesson_9 import preempted, schedule_step, step_inputs",
)


def accept_drafts(drafts: list[int], draws: list[int]) -> tuple[list[int], int]:
    """Return the tokens that a text gets in a step with drafts, and how many drafts were refused.

    One step of the model has computed all drafts. draws[i] is the token that it draws after the text and the first i
    drafts, so there is one draw more than drafts. A draw counts only if all drafts before it were right.
    """
    right = 0
    while right < len(drafts) and drafts[right] == draws[right]:
        right += 1
    return draws[: right + 1], len(drafts) - right


_RIGHT = "    while right < len(drafts) and drafts[right] == draws[right]:\n        right += 1\n"

ACCEPT_DRAFTS = python_exercise(
    accept_drafts,
    [
        call([], [7]),
        call([5], [5, 6]),
        call([5], [4, 9]),
        call([1, 2, 3], [1, 9, 3, 4]),
        call([1, 2, 3, 4], [1, 2, 3, 4, 5]),
        call([3, 8, 3, 3], [3, 3, 3, 3, 1]),
    ],
    [
        "nothing yet: The function returns nothing yet. Without any draft, the step gives one token: the only draw.",
        ("    right = 0\n", "    return None\n    right = 0\n"),
        "right drafts only: A step always gives one token more than the drafts that were right. The draw after the "
        "last right draft follows known tokens, so it is right, too.",
        ("draws[: right + 1]", "draws[:right]"),
        "the draft that differs: Your text contains a draft that the model did not draw. Where draft and draw differ, "
        "keep the draw.",
        ("draws[: right + 1]", "drafts[: right + 1]"),
        "all draws: Your text contains draws that follow a wrong draft. They belong to another text: stop at the first "
        "difference.",
        (_RIGHT, "    right = len(drafts)\n"),
        "equal ones counted: A later draft may equal its draw by chance. After the first difference, nothing counts.",
        (_RIGHT, "    right = sum(a == b for a, b in zip(drafts, draws))\n"),
        "one draft only: More than one draft can be right. Go on as long as draft and draw are equal.",
        ("    while right", "    if right"),
        "the right ones counted: The second number is how many drafts were refused: their K and V leave the cache.",
        ("len(drafts) - right", "right"),
    ],
    "several tokens per step, and the text of a run without drafts.",
)

EXERCISES = [SCHEDULE_STEP, STEP_INPUTS, PREEMPTED, SMALL_ENGINE, ACCEPT_DRAFTS, TOKEN_PROBABILITIES]
