"""How much of a memory holds tokens: pictures of its slots, and a calculator of the chats that fit (lesson 4)."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgb

from pagewise.figures.calculators import POWERS, Choice, Result, Slider, _calculator
from pagewise.figures.charts import lines
from pagewise.figures.drawing import chart, subplots
from pagewise.figures.palette import BLUE, INK, PALETTE, TEAL
from pagewise.figures.steps import Embedded, tag

CAPACITY = 15_728  # slots: 12 GiB of K and V of a model with 13 billion weights (Kwon et al. 2023)
ROW = 242  # slots in a row of the picture
RESERVED = to_rgb("#e2e2ea")  # of a slot that a chat has and does not use
LEFT, WIDTH, ROWS = 10, 400, {"reserved": 30, "paged": 100}  # of the calculator's drawing


def memory_pictures(memories: Sequence[Sequence[tuple[str, int | None]]]) -> None:
    """Draw a memory in which each chat reserves the longest piece, and one of blocks. A dot is a slot, row by row.

    `memories`: (state, request) of each slot, as `workload.slots_at` returns them. A slot that holds a token has the
    colour of its chat. Other slots of a chat are grey, and free ones are white.
    """
    title = "The same chats in the same memory: every coloured dot is a token"
    names, colours = ("the longest chat is reserved", "blocks"), [to_rgb(each) for each in PALETTE]
    with subplots(2, size=(7.0, 4.2), title=title) as (_, axes):
        for ax, name, slots in zip(axes, names, memories, strict=True):
            picture = np.ones((math.ceil(len(slots) / ROW) * ROW, 3))
            used = [(i, chat) for i, (state, chat) in enumerate(slots) if state == "used"]
            picture[[i for i, (_, chat) in enumerate(slots) if chat is not None]] = RESERVED
            for i, chat in used:
                picture[i] = colours[chat % len(colours)]
            ax.imshow(picture.reshape(-1, ROW, 3), aspect="auto", interpolation="nearest")
            chats, share = len({chat for _, chat in used}), len(used) / len(slots)
            ax.set_title(f"{name}: {chats} chats, {share:.0%} of the memory holds tokens", fontsize=10)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(True)


def paging_calculator() -> Embedded:
    """Return a calculator of the chats that fit: with the longest chat reserved for each, and in blocks."""
    inputs = [
        Slider("longest", "longest chat allowed (tokens)", POWERS[8:14], 2048),
        Slider("held", "tokens that a chat holds", (25, 50, 100, 200, 400, 800, 1600), 400),
        Slider("P", "tokens per block", POWERS[:11], 16),
        Choice(
            "memory", "memory", {f"{n:,} tokens": {"capacity": n} for n in (CAPACITY, 8 * CAPACITY)}, "15,728 tokens"
        ),
    ]
    start = {each.name: each.start for each in inputs}
    held = min(start["held"], start["longest"])
    pieces = {"reserved": start["longest"], "paged": _slots_in_blocks(held, start["P"])}
    fit = {name: math.floor(CAPACITY / piece) for name, piece in pieces.items()}
    used = {name: f"{math.floor(100 * n * held / CAPACITY + 0.5)} %" for name, n in fit.items()}
    results = [
        Result("reserved", "reserve the longest: chats at once", fit["reserved"]),
        Result("reserved_used", "memory that holds tokens", used["reserved"]),
        Result("paged", "blocks: chats at once", fit["paged"]),
        Result("paged_used", "memory that holds tokens (of several blocks, half of the last is empty)", used["paged"]),
        Result("times", "as many chats with blocks", fit["paged"] / fit["reserved"], "×"),
    ]
    drawing = _drawing(fit, pieces, held)
    return _calculator("block_memory.js", inputs, results, "How many chats fit? Move the longest chat.", drawing)


def _slots_in_blocks(held: int, P: int) -> float:
    """Return the slots of a chat's blocks: one block if it is larger than the chat, else half of the last is empty."""
    return P if held < P else held + (P - 1) / 2


def _drawing(fit: Mapping[str, int], pieces: Mapping[str, float], held: int) -> str:
    """Return the two memories as bars: a piece per chat, and in it the tokens that the chat holds."""
    scale, drawn = WIDTH / CAPACITY, []
    for (name, y), words in zip(ROWS.items(), ("the longest chat is reserved", "blocks"), strict=True):
        rects = []
        for i in range(fit[name]):
            place = {"x": f"{LEFT + i * pieces[name] * scale:.2f}", "y": y, "height": 34}
            whole, filled = f"{pieces[name] * scale:.2f}", f"{held * scale:.2f}"
            rects.append(tag("rect", **place, width=whole, fill="#fff", stroke="#8a8aa0", stroke_width=0.4))
            rects.append(tag("rect", **place, width=filled, fill=(BLUE, TEAL)[i % 2]))
        drawn.append(tag("text", words, x=LEFT, y=y - 6, fill=INK, font_size=12))
        drawn.append(tag("g", "".join(rects), data_row=name, data_y=y, data_left=LEFT, data_width=WIDTH))
    label = "Two bars of memory. In the first, each chat has a long piece that is mostly empty. In the second, the "
    label += "pieces are short and full."
    return tag("svg", "\n".join(drawn), viewBox="0 0 420 144", role="img", aria_label=label)


def found_over_pools(pools: Sequence[int], rates: Mapping[str, Sequence[float]]) -> None:
    """Draw how much of the prompts a prefix cache finds, over the size of its pool. `rates`: order → percentages."""
    best = max(map(max, rates.values()))
    said = "; ".join(f"{name}: {min(found):.0f} to {max(found):.0f} %" for name, found in rates.items())
    alt = f"Prompt blocks found by order of eviction, the least and the most over all pools. {said}."
    title = "The order of eviction decides what a full cache finds"
    with chart(6.4, 3.6, title, alt) as ax:
        labels = {"xlabel": "blocks in the pool", "ylabel": "prompt blocks found (%)"}
        lines(pools, rates, title=title, **labels, logx=True, ax=ax)
        ax.axhline(best, color=INK, lw=0.8, ls=":")
        note = {"xytext": (0, 3), "textcoords": "offset points", "fontsize": 9}
        ax.annotate("the most that can be found", (pools[0], best), **note)
