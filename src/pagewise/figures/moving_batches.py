"""The batch of an engine over its steps: the seats of the requests, and their blocks (lesson 9)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pagewise.figures.blocks import OWNERS, SHARED
from pagewise.figures.drawing import colour_key, rectangle, subplots
from pagewise.figures.palette import INK, ORANGE
from pagewise.figures.steps import Embedded, stepper

EMPTY = {"fc": "#f1f1f5", "ec": "none"}  # a free seat
KINDS = {"prompt": "////", "decode": "", "again": "xxxx"}  # the kind of tokens that a sequence computes, and its hatch
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Moment(NamedTuple):
    """One step of an engine. A request is a number, counted from 0 in the order of arrival."""

    computed: dict[int, tuple[str, int]]  # request → (one of KINDS, tokens computed), of those in the batch
    running: list[int]  # requests with a seat; the budget may leave them without a token
    waiting: list[int]
    preempted: list[int]  # requests that lost their seat and their blocks before this step
    blocks: dict[int, int]  # request → its own blocks during the step; −1 → blocks in several tables


def seats(moments: Sequence[Moment]) -> list[dict[int, int]]:
    """Return the seats in each step. A new request takes the first free seat and keeps it while it runs."""
    place: dict[int, int] = {}
    found = []
    for moment in moments:
        place = {request: seat for request, seat in place.items() if request in moment.running}
        for request in moment.running:
            if request not in place:
                place[request] = next(seat for seat in range(len(place) + 1) if seat not in place.values())
        found.append(dict(place))
    return found


def batch_steps(
    panels: Mapping[str, Sequence[Moment]], num_seats: int, *, title: str, alt: str, every: int = 1
) -> Embedded:
    """Return a stepper with a panel per scheduler, a row per seat and a column per step. Each request has a colour.

    Args:
        num_seats: the largest size of the batch.
        every: show every n-th step, the last step, and all steps with a preemption.
    """
    end = max(map(len, panels.values()))
    taken = {name: seats(moments) for name, moments in panels.items()}
    preempted = {t for moments in panels.values() for t, moment in enumerate(moments) if moment.preempted}
    times = sorted({*range(0, end, every), end - 1} | preempted)
    looks = {"prompt": {"fc": "white", "hatch": KINDS["prompt"]}, "one token": {"fc": "white"}}
    if any(kind == "again" for moments in panels.values() for now in moments for kind, _ in now.computed.values()):
        looks["computed again"] = {"fc": "white", "hatch": KINDS["again"]}
    looks["empty seat"] = EMPTY

    def draw(figure: Figure, time: int) -> None:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (name, moments) in zip(axes, panels.items(), strict=True):
            rectangle(ax, 0, 0, min(time + 1, len(moments)), num_seats, **EMPTY)  # later steps stay white
            _draw_seats(ax, moments[: time + 1], taken[name])
            if time < len(moments):
                rectangle(ax, time, 0, 1, num_seats, "none", lw=1.6)
            steps = f"done after {len(moments)} steps" if time >= len(moments) - 1 else f"step {time}"
            ax.set_title(f"{name}: {steps}", fontsize=10)
            ax.set(xlim=(0, end), ylim=(num_seats, 0), ylabel="seat")
            ax.set_yticks(np.arange(num_seats) + 0.5, range(num_seats))
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        colour_key(figure, looks, loc="outside lower center", ncols=len(looks), fontsize=8, handlelength=1.4)

    frames = [(f"Step {t}. {_said(panels, t)}", t) for t in times]
    # Without scripts: the first preemption, or else the step in which the panels differ most.
    running = {t: [len(of[t].running) if t < len(of) else 0 for of in panels.values()] for t in times}
    telling = min(preempted) if preempted else max(times, key=lambda t: max(running[t]) - min(running[t]))
    height = 1.35 * len(panels) + 0.9
    return stepper(frames, draw, title=title, alt=alt, height=height, still=times.index(telling))


def letters(requests: Sequence[int]) -> str:
    """Return the names of requests: A, B, C …"""
    return ", ".join(LETTERS[request % len(LETTERS)] for request in requests)


def _said(panels: Mapping[str, Sequence[Moment]], t: int) -> str:
    sentences = []
    for name, moments in panels.items():
        if t >= len(moments):
            sentences.append(f"{name}: done.")
            continue
        now = moments[t]
        tokens = sum(count for _, count in now.computed.values())
        one, alone = len(now.running) == 1, len(now.waiting) == 1
        words = f"{name}: {letters(now.running)} compute{'s' * one} {tokens} token{'s' * (tokens != 1)}"
        words += f"; {letters(now.preempted)} preempted" if now.preempted else ""
        sentences.append(words + (f"; {letters(now.waiting)} wait{'s' * alone}." if now.waiting else "."))
    return " ".join(sentences)


def _draw_seats(ax: Axes, moments: Sequence[Moment], taken: Sequence[dict[int, int]]) -> None:
    latest: dict[int, tuple[int, int]] = {}  # request → its last step and seat
    for step, moment in enumerate(moments):
        for request, seat in taken[step].items():
            kind, _ = moment.computed.get(request, ("nothing", 0))
            fill = OWNERS[request % len(OWNERS)] if kind in KINDS else "white"
            rectangle(ax, step, seat, 1, 1, fill, lw=0.5, hatch=KINDS.get(kind))
            if request not in latest or latest[request][0] < step - 1:
                _name(ax, step + 0.5, seat + 0.5, request)
            latest[request] = step, seat
        for lost in set(moment.preempted) & set(latest):  # draw a cross on its former seat
            ax.plot(step, latest[lost][1] + 0.5, "X", color=ORANGE, mec=INK, ms=8, zorder=5)


def _name(ax: Axes, x: float, y: float, request: int) -> None:
    """Write the request's letter, readable on any colour."""
    label = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
    ax.text(x, y, letters([request]), ha="center", va="center", fontsize=8, fontweight="bold", bbox=label)


def blocks_over_time(panels: Mapping[str, Sequence[Moment]], num_blocks: int, *, title: str, alt: str = "") -> None:
    """Draw a panel per run: the blocks of each request in each step, and the steps with a preemption.

    A letter marks the step in which a request begins to hold blocks. The dashed line is the pool.
    """
    options = {"title": title, "alt": alt, "sharex": True, "sharey": True}
    with subplots(len(panels), size=(5.2, 1.6 * len(panels) + 0.9), **options) as (figure, axes):
        for ax, (name, moments) in zip(axes, panels.items(), strict=True):
            base = np.zeros(len(moments))
            for request in sorted({request for moment in moments for request in moment.blocks}):
                held = np.array([moment.blocks.get(request, 0) for moment in moments], dtype=float)
                colour = SHARED if request < 0 else OWNERS[request % len(OWNERS)]
                ax.bar(np.arange(len(moments)) + 0.5, held, 1.0, bottom=base, color=colour, ec="white", lw=0.3)
                for step in np.flatnonzero((held > 0) & (np.append(0, held[:-1]) == 0)) if request >= 0 else ():
                    _name(ax, step + 0.5, base[step] + held[step] / 2, request)
                base += held
            for step, moment in enumerate(moments):
                if moment.preempted:
                    ax.plot(step, num_blocks, "X", color=ORANGE, mec=INK, ms=8, clip_on=False, zorder=5)
            ax.axhline(num_blocks, color=INK, ls="--", lw=1)
            ax.set_title(name, fontsize=10)
            ax.grid(visible=True)
            ax.set(ylim=(0, num_blocks * 1.1), xlim=(0, max(map(len, panels.values()))))
        figure.supylabel("blocks held", fontsize=10)
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        everything = [moment for moments in panels.values() for moment in moments]
        handles = [Line2D([], [], color=INK, ls="--", lw=1, label="all blocks")]
        if any(-1 in moment.blocks for moment in everything):
            handles.append(Patch(fc=SHARED, label="in several tables"))
        if any(moment.preempted for moment in everything):
            handles.append(Line2D([], [], color=ORANGE, marker="X", mec=INK, ms=8, ls="", label="preempted"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, handlelength=1.6)
