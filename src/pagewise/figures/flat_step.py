"""One step of an engine: the flat row of tokens, the beginning of each sequence, and the slots it writes (lesson 9)."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from pagewise.figures.blocks import OWNERS
from pagewise.figures.drawing import arrow, box, chart, colour_key, diagram, rectangle
from pagewise.figures.palette import INK

GAP = 0.8  # between two blocks of the pool
ROW, POOL = 3.4, 0.0  # y of the flat row and of the pool


def flat_step(
    step: Mapping[str, Sequence],
    names: Sequence[str],
    words: Sequence[str],
    block_size: int,
    num_blocks: int,
    *,
    title: str,
    alt: str,
) -> None:
    """Draw a step as the model sees it: a flat row of tokens above, the pool of blocks below.

    Args:
        step: the lists positions, slots, seq_lens, cu_seqlens_q and block_tables of the step.
        names: of the sequences. words: the text of each token in the row.
    """
    cu, slots, positions = (step[name] for name in ("cu_seqlens_q", "slots", "positions"))
    tables, lengths = step["block_tables"], step["seq_lens"]
    width = num_blocks * (block_size + GAP) - GAP
    left = (width - 2 * len(words)) / 2  # a token is two slots wide
    with chart(6.4, 3.9, title, alt) as ax:
        written = dict(zip(slots, range(len(words)), strict=True))
        for b, table in enumerate(tables):
            for t in range(lengths[b]):
                slot = table[t // block_size] * block_size + t % block_size
                style = {"lw": 2.0} if slot in written else {"hatch": "////"}
                rectangle(ax, _x(slot, block_size), POOL, 1, 1, OWNERS[b], **style)
        for block in range(num_blocks):
            x = block * (block_size + GAP)
            rectangle(ax, x, POOL, block_size, 1, "none", lw=1.2)
            ax.text(x + block_size / 2, POOL - 0.25, f"block {block}", ha="center", va="top", fontsize=9)
        for b, name in enumerate(names):
            for i in range(cu[b], cu[b + 1]):
                x = left + 2 * i
                box(ax, x, ROW, 2, 1, words[i], fill=OWNERS[b])
                ax.text(x + 1, ROW + 1.15, positions[i], ha="center", va="bottom", fontsize=9)
                arrow(ax, (x + 1, ROW), (_x(slots[i], block_size) + 0.5, POOL + 1), color=INK, lw=0.8)
            _label(ax, left + cu[b] + cu[b + 1], name, tables[b], lengths[b])
        for end in cu:
            ax.plot([left + 2 * end] * 2, [ROW - 0.1, ROW + 1.8], color=INK, lw=1, ls=":")
            ax.text(left + 2 * end, ROW + 1.95, end, ha="center", va="bottom", fontsize=9, fontweight="bold")
        for y, text in ((ROW + 1.95, "cu_seqlens_q"), (ROW + 1.15, "positions")):
            ax.text(left - 0.8, y, text, ha="right", va="bottom", fontsize=9)
        looks = {"written in this step": {"fc": "white", "lw": 2}, "in memory before": {"fc": "white", "hatch": "////"}}
        colour_key(ax, looks, loc="lower center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=9)
        diagram(ax, (-0.3, width + 0.3), (-1.6, ROW + 4.4))


def _x(slot: int, block_size: int) -> float:
    """Return the left side of a slot of the pool."""
    return slot // block_size * (block_size + GAP) + slot % block_size


def _label(ax: Axes, x: float, name: str, table: list[int], length: int) -> None:
    """Write a sequence's name, block table and number of keys above its tokens."""
    used = ", ".join(map(str, table))
    ax.text(x, ROW + 2.7, f"{name}\ntable [{used}]\nseq_len {length}", ha="center", va="bottom", fontsize=9)
