"""Figures of attention itself: products of matrices, and query heads that share KV heads."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from pagewise.figures.charts import bars, heatmap
from pagewise.figures.drawing import bare, box, diagram, subplots
from pagewise.figures.palette import BLUE, INK, ORANGE, SAND, TEAL

FILLS = (BLUE, SAND, TEAL, ORANGE)  # of KV heads


def equations(
    rows: Sequence[Sequence[str | tuple[str, Tensor]]], *, title: str, names: Sequence[str] = (), alt: str = ""
) -> None:
    """Draw equations of matrices, all to one scale. ("Q", Q) is a matrix, and a plain string is a sign.

    Each matrix has its name and shape above it, and its numbers inside. `names` are the names of the tokens: of the
    rows, and of the columns of each matrix that has a column per token. `alt` is by default the equations in words.
    """
    alt = alt or f"{'; '.join(' '.join(map(_in_words, row)) for row in rows)}. All numbers are inside."

    def gap(sign: str) -> float:
        return 1.0 + 0.3 * len(sign)

    widths = [sum(gap(part) if isinstance(part, str) else part[1].shape[1] for part in row) for row in rows]
    heights = [max(part[1].shape[0] for part in row if not isinstance(part, str)) for row in rows]
    size = (6.4, 0.31 * sum(heights) + 0.75 * len(rows))
    with subplots(len(rows), size=size, title=title, alt=alt, fontsize=12, height_ratios=heights) as (_, axes):
        for ax, row, height in zip(axes, rows, heights, strict=True):
            x = 0.0
            for part in row:
                if isinstance(part, str):
                    ax.text(x + gap(part) / 2 - 0.5, height / 2 - 0.5, part, ha="center", va="center", fontsize=11)
                    x += gap(part)
                    continue
                name, matrix = part
                T, width = matrix.shape
                numbers = {"annotate": "g" if (matrix % 1 == 0).all() else ".2f", "fontsize": 7.5}
                heatmap(ax, matrix.detach().cpu().numpy(), "", left=x, **numbers)
                ax.text(x + width / 2 - 0.5, -0.7, f"{name}  [{T}, {width}]", ha="center", va="bottom", fontsize=9)
                for i, token in enumerate(names if width == len(names) else ()):
                    ax.text(x + i, T - 0.4, token, ha="center", va="top", fontsize=7.5)
                x += width
            ax.set(xlim=(-0.6, max(widths) - 0.4), ylim=(height + 0.3 * bool(names), -1.7), xticks=[])
            ax.set_yticks(range(len(names)), names)
            bare(ax)


def _in_words(part: str | tuple[str, Tensor]) -> str:
    if isinstance(part, str):
        return part
    name, matrix = part
    return f"{name.replace('$', '')} {list(matrix.shape)}"


def head_maps(maps: Mapping[str, Sequence[int]], *, title: str, alt: str = "") -> None:
    """Draw a panel per way of sharing. `maps` gives the KV head that each query head reads."""
    alt = alt or "; ".join(f"{name}: query heads 0 to {len(of) - 1} read KV heads {of}" for name, of in maps.items())
    heads = max(map(len, maps.values()))
    with subplots(1, len(maps), size=(6.4, 2.1), title=title, alt=alt, fontsize=12) as (_, axes):
        for ax, (name, reads) in zip(axes, maps.items(), strict=True):
            kv_heads = max(reads) + 1
            places = [(i + 0.5) * heads / kv_heads - 0.5 for i in range(kv_heads)]  # below the heads that read it
            for h, i in enumerate(reads):
                ax.plot([h, places[i]], [0.75, 0.25], color=INK, lw=1)
                box(ax, h - 0.4, 0.75, 0.8, 0.25, f"q{h}", fill=FILLS[i % 4])
            for i, x in enumerate(places):
                box(ax, x - 0.4, 0.0, 0.8, 0.25, f"kv{i}", fill=FILLS[i % 4])
            ax.set_title(name)
            diagram(ax, (-0.5, heads - 0.5), (-0.05, 1.1))


def free_changes(apart: Mapping[str, float], fused: Mapping[str, float]) -> None:
    """Draw the MB that attention moves with each option: as operations of their own, and in one kernel."""
    least, most = min(apart.values()), max(apart.values())
    alt = f"In the package's operations of torch, attention moves {least:.0f} to {most:.0f} MB. In one "
    alt += f"kernel it moves {min(fused.values()):.0f} MB with any option."
    series = {"operations of torch": [*apart.values()], "one kernel": [*fused.values()]}
    title, beside = "In one kernel, a change of the scores moves no bytes", {"legend_outside": True, "width": 7.2}
    bars(
        [*apart],
        series,
        title=title,
        ylabel="MB moved by pagewise's attention, GPT-2's layer",
        horizontal=True,
        values=",.0f",
        alt=alt,
        **beside,
    )


def busy_units(cycles: Mapping[str, Mapping[str, float]], head_size: int) -> None:
    """Draw change → unit → clock cycles for one score: how long each unit of a GPU is busy (lesson 1 in depth)."""
    units = [*next(iter(cycles.values()))]
    parts = {name: ", ".join(f"{unit} {of[unit]:.3g}" for unit in units) for name, of in cycles.items()}
    bars(
        [*cycles],
        {unit: [of[unit] for of in cycles.values()] for unit in units},
        title=f"Heads of {head_size}: which unit is busy for longest?",
        ylabel="clock cycles of an H100's SM for one score, at its peak",
        horizontal=True,
        values=".3g",
        legend_outside=True,
        width=7.2,
        alt=". ".join(f"{name}: {part}" for name, part in parts.items()),
    )
