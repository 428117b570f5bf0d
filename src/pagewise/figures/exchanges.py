"""Processes that exchange data: tokens for heads in an all-to-all, and the time of sending beside that of computing."""

from matplotlib.patheffects import withStroke

from pagewise.figures.drawing import arrow, box, diagram, rectangle, subplots
from pagewise.figures.moving_rings import PROCESSES
from pagewise.figures.palette import INK


def all_to_all(num_processes: int, num_heads: int, *, marked: int, title: str, alt: str = "") -> None:
    """Draw tokens × heads before and after an all-to-all. The colour and number of a box name its process.

    Args:
        marked: a process. Thick frames mark what it sends, and where these boxes are afterwards.

    Raises:
        ValueError: the heads cannot be shared out evenly, or there are more processes than colours.
    """
    if num_processes > len(PROCESSES) or num_heads % num_processes:
        message = f"num_heads must be a multiple of num_processes, which is at most {len(PROCESSES)}"
        raise ValueError(f"{message}, got {num_heads} and {num_processes}")
    share = num_heads // num_processes
    with subplots(1, size=(5.4, 0.45 * num_processes + 1.3), title=title, alt=alt) as (_, (ax,)):
        right = num_heads + 2.4
        diagram(ax, (-1.0, right + num_heads + 0.1), (num_processes + 0.9, -1.05))
        for left, name in ((0.0, "before: own tokens, all heads"), (right, "after: all tokens, own heads")):
            ax.text(left, -0.4, name, fontsize=9, fontweight="bold")
            ax.text(left + num_heads / 2, num_processes + 0.75, "head", ha="center", fontsize=9)
            for head in range(num_heads):
                ax.text(left + head + 0.5, num_processes + 0.3, f"{head}", ha="center", fontsize=8)
        for piece in range(num_processes):
            ax.text(-0.2, piece + 0.5, f"tokens {piece}", ha="right", va="center", fontsize=8)
            for head in range(num_heads):
                for left, holder in ((0.0, piece), (right, head // share)):
                    box(ax, left + head, piece, 1, 1, f"{holder}", fill=PROCESSES[holder])
        on_dark_boxes = [withStroke(linewidth=5.0, foreground="white")]
        for head in range(num_heads):
            if head // share != marked:
                for left in (0.0, right):
                    frame = {"ec": INK, "lw": 2.6, "path_effects": on_dark_boxes}
                    rectangle(ax, left + head + 0.07, marked + 0.07, 0.86, 0.86, "none", **frame)
        middle = num_processes / 2
        arrow(ax, (num_heads + 0.3, middle), (right - 0.3, middle), lw=2)
