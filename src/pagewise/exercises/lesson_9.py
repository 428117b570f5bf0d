"""Exercises of lesson 9: a step of the scheduler, and preemption when blocks run out."""

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

EXERCISES = [SCHEDULE_STEP, PREEMPTED]
