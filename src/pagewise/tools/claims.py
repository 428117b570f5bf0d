"""What the sources of a lesson claim, and what was found: one table, made by one helper, at the end of each lesson.

claims(
    {"KV": "\"Why Attention's O_i only depends on Q_i\", notes on the KV cache"},
    ("O_i depends on Q_i only", "KV", f"other queries replaced: {changed} rows changed", "true"),
)
"""

from collections.abc import Mapping
from typing import NamedTuple

COLUMNS = ("claim", "source", "found here", "verdict")


class Claims(NamedTuple):
    """A table that shows itself in a notebook, folded; `rows` are (claim, source, found, verdict)."""

    sources: Mapping[str, str]
    rows: tuple[tuple[str, str, str, str], ...]

    def _repr_markdown_(self) -> str:
        sources = "; ".join(f"**[{short}]** {full}" for short, full in self.sources.items())
        lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *map(_line, self.rows)]
        title = f"The claims, and what was found: {len(self.rows)} of them"
        return f"<details><summary>{title}</summary>\n\nSources: {sources}.\n\n" + "\n".join(lines) + "\n\n</details>"

    def __repr__(self) -> str:
        return "\n".join(" · ".join(row) for row in self.rows)


def claims(sources: Mapping[str, str], *rows: tuple[str, str, str, str]) -> Claims:
    """The table of a lesson's claims. `sources` says what each short name in the second column stands for.

    Raises:
        ValueError: a row has an empty cell or not four of them, names an unknown source, or a source has no row.
    """
    for row in rows:
        if len(row) != len(COLUMNS) or not all(isinstance(cell, str) and cell.strip() for cell in row):
            raise ValueError(f"a claim must be (claim, source, found, verdict), no cell empty, got {row}")
        if not set(row[1].split(", ")) <= set(sources):
            raise ValueError(f"source must be among {', '.join(sources)}, got {row[1]!r}")
    if unused := set(sources) - {short for row in rows for short in row[1].split(", ")}:
        raise ValueError(f"no claim is from {', '.join(sorted(unused))}")
    return Claims(sources, rows)


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
