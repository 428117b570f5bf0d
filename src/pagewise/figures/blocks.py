"""Figures of paged memory, drawn from live objects: block tables, the pool over time, chains of prefixes, waste.

A manager here is anything with BlockManager's read-only side (sequences, block_table, num_tokens, tokens, ref_count).
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from pagewise.figures.charts import BLUE, HATCHES, INK, ORANGE, PALETTE, SAND, TEAL, box, show

OWNERS = (SAND, TEAL, ORANGE, "#c9b8dc", "#a9b665")  # of the first, second … sequence drawn, or `owner_colours`
SHARED, NOBODY = BLUE, "#ffffff"
EMPTY = "////"  # the hatch of a slot that is given to a sequence and holds no token


def owner_colours(*sequences: Hashable) -> dict[Hashable, str]:
    """One colour per sequence, for all the figures of a lesson: pass it to each of them as `colours`."""
    return {name: OWNERS[i % len(OWNERS)] for i, name in enumerate(sequences)}


class Snapshot(NamedTuple):
    """A manager at one moment, and what every slot of the pool holds, as text."""

    block_size: int
    tables: dict[Hashable, list[int]]
    lengths: dict[Hashable, int]
    ref_counts: list[int]
    contents: list[str]  # N · P

    def owners(self, slot: int) -> list[Hashable]:
        """The sequences that have a token in this slot."""
        P, found = self.block_size, []
        for name, table in self.tables.items():
            if slot // P in table and table.index(slot // P) * P + slot % P < self.lengths[name]:
                found.append(name)
        return found


def snapshot(manager: Any, contents: Sequence[str] | None = None) -> Snapshot:
    """What `manager` says now. `contents` is what the slots hold; default: the tokens that belong there."""
    ids, P = manager.sequences, manager.block_size
    if contents is None:
        contents = [""] * (manager.num_blocks * P)
        for i in ids:
            for token, slot in zip(manager.tokens(i), manager.slots(i, 0, manager.num_tokens(i)), strict=True):
                contents[slot] = str(token)
    tables, num_tokens = ({i: read(i) for i in ids} for read in (manager.block_table, manager.num_tokens))
    return Snapshot(P, tables, num_tokens, [manager.ref_count(b) for b in range(manager.num_blocks)], list(contents))


def tables_and_pool(
    panels: Mapping[str, Snapshot],
    *,
    title: str,
    colours: Mapping[Hashable, str] | None = None,
    copies: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    alt: str | None = None,
) -> None:
    """Block tables above, the pool below, an arrow from each entry to its block; one panel per moment.

    A slot is filled in its owner's colour, dark where several share it, hatched where a sequence has it and holds no
    token there; what an unowned slot holds is shown in white. `colours` are those of `owner_colours`; default: by order
    of appearance. `copies` are the (src, dst) to be drawn in a panel.
    """
    first = next(iter(panels.values()))
    width = len(first.ref_counts) * (first.block_size + 0.8)
    copies = copies or {}
    heights = [3.3 if copies.get(name) else 2.6 for name in panels]  # a copy is drawn under the pool
    size = (min(9.6, 0.42 * width + 1.6), sum(heights) + 0.5)
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False, height_ratios=heights)
    colours = _colours(panels.values(), colours)
    for ax, (name, shot) in zip(axes[:, 0], panels.items(), strict=True):
        draw_tables_and_pool(ax, shot, colours)
        draw_copies(ax, shot, copies.get(name, ()))
        ax.set_title(name)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    show(alt)


def draw_tables_and_pool(
    ax: Axes, shot: Snapshot, colours: Mapping[Hashable, str], *, table_name: str = "block table of {} ({} tokens)"
) -> None:
    """One panel of `tables_and_pool`. Block b of the pool begins at x = b · (block_size + 0.8)."""
    width = len(shot.ref_counts) * (shot.block_size + 0.8)
    _draw_pool(ax, shot, colours)
    entries = sum(len(table) + 1.2 for table in shot.tables.values())
    x, step = 0.0, max(1.2, width / max(entries, 1))
    for owner, table in shot.tables.items():
        ax.text(x, 4.0, table_name.format(owner, shot.lengths[owner]), fontsize=9)
        for i, block in enumerate(table):
            left = x + i * 1.5
            box(ax, left, 2.9, 1.3, 0.9, str(block), fill=colours[owner])
            tip = (block * (shot.block_size + 0.8) + shot.block_size / 2, 1.02)
            style = {"arrowstyle": "-|>", "color": INK, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", tip, (left + 0.65, 2.9), arrowprops=style)
        x += (len(table) + 1.2) * step
    ax.set(xlim=(-0.3, width), ylim=(-1.6, 4.7))
    ax.axis("off")


def draw_copies(ax: Axes, shot: Snapshot, copies: Sequence[tuple[int, int]]) -> None:
    """An arrow under the pool for each block that is copied, (src, dst)."""
    stride, middle = shot.block_size + 0.8, shot.block_size / 2
    for src, dst in copies:
        ends = [(block * stride + middle, -1.7) for block in (dst, src)]
        bend = f"arc3,rad={0.3 if src < dst else -0.3}"
        ax.annotate("", *ends, arrowprops={"arrowstyle": "-|>", "color": ORANGE, "lw": 2.5, "connectionstyle": bend})
        ax.text((ends[0][0] + ends[1][0]) / 2, -3.1, "copy", ha="center", color=ORANGE, fontweight="bold")
    if copies:
        ax.set_ylim(bottom=-3.3)


def query_over_blocks(
    shot: Snapshot,
    owner: Hashable,
    weights: Sequence[float],
    *,
    title: str,
    colours: Mapping[Hashable, str] | None = None,
    alt: str | None = None,
) -> None:
    """A sequence's query above the pool, an arrow to each of its blocks in the order of its table; `weights`, those of
    its tokens, as bars over their slots."""
    colours, stride, P = _colours([shot], colours), shot.block_size + 0.8, shot.block_size
    width = len(shot.ref_counts) * stride
    _, ax = plt.subplots(figsize=(min(9.6, 0.42 * width + 1.6), 3.4))
    _draw_pool(ax, shot, colours)
    box(ax, width / 2 - 2, 4.3, 4, 0.9, f"query of {owner}", fill=colours[owner])
    for i, block in enumerate(shot.tables[owner]):
        left, tokens = block * stride, range(i * P, min((i + 1) * P, shot.lengths[owner]))
        style = {"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (left + P / 2, 3.35), (width / 2, 4.3), arrowprops=style)
        what = f"tokens {tokens[0]}–{tokens[-1]}" if len(tokens) > 1 else f"token {tokens[0]}"
        ax.text(left + P / 2, 2.85, f"{i}: {what}", ha="center", fontsize=9)
        for slot, token in enumerate(tokens):
            height = 1.5 * weights[token] / max(weights)
            ax.add_patch(Rectangle((left + slot + 0.15, 1.1), 0.7, height, fc=INK, ec="none"))
    ax.set(xlim=(-0.3, width), ylim=(-1.6, 5.3))
    ax.set_title(title)
    ax.axis("off")
    show(alt)


def pool_over_time(
    moments: Mapping[str, Snapshot],
    *,
    title: str,
    colours: Mapping[Hashable, str] | None = None,
    alt: str | None = None,
) -> None:
    """The pool after each call, one row per call, the block tables beside it. A slot names who has a token there."""
    first = next(iter(moments.values()))
    stride, N = first.block_size + 0.6, len(first.ref_counts)
    _, ax = plt.subplots(figsize=(9.6, 0.5 * len(moments) + 1.2))
    colours = _colours(moments.values(), colours)
    for row, shot in enumerate(moments.values()):
        for slot in range(len(shot.contents)):
            block, offset = divmod(slot, shot.block_size)
            owners = shot.owners(slot)
            names, fill = "".join(map(str, owners)), _fill(owners, colours)
            box(ax, block * stride + offset, row - 0.38, 1, 0.76, names, fill=fill)
        tables = "\n".join(f"{name}: {table}" for name, table in shot.tables.items())
        ax.text(N * stride + 0.3, row, tables, va="center", fontsize=8.5)
    ax.text(N * stride + 0.3, -0.62, "block tables", va="bottom", fontsize=9)
    ax.set_xlim(-0.3, N * stride)
    ax.set_ylim(len(moments) - 0.5, -0.5)
    ax.set_xticks([block * stride + first.block_size / 2 for block in range(N)], [str(block) for block in range(N)])
    ax.set_yticks(range(len(moments)), list(moments))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.set_title(title)
    ax.set_xlabel("physical block (its slots side by side)")
    ax.set_ylabel("after the call")
    show(alt)


def chains(
    prefixes: Sequence[Any],
    owners: Mapping[int, Sequence[Hashable]],
    text: Mapping[Any, str],
    *,
    title: str,
    colours: Mapping[Hashable, str] | None = None,
    alt: str | None = None,
) -> None:
    """The tree of cached prefixes: digest, words and physical block of each, filled as the slots of its owners are.

    Args:
        prefixes: `Prefix` objects; a parent that is not among them is drawn as the root.
        owners: block → the sequences that hold it.
        text: prefix → the words of its block.
        colours: those of `owner_colours`; default: by order of appearance.
    """
    prefixes = list(dict.fromkeys(prefixes))
    children: dict[int, list[Any]] = {}
    for prefix in prefixes:
        parent = prefix.parent if prefix.parent in prefixes else None
        children.setdefault(id(parent), []).append(prefix)
    places: dict[Any, tuple[float, float]] = {}
    depth = _place(children, None, 0, 0.0, places)[1]
    rows = max(y for _, y in places.values()) + 1 if places else 1
    names = dict.fromkeys(name for held in owners.values() for name in held)
    colours = owner_colours(*names) | dict(colours or {})
    _, ax = plt.subplots(figsize=(min(9.6, 2.9 * max(depth, 1) + 1.6), 0.85 * rows + 0.8))
    for prefix in prefixes:
        x, y = places[prefix]
        parent = places.get(prefix.parent)
        start = (parent[0] + 2.3, parent[1]) if parent else (-0.6, (rows - 1) / 2)
        style = {"arrowstyle": "-|>", "color": INK, "lw": 1, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (x, y), start, arrowprops=style)
        held = list(dict.fromkeys(name for block in prefix.blocks for name in owners.get(block, ())))
        label = f"{prefix.digest.hex()[:8]}…  block {', '.join(map(str, prefix.blocks))}\n{text[prefix]}"
        box(ax, x, y - 0.36, 2.3, 0.72, label, fill=_fill(held, colours))
    ax.text(-0.65, (rows - 1) / 2, "root", ha="right", va="center", fontsize=9)
    ax.set(title=title, xlim=(-1.2, 3 * max(depth, 1)), ylim=(rows - 0.4, -0.6))
    ax.axis("off")
    kinds = {f"held by {name}": colours[name] for name in names} | {"free, can be found": NOBODY}
    handles = [Patch(fc=colour, ec=INK, label=name) for name, colour in kinds.items()]
    ax.legend(handles=handles, ncols=len(handles), loc="upper left", bbox_to_anchor=(0.0, 0.04))
    show(alt)


def memory_map(
    rows: Mapping[str, Sequence[tuple[str, Hashable | None]]],
    *,
    title: str,
    colours: Mapping[Hashable, str] | None = None,
    alt: str | None = None,
) -> None:
    """Memory slot by slot, one row per allocator: (state, owner) of each slot, as `workload.slots_at` gives them.

    A used piece has its owner's colour and name, the other states the hatches that `stacks` gives them.
    """
    looks = {
        "reserved": {"fc": NOBODY, "hatch": "///"},
        "internal": {"fc": NOBODY, "hatch": "..."},
        "external": {"fc": "#d3d3da", "hatch": "xx"},
        "idle": {"fc": NOBODY},
    }
    names = {"used": "used", "external": "free, in pieces (external)", "idle": "free"}
    owners = dict.fromkeys(owner for slots in rows.values() for _, owner in slots if owner is not None)
    colours = owner_colours(*owners) | dict(colours or {})
    _, ax = plt.subplots(figsize=(9.6, 0.55 * len(rows) + 1.5))
    for row, slots in enumerate(rows.values()):
        start = 0
        for (state, owner), piece in groupby(slots):
            size = len(list(piece))
            look = looks.get(state) or {"fc": colours[owner]}
            ax.add_patch(Rectangle((start, row - 0.36), size, 0.72, ec=INK, lw=0.6, **look))
            if state == "used":
                ax.text(start + size / 2, row, str(owner), ha="center", va="center", fontsize=9, fontweight="bold")
            start += size
    looks = {"used": {"fc": "#8d8da0"}} | looks
    handles = [Patch(ec=INK, lw=0.6, label=names.get(state, state), **look) for state, look in looks.items()]
    ax.legend(handles=handles, ncols=5, loc="lower left", bbox_to_anchor=(-0.01, 0.98), fontsize=9, columnspacing=1.2)
    ax.set_xlim(-0.5, max(map(len, rows.values())) + 0.5)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.grid(visible=False)
    ax.set_title(title, pad=28)
    ax.set_xlabel("slot of the memory (one token each)")
    show(alt)


def stacks(
    names: Sequence[str], shares: Mapping[str, Sequence[float]], *, title: str, xlabel: str, alt: str | None = None
) -> None:
    """Horizontal bars of shares (0 … 1) that add up to a whole; a share that has room carries its per cent."""
    _, ax = plt.subplots(figsize=(7.6, 0.55 * len(names) + 1.8))
    left = np.zeros(len(names))
    for i, (label, values) in enumerate(shares.items()):
        values, fill = 100 * np.asarray(values), PALETTE[i % 5]
        ax.barh(range(len(names)), values, 0.7, left=left, label=label, color=fill, hatch=HATCHES[i % 5], ec="white")
        for row, value in enumerate(values):
            if value > 4:
                plate = {"fc": fill if i == 0 else "white", "ec": "none", "pad": 1}
                colour = "white" if i == 0 else INK
                place = (left[row] + value / 2, row)
                ax.text(*place, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=9, bbox=plate)
        left += values
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set(xlabel=xlabel, xlim=(0, 100.5))
    ax.set_title(title, pad=28)
    ax.legend(ncols=len(shares), loc="lower left", bbox_to_anchor=(-0.02, 0.98), fontsize=9, columnspacing=1.2)
    show(alt)


def _draw_pool(ax: Axes, shot: Snapshot, colours: Mapping[Hashable, str]) -> None:
    stride = shot.block_size + 0.8
    for slot, text in enumerate(shot.contents):
        block, offset = divmod(slot, shot.block_size)
        owners = shot.owners(slot)
        hatch = EMPTY if shot.ref_counts[block] and not owners else None
        box(ax, block * stride + offset, 0, 1, 1, text, fill=_fill(owners, colours), hatch=hatch)
    for block, count in enumerate(shot.ref_counts):
        label = f"block {block}\nheld by {count}" if count else f"block {block}\nfree"
        ax.text(block * stride + shot.block_size / 2, -0.2, label, ha="center", va="top", fontsize=9)


def _colours(shots: Any, chosen: Mapping[Hashable, str] | None) -> dict[Hashable, str]:
    return owner_colours(*dict.fromkeys(name for shot in shots for name in shot.tables)) | dict(chosen or {})


def _fill(owners: Sequence[Hashable], colours: Mapping[Hashable, str]) -> str:
    return NOBODY if not owners else SHARED if len(owners) > 1 else colours[owners[0]]


def _place(
    children: Mapping[int, list[Any]], parent: Any, depth: int, row: float, places: dict[Any, tuple[float, float]]
) -> tuple[float, int]:
    """Put the children of `parent` in rows from `row` on; return (next free row, deepest level + 1)."""
    deepest = depth
    for prefix in children.get(id(parent), []):
        first = row
        row, below = _place(children, prefix, depth + 1, row, places)
        row = max(row, first + 1)
        places[prefix] = (3.0 * depth, (first + row - 1) / 2)
        deepest = max(deepest, below, depth + 1)
    return row, deepest
