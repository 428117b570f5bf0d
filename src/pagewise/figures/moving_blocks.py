"""Paged memory, call by call: calls to a live block manager, and a picture after each call."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from pagewise.figures.blocks import Colours, Snapshot, colours_of, draw_copies, draw_tables_and_pool, snapshot
from pagewise.figures.palette import ORANGE
from pagewise.figures.steps import Embedded, stepper


class _Moment(NamedTuple):
    shot: Snapshot
    copies: list[tuple[int, int]]
    cached: list[int]  # free blocks that the prefix cache can still find


def block_steps(
    manager: Any, calls: Iterable[Sequence[Any]], *, title: str, alt: str = "", colours: Colours | None = None
) -> Embedded:
    """Make the calls and return a stepper with tables and pool after each call. An arrow shows a copied block.

    Args:
        manager: a `BlockManager`. The calls change a copy of it. A call that runs out of memory is a step too.
        calls: (reason, name of the method, arguments …) of each call. One is ("A writes on", "append", "A", 7).
        alt: by default the numbers of blocks and slots.
        colours: those of `owner_colours`; by default in the order of appearance.
    """
    sizes = f"{manager.num_blocks} blocks of {manager.block_size} slots"
    alt = alt or f"Block tables above, {sizes} below, one colour per sequence."
    manager = copy.deepcopy(manager)
    all_free = " all blocks are free" if manager.num_free_blocks == manager.num_blocks else ""
    frames = [(f"Before the first call{all_free}.", _look(manager, []))]
    for why, name, *arguments in calls:
        said = ", ".join(_short(argument) for argument in arguments)
        try:
            answer = getattr(manager, name)(*arguments)
            result = "" if answer is None else f" returns {answer}"
        except RuntimeError as refused:
            result = f" is refused: {type(refused).__name__}"
        copies = manager.take_copies()
        result += "".join(f", and block {src} is copied to block {dst} first" for src, dst in copies)
        frames.append((f"{why}: {name}({said}){result}.", _look(manager, copies)))
    colours = colours_of((name for _, moment in frames for name in moment.shot.tables), colours)
    return stepper(frames, lambda figure, now: _draw(figure, now, colours), title=title, alt=alt, height=2.7, still=1)


def _look(manager: Any, copies: list[tuple[int, int]]) -> _Moment:
    """Return the state of the manager, with the tokens that free but cached blocks still hold."""
    shot, P = snapshot(manager), manager.block_size
    cached = [block for block in range(manager.num_blocks) if not manager.ref_count(block) and manager.prefix(block)]
    contents = list(shot.contents)
    for block in cached:
        contents[block * P : (block + 1) * P] = map(str, manager.prefix(block).tokens)
    return _Moment(shot._replace(contents=contents), copies, cached)


def _short(argument: Any) -> str:
    if isinstance(argument, int | str):
        return repr(argument)
    tokens = [str(token) for token in argument]
    return "[" + ", ".join(tokens if len(tokens) <= 5 else [*tokens[:2], "…", tokens[-1]]) + "]"


def _draw(figure: Figure, moment: _Moment, colours: Colours) -> None:
    ax = figure.subplots()
    draw_tables_and_pool(ax, moment.shot, colours, table_name="{}: {} tokens")
    for block in moment.cached:
        look = {"fontsize": 9, "fontweight": "bold", "color": ORANGE}
        ax.text(moment.shot.middle(block), -1.95, "cached", ha="center", va="center", **look)
    draw_copies(ax, moment.shot, moment.copies)
    ax.set_ylim(-3.3, 4.7)
