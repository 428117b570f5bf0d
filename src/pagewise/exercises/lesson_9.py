"""Exercises of lesson 9, the scheduler: who computes what in a step, and who gives way when blocks run out."""

from collections.abc import Callable

from pagewise.exercises.exercise import Mistake
from pagewise.exercises.python import call, python_exercise

# ------------------------------------------------------------------------------------------------ schedule_step


def schedule_step(
    running: list[tuple[str, int]], waiting: list[tuple[str, int]], max_running: int, budget: int
) -> list[tuple[str, int]]:
    """Who computes how many tokens in one step of a continuous batch: a list of (name, tokens), in order.

    `running` and `waiting` hold (name, tokens not computed yet), the oldest first. Of those that run, the ones with one
    token come first: they decode; then the others, which read their prompts. Then the waiting are let in, in order, as
    long as fewer than `max_running` run. Each gets all its tokens, or what is left of the step's `budget`, which may be
    a part of its prompt. With nothing left the step is full.
    """
    step = []
    admitted = waiting[: max_running - len(running)]
    for name, tokens in sorted(running, key=lambda each: each[1] > 1) + admitted:
        if budget == 0:
            break
        step.append((name, min(tokens, budget)))
        budget -= step[-1][1]
    return step


def _step_with(mistake: str) -> Callable:
    def schedule_step(running, waiting, max_running, budget):
        free = max_running - len(running)
        seats = {"no limit": len(waiting), "of the new": max_running, "static": 0 if running else free}
        admitted = waiting[: seats.get(mistake, min(free, 1) if mistake == "one of the new" else free)]
        orders = {"by age": lambda each: 0, "shortest": lambda each: each[1]}
        running = sorted(running, key=orders.get(mistake, lambda each: each[1] > 1))
        step = []
        if mistake == "unbounded":
            step = [each for each in running if each[1] == 1]
            running, budget = running[len(step) :], max(0, budget - len(step))
        for name, tokens in admitted + running if mistake == "new first" else running + admitted:
            if mistake == "whole" and tokens > budget:
                break
            if mistake == "skipped" and tokens > budget:
                continue
            if budget == 0 and mistake != "empty":
                break
            count = 1 if mistake == "one each" else min(tokens, budget)
            step.append((name, count))
            budget -= 0 if mistake == "each" else count
        return step

    return schedule_step


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
    {
        "the new ones first": Mistake(
            _step_with("new first"), "Those that run come first: a newcomer must not take their tokens of the budget."
        ),
        "by age alone": Mistake(
            _step_with("by age"), "Those that decode come first, or a long prompt makes them wait for a step and more."
        ),
        "the shortest first": Mistake(
            _step_with("shortest"), "Those that read their prompts go on in the order of age: the oldest first."
        ),
        "one token each": Mistake(
            _step_with("one each"), "A prompt has many tokens to compute: only a sequence that decodes has one."
        ),
        "nobody joins": Mistake(
            _step_with("static"), "That is a static batch: a continuous one lets the next in while others run."
        ),
        "one newcomer a step": Mistake(
            _step_with("one of the new"), "There is room for more: let in one after the other, until a limit is met."
        ),
        "decoding for nothing": Mistake(
            _step_with("unbounded"),
            "Tokens of those that decode are tokens of the step: the budget holds for them, too.",
        ),
        "whole prompts": Mistake(
            _step_with("whole"), "A prompt longer than the rest of the budget gets that rest: the others follow later."
        ),
        "the long one skipped": Mistake(
            _step_with("skipped"), "Nobody is overtaken: a prompt that does not fit gets a part, not those behind it."
        ),
        "the budget of each": Mistake(
            _step_with("each"), "The budget is the step's, all sequences together: take away what was given."
        ),
        "chunks of nothing": Mistake(
            _step_with("empty"), "Nothing is left, and (name, 0) computes nothing: the step is full."
        ),
        "no limit": Mistake(_step_with("no limit"), "At most `max_running` run at a time, however short they are."),
        "so many new ones": Mistake(
            _step_with("of the new"), "`max_running` counts those that run already, too: there is room for the rest."
        ),
    },
    "nobody waits for a batch to end, and no prompt makes the others wait long.",
)

# ------------------------------------------------------------------------------------------------ preempted


def preempted(running: list[tuple[str, int, int]], num_free: int) -> list[str]:
    """Who gives its blocks back in this step, so that older ones can go on: names, in the order in which they do.

    `running` holds (name, blocks held, blocks needed besides), the oldest first, and in this order they are served.
    As long as fewer blocks are free than one needs, the newest of those still there gives back all that it holds. That
    may be the one in need itself: then it must wait.
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


def _preempted_with(mistake: str) -> Callable:
    def preempted(running, num_free):
        there, gone, served = list(running), [], 0
        if mistake == "all at once":
            while there and sum(needed for _, _, needed in running) > num_free:
                name, held, _ = there.pop()
                gone.append(name)
                num_free += held
            return gone
        while served < len(there):
            if there[served][2] <= num_free:
                num_free -= 0 if mistake == "not taken" else there[served][2]
                served += 1
                continue
            largest = max(range(served, len(there)), key=lambda i: there[i][1])
            enough = [i for i in range(served, len(there)) if there[i][1] + num_free >= there[served][2]]
            victims = {"oldest": 0, "itself": served, "largest": largest, "large enough": max(enough, default=-1)}
            victim = victims.get(mistake, -1)
            name, held, _ = there.pop(victim)
            gone.append(name)
            num_free += 0 if mistake == "not given back" else held
            if mistake == "oldest":
                served = max(served - 1, 0)
            if mistake == "one is enough":
                served += 1
        return sorted(gone) if mistake == "oldest first" else gone

    return preempted


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
    {
        "the oldest": Mistake(
            _preempted_with("oldest"),
            "The oldest has the most to lose: all of it is computed again, and it may never end. The newest gives way.",
        ),
        "the one in need": Mistake(
            _preempted_with("itself"),
            "The newest gives way: the one in need only if it is the newest itself.",
        ),
        "the largest": Mistake(
            _preempted_with("largest"),
            "Who holds most has the most to compute again, and may be the oldest: the newest gives way.",
        ),
        "the newest that is large enough": Mistake(
            _preempted_with("large enough"),
            "Nobody is passed over: the newest gives way, then the next, until it is enough.",
        ),
        "one is enough": Mistake(
            _preempted_with("one is enough"), "One victim may hold too few blocks: go on until there are enough."
        ),
        "blocks not given back": Mistake(
            _preempted_with("not given back"), "The victim's blocks are free now: they count."
        ),
        "blocks not taken": Mistake(
            _preempted_with("not taken"), "What one is given is no longer free for those behind it."
        ),
        "all needs at once": Mistake(
            _preempted_with("all at once"), "Who was preempted needs nothing any more in this step."
        ),
        "in the order of age": Mistake(
            _preempted_with("oldest first"), "The newest goes first: that is the order in which they give way."
        ),
    },
    "the oldest always goes on, so every request ends; whoever gave way computes its tokens again.",
)

EXERCISES = [SCHEDULE_STEP, PREEMPTED]
