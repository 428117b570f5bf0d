"""A table in a notebook: rows of numbers under column titles, rounded to what a reader compares."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of text under column titles. A notebook shows the table as Markdown, a terminal as aligned text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]

    def _repr_markdown_(self) -> str:
        rule = ["---:" if number else "---" for number in self.numeric]
        lines = (self.columns, rule, *self.rows)
        return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)

    def __repr__(self) -> str:
        lines = (self.columns, *self.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (
            (
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(line, widths, self.numeric, strict=True)
            )
            for line in lines
        )
        return "\n".join("  ".join(line).rstrip() for line in padded)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table that shows itself as the last expression of a cell.

        table(["tokens", "without a cache, ms", "with, ms", "ratio"], [(64, 8.41, 8.37, 1.005), …])

    `columns` are the titles, with units. Integers get a comma at each thousand, other numbers three significant
    digits, None an empty field, and every other value its str. ValueError if a row has more or fewer values than
    there are columns.
    """
    rows = [tuple(row) for row in rows]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"this row has {len(row)} values for {len(columns)} columns: {row}")
    numeric = tuple(all(_is_number(v) or v is None for v in column) for column in zip(*rows, strict=True))
    shown = tuple(tuple(map(_shown, row)) for row in rows)
    return Table(tuple(columns), shown, numeric or (False,) * len(columns))


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)


def _shown(value: object) -> str:
    if value is None:
        return ""
    if not _is_number(value):
        return str(value)
    if hasattr(value, "item"):  # a number of torch or NumPy
        value = value.item()
    if isinstance(value, int):
        return f"{value:,}"
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{rounded:,.0f}"
    return f"{value:.3g}" if 0 < abs(rounded) < 1e-4 else f"{value:#.3g}"
