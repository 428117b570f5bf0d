"""The table of claims at the end of each lesson: what the sources say, and what the lesson found.

claims(("O_i depends on Q_i only", "KV", f"other queries replaced: {changed} rows changed", "true"), …)
"""

from typing import NamedTuple

COLUMNS = ("claim", "source", "found here", "verdict")
SOURCES = {
    "KV": "“Why Attention's O_i only depends on Q_i”: notes on the KV cache, paged attention and vLLM's kernel",
    "VD": "“vLLM官方文档Paged Attention解读”, zhuanlan.zhihu.com/p/712664813: a reading of vLLM's page on its kernel",
    "SL": "Chenye Wang, “vLLM -- KV cache”, slides, 2024",
    "RL": "“从零实现 LLM Inference: 019. Paged Attention”",
    "HW": "“LLM(五)——Hardware Optimization Attention”, mztchaoqun.com.cn, 2024",
    "FD": "Hong et al., “FlashDecoding++”, 2023",
    "FA": "Dao et al., “FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness”, 2022",
    "F2": "Dao, “FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning”, 2023",
    "DC": "Dao, Haziza, Massa and Sizov, “Flash-Decoding for long-context inference”, 2023",
}
"""The texts that the course tests, by the short names it calls them; lessons/bibliography.md has them all."""


class Claims(NamedTuple):
    """A table that shows itself in a notebook, folded; `rows` are (claim, source, found, verdict)."""

    rows: tuple[tuple[str, str, str, str], ...]

    def _repr_markdown_(self) -> str:
        named = {short for row in self.rows for short in row[1].split(", ")}
        sources = "; ".join(f"**[{short}]** {full}" for short, full in SOURCES.items() if short in named)
        lines = [_line(COLUMNS), _line(("---",) * len(COLUMNS)), *map(_line, self.rows)]
        title = f"The claims, and what was found: {len(self.rows)} of them"
        return f"<details><summary>{title}</summary>\n\nSources: {sources}.\n\n" + "\n".join(lines) + "\n\n</details>"

    def __repr__(self) -> str:
        return "\n".join(" · ".join(row) for row in self.rows)


def claims(*rows: tuple[str, str, str, str]) -> Claims:
    """The table of a lesson's claims; a source is a short name of `SOURCES`, or several: "KV, HW".

    Raises:
        ValueError: a row has an empty cell or not four of them, or names an unknown source.
    """
    for row in rows:
        if len(row) != len(COLUMNS) or not all(isinstance(cell, str) and cell.strip() for cell in row):
            raise ValueError(f"a claim must be (claim, source, found, verdict), no cell empty, got {row}")
        if not set(row[1].split(", ")) <= set(SOURCES):
            raise ValueError(f"source must be among {', '.join(SOURCES)}, got {row[1]!r}")
    return Claims(rows)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
