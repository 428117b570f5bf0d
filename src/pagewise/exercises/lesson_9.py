"""Exercises of lesson 9: a step of the scheduler, and preemption when blocks run out."""

from pagewise.exercises.python import call, python_exercise


def schedule_step(
    running: list[tuple[str, int]], waiting: list[tuple[str, int]], max_running: int, budget: int
) -> list[tuple[str, int]]:
    """Return how many tokens each sequence computes in one step of a continuous batch: (name, tokens), in order.

    `running` and `waiting` hold (name, tokens not computed yet), the oldest first. The running sequences with one token
    come first: they decode. Then come the other running ones, which read their prompts. Then the waiting ones join, in
    order, as long as fewer than `max_running` run. Each gets all its tokens, or the rest of the step's `budget`: a part
    of a prompt, perhaps. When the budget is spent, the step is full.
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
        "the new ones first: Those that run come first: a newcomer must not take their tokens of the budget.",
        (f"{_SORTED} + admitted", f"admitted + {_SORTED}"),
        "by age alone: Those that decode come first, or a long prompt makes them wait for a step and more.",
        (_SORTED, "running"),
        "the shortest first: Those that read their prompts go on in the order of age: the oldest first.",
        ("each[1] > 1", "each[1]"),
        "one token each: A prompt has many tokens to compute: only a sequence that decodes has one.",
        ("min(tokens, budget)", "1"),
        "nobody joins: That is a static batch: a continuous one lets the next in while others run.",
        ("max_running - len(running)", "0 if running else max_running"),
        "one newcomer a step: There is room for more: let in one after the other, until a limit is met.",
        ("max_running - len(running)", "min(1, max_running - len(running))"),
        "decoding for nothing: Tokens of those that decode are tokens of the step: the budget holds for them, too.",
        ("    for name", _DECODE_FIRST),
        "whole prompts: A prompt longer than the rest of the budget gets that rest: the others follow later.",
        ("budget == 0", "tokens > budget"),
        "the long one skipped: Nobody is overtaken: a prompt that does not fit gets a part, not those behind it.",
        ("budget == 0", "tokens > budget"),
        ("break", "continue"),
        "the budget of each: The budget is the step's, all sequences together: take away what was given.",
        ("        budget -= step[-1][1]\n", ""),
        "chunks of nothing: Nothing is left, and (name, 0) computes nothing: the step is full.",
        ("        if budget == 0:\n            break\n", ""),
        "no limit: At most `max_running` run at a time, however short they are.",
        ("[: max_running - len(running)]", ""),
        "so many new ones: `max_running` counts those that run already, too: there is room for the rest.",
        (" - len(running)", ""),
    ],
    "nobody waits for a batch to end, and no prompt makes the others wait long.",
)


def preempted(running: list[tuple[str, int, int]], num_free: int) -> list[str]:
    """Return the sequences that give their blocks back in this step, so that older ones can go on: names, in order.

    `running` holds (name, blocks held, more blocks needed), the oldest first. Sequences are served in this order. As
    long as a sequence needs more blocks than are free, the newest sequence that is left gives back all its blocks. The
    sequence in need may be the newest itself: then it must wait.
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
        "the oldest: The oldest has the most to lose: all of it is computed again, and it may never end. The newest "
        "gives way.",
        (_NEWEST, "there.pop(0)"),
        ("num_free += held", "num_free += held\n            served = max(served - 1, 0)"),
        "the one in need: The newest gives way: the one in need only if it is the newest itself.",
        (_NEWEST, "there.pop(served)"),
        "the largest: Who holds most has the most to compute again, and may be the oldest: the newest gives way.",
        (_NEWEST, "there.pop(max(range(served, len(there)), key=lambda i: there[i][1]))"),
        "the newest that is large enough: Nobody is passed over: the newest gives way, then the next, until it is "
        "enough.",
        ("            name, held, _ = there.pop()", _LARGE_ENOUGH),
        "one is enough: One victim may hold too few blocks: go on until there are enough.",
        ("num_free += held", "num_free += held\n            served += 1"),
        "blocks not given back: The victim's blocks are free now: they count.",
        ("            num_free += held\n", ""),
        "blocks not taken: What one is given is no longer free for those behind it.",
        ("            num_free -= there[served][2]\n", ""),
        "all needs at once: Who was preempted needs nothing any more in this step.",
        ("while served < len(there)", "while there and sum(needed for _, _, needed in running) > num_free"),
        ("if there[served][2] <= num_free", "if False"),
        "in the order of age: The newest goes first: that is the order in which they give way.",
        ("return gone", "return sorted(gone)"),
    ],
    "the oldest always goes on, so every request ends; whoever gave way computes its tokens again.",
)

EXERCISES = [SCHEDULE_STEP, PREEMPTED]
