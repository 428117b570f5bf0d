"""Figures of paged memory, drawn from live objects: block tables and the pool, chains of prefixes.

A manager is any object with the read-only methods of BlockManager (sequences, block_table, num_tokens, tokens,
ref_count).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from pagewise.figures.drawing import arrow, box, chart, colour_key, diagram, rectangle, subplots
from pagewise.figures.palette import BLUE, INK, ORANGE, SAND, TEAL

OWNERS = (SAND, TEAL, ORANGE, "#c9b8dc", "#a9b665")  # of the first, second … sequence, unless `owner_colours` are given
Colours = Mapping[Hashable, str]  # sequence → its colour
Slot = tuple[str, Hashable | None]  # a slot's state and owner
SHARED, NOBODY = BLUE, "#ffffff"
WIDTH = 6.6  # inches, at most: text of 9 points must be readable on a phone
EMPTY = "////"  # the hatch of a slot that belongs to a sequence but holds no token


def owner_colours(*sequences: Hashable) -> dict[Hashable, str]:
    """Return a colour for each sequence. Pass the result as `colours` to all figures of a lesson."""
    return {name: OWNERS[i % len(OWNERS)] for i, name in enumerate(sequences)}


def colours_of(names: Iterable[Hashable], chosen: Colours | None) -> dict[Hashable, str]:
    """Return the chosen colours, and a colour for each other name in the order of appearance."""
    return owner_colours(*dict.fromkeys(names)) | dict(chosen or {})


class Snapshot(NamedTuple):
    """The state of a manager at one moment, and the content of every slot of the pool as text."""

    block_size: int
    tables: dict[Hashable, list[int]]
    lengths: dict[Hashable, int]
    ref_counts: list[int]
    contents: list[str]  # N · P

    def left(self, block: int) -> float:
        """Return the x of the left side of a block of the pool."""
        return block * (self.block_size + 0.8)

    def middle(self, block: int) -> float:
        """Return the x of the middle of a block of the pool."""
        return self.left(block) + self.block_size / 2

    @property
    def width(self) -> float:
        """The length of the pool on the x axis."""
        return self.left(len(self.ref_counts))

    def owners(self, slot: int) -> list[Hashable]:
        """Return the sequences that have a token in this slot."""
        P, found = self.block_size, []
        for name, table in self.tables.items():
            if slot // P in table and table.index(slot // P) * P + slot % P < self.lengths[name]:
                found.append(name)
        return found


def snapshot(manager: Any, contents: Sequence[str] | None = None) -> Snapshot:
    """Return the state of `manager` now. `contents` is the text of every slot, by default its token."""
    ids, P = manager.sequences, manager.block_size
    if contents is None:
        contents = [""] * (manager.num_blocks * P)
        for i in ids:
            for token, slot in zip(manager.tokens(i), manager.slots(i, 0, manager.num_tokens(i)), strict=True):
                contents[slot] = str(token)
    tables, lengths = {i: manager.block_table(i) for i in ids}, {i: manager.num_tokens(i) for i in ids}
    return Snapshot(P, tables, lengths, [manager.ref_count(b) for b in range(manager.num_blocks)], list(contents))


def tables_and_pool(
    panels: Mapping[str, Snapshot],
    *,
    title: str,
    colours: Colours | None = None,
    copies: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    alt: str = "",
) -> None:
    """Draw a panel per moment: block tables above, the pool below, and an arrow from each entry to its block.

    A slot has the colour of its owner. It is dark if several sequences share it, hatched if its owner has no token in
    it, and white if it has no owner. `colours` are those of `owner_colours`, by default in the order of appearance.
    `copies` are the copied blocks (src, dst) of a panel.
    """
    copies = copies or {}
    heights = [3.3 if copies.get(name) else 2.6 for name in panels]  # a copy is drawn under the pool
    size = (min(WIDTH, 0.42 * next(iter(panels.values())).width + 1.6), sum(heights) + 0.5)
    colours = colours_of((name for shot in panels.values() for name in shot.tables), colours)
    with subplots(len(panels), size=size, title=title, alt=alt, height_ratios=heights) as (_, axes):
        for ax, (name, shot) in zip(axes, panels.items(), strict=True):
            draw_tables_and_pool(ax, shot, colours)
            draw_copies(ax, shot, copies.get(name, ()))
            ax.set_title(name)


def draw_tables_and_pool(
    ax: Axes, shot: Snapshot, colours: Colours, *, table_name: str = "block table of {} ({} tokens)"
) -> None:
    """Draw one panel of `tables_and_pool`."""
    _draw_pool(ax, shot, colours)
    entries = sum(len(table) + 1.2 for table in shot.tables.values())
    x, step = 0.0, max(1.2, shot.width / max(entries, 1))
    for owner, table in shot.tables.items():
        ax.text(x, 4.0, table_name.format(owner, shot.lengths[owner]), fontsize=9)
        for i, block in enumerate(table):
            left = x + i * 1.5
            box(ax, left, 2.9, 1.3, 0.9, str(block), fill=colours[owner])
            arrow(ax, (left + 0.65, 2.9), (shot.middle(block), 1.02), lw=0.9)
        x += (len(table) + 1.2) * step
    diagram(ax, (-0.3, shot.width), (-1.6, 4.7))


def draw_copies(ax: Axes, shot: Snapshot, copies: Sequence[tuple[int, int]]) -> None:
    """Draw an arrow under the pool for each copied block (src, dst)."""
    for src, dst in copies:
        start, end = shot.middle(src), shot.middle(dst)
        bend = f"arc3,rad={0.3 if src < dst else -0.3}"
        arrow(ax, (start, -1.7), (end, -1.7), color=ORANGE, lw=2.5, gap=2, connectionstyle=bend)
        ax.text((start + end) / 2, -3.1, "copy", ha="center", color=ORANGE, fontweight="bold")
    if copies:
        ax.set_ylim(bottom=-3.3)


def query_over_blocks(
    shot: Snapshot,
    owner: Hashable,
    weights: Sequence[float],
    *,
    title: str,
    colours: Colours | None = None,
    alt: str = "",
) -> None:
    """Draw a sequence's query above the pool, with an arrow to each of its blocks in the order of its table.

    A label names the entry of the table and its tokens. `weights` are the weights of the tokens, drawn as bars over
    the slots.
    """
    colours, P, middle = colours_of(shot.tables, colours), shot.block_size, shot.width / 2
    with chart(min(WIDTH, 0.42 * shot.width + 1.6), 3.4, title, alt) as ax:
        _draw_pool(ax, shot, colours)
        box(ax, middle - 2, 4.3, 4, 0.9, f"query of {owner}", fill=colours[owner])
        for i, block in enumerate(shot.tables[owner]):
            tokens = range(i * P, min((i + 1) * P, shot.lengths[owner]))
            arrow(ax, (middle, 4.3), (shot.middle(block), 3.35), lw=1.2)
            what = f"tokens {tokens[0]}–{tokens[-1]}" if len(tokens) > 1 else f"token {tokens[0]}"
            ax.text(shot.middle(block), 2.85, f"entry {i}: {what}", ha="center", fontsize=9)
            for slot, token in enumerate(tokens):
                height = 1.5 * weights[token] / max(weights)
                rectangle(ax, shot.left(block) + slot + 0.15, 1.1, 0.7, height, INK, ec="none")
        diagram(ax, (-0.3, shot.width), (-1.6, 5.3))


def chains(
    prefixes: Sequence[Any],
    owners: Mapping[int, Sequence[Hashable]],
    text: Mapping[Any, str],
    *,
    title: str,
    colours: Colours | None = None,
    alt: str = "",
) -> None:
    """Draw the tree of cached prefixes. Each has its digest, words and physical block, in the colours of its owners.

    Args:
        prefixes: `Prefix` objects. A parent that is missing among them is drawn as the root.
        owners: block → the sequences that hold this block.
        text: prefix → the words of its block.
        colours: those of `owner_colours`; default: by order of appearance.
    """
    prefixes = list(dict.fromkeys(prefixes))
    numbers = {prefix.number for prefix in prefixes}
    children: dict[int, list[Any]] = {}
    for prefix in prefixes:
        children.setdefault(prefix.parent if prefix.parent in numbers else 0, []).append(prefix)
    places: dict[int, tuple[float, float]] = {}

    def place(parent: int, depth: int, row: float) -> float:
        """Put the children of the prefix with this number in rows from `row` on; return the next free row."""
        for prefix in children.get(parent, []):
            first = row
            row = max(place(prefix.number, depth + 1, row), first + 1)
            places[prefix.number] = (3.0 * depth, (first + row - 1) / 2)
        return row

    place(0, 0, 0.0)
    width = max((x + 3 for x, _ in places.values()), default=3)
    rows = max((y + 1 for _, y in places.values()), default=1)
    colours = colours_of((name for held in owners.values() for name in held), colours)
    with chart(min(9.6, 2.9 * width / 3 + 1.6), 0.85 * rows + 0.8, title, alt) as ax:
        for prefix in prefixes:
            x, y = places[prefix.number]
            parent = places.get(prefix.parent)
            arrow(ax, (parent[0] + 2.3, parent[1]) if parent else (-0.6, (rows - 1) / 2), (x, y), lw=1)
            held = list(dict.fromkeys(name for block in prefix.blocks for name in owners.get(block, ())))
            label = f"{prefix.digest.hex()[:8]}…  block {', '.join(map(str, prefix.blocks))}\n{text[prefix]}"
            box(ax, x, y - 0.36, 2.3, 0.72, label, fill=_fill(held, colours))
        ax.text(-0.65, (rows - 1) / 2, "root", ha="right", va="center", fontsize=9)
        diagram(ax, (-1.2, width), (rows - 0.4, -0.6))
        names = dict.fromkeys(name for held in owners.values() for name in held)
        looks = {f"held by {name}": colours[name] for name in names} | {"free, can be found": NOBODY}
        colour_key(ax, looks, ncols=len(looks), loc="upper left", bbox_to_anchor=(0.0, 0.04))


def memory_map(
    rows: Mapping[str, Sequence[Slot]], *, title: str, colours: Colours | None = None, alt: str = ""
) -> None:
    """Draw the memory of each allocator as a row: the (state, owner) of each token, from `workload.slots_at`.

    A used piece has its owner's colour, and its name if there is space. The other states have the hatches of `stacks`.
    """
    names = {"external": "external (free, in pieces)", "idle": "idle (free)"}
    looks = {
        "used": {"fc": "#8d8da0"},
        "reserved": {"fc": NOBODY, "hatch": "///"},
        "internal": {"fc": NOBODY, "hatch": "..."},
        "external": {"fc": "#d3d3da", "hatch": "xx"},
        "idle": {"fc": NOBODY},
    }
    colours = colours_of((owner for slots in rows.values() for _, owner in slots if owner is not None), colours)
    with chart(WIDTH, 0.5 * len(rows) + 1.7, title, alt) as ax:
        for row, slots in enumerate(rows.values()):
            start = 0
            for (state, owner), piece in groupby(slots):
                size = len(list(piece))
                look = {"fc": colours[owner]} if state == "used" else looks[state]
                rectangle(ax, start, row - 0.36, size, 0.72, lw=0.6, **look)
                if state == "used" and 40 * size > len(slots):  # a name is wider than a smaller piece
                    ax.text(start + size / 2, row, str(owner), ha="center", va="center", fontsize=9, fontweight="bold")
                start += size
        patches = {names.get(state, state): {"lw": 0.6, **look} for state, look in looks.items()}
        where = {"loc": "lower left", "bbox_to_anchor": (-0.01, 0.98)}  # between the title and the axes
        colour_key(ax, patches, ncols=3, fontsize=9, columnspacing=1.2, **where)
        ax.set(xlim=(-0.5, max(map(len, rows.values())) + 0.5), ylim=(len(rows) - 0.5, -0.5))
        ax.set_yticks(range(len(rows)), list(rows))
        ax.set_title(title, pad=42)
        ax.set_xlabel("memory (tokens)")


def _draw_pool(ax: Axes, shot: Snapshot, colours: Colours) -> None:
    for slot, text in enumerate(shot.contents):
        block, offset = divmod(slot, shot.block_size)
        owners = shot.owners(slot)
        hatch = EMPTY if shot.ref_counts[block] and not owners else None
        box(ax, shot.left(block) + offset, 0, 1, 1, text, fill=_fill(owners, colours), hatch=hatch)
    for block, count in enumerate(shot.ref_counts):
        held = f"in {count} table{'s' if count > 1 else ''}" if count else "free"
        ax.text(shot.middle(block), -0.2, f"block {block}\n{held}", ha="center", va="top", fontsize=9)


def _fill(owners: Sequence[Hashable], colours: Colours) -> str:
    return NOBODY if not owners else SHARED if len(owners) > 1 else colours[owners[0]]
