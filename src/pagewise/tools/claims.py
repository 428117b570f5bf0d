"""The claims of the sources: the table at the end of each notebook, and the ledger of the whole course.

    claims(("O_i depends on Q_i only", "KV", f"{changed} rows changed", "true", "Row i"), …)
    python -m pagewise.tools.claims lessons        # writes lessons/claims.md from the tables of all notebooks

A row names the section whose cells test the claim. The ledger links to it.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("claim", "source", "found here", "verdict", "section")
VERDICTS = ("true", "partly true", "false", "a slip", "a choice", "open", "not shown")
"""A verdict begins with one of these. An explanation may follow: "true: up to rounding". "open" needs a GPU, and
"not shown" gives the reason."""
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
    "RA": "Liu, Zaharia and Abbeel, “Ring Attention with Blockwise Transformers for Near-Infinite Context”, 2023",
    "UL": "Jacobs et al., “DeepSpeed Ulysses: System Optimizations for Enabling Training of "
    "Extreme Long Sequence Transformer Models”, 2023",
    "SA": "Brandon et al., “Striped Attention: Faster Ring Attention for Causal Transformers”, 2023",
    "ML": "Shoeybi et al., “Megatron-LM: Training Multi-Billion Parameter "
    "Language Models Using Model Parallelism”, 2019",
    "L3": "Llama Team, “The Llama 3 Herd of Models”, 2024",
    "CP": "Yang et al., “Context Parallelism for Scalable Million-Token Inference”, 2024",
}
"""The texts that the course tests, by the short names it calls them; lessons/bibliography.md has them all."""


class Claims(NamedTuple):
    """A table that shows itself in a notebook, folded; `rows` are (claim, source, found, verdict, section)."""

    rows: tuple[tuple[str, ...], ...]

    def _repr_markdown_(self) -> str:
        named = {short for row in self.rows for short in row[1].split(", ")}
        sources = "; ".join(f"**[{short}]** {full}" for short, full in SOURCES.items() if short in named)
        lines = [_line(COLUMNS), _line(("---",) * len(COLUMNS)), *map(_line, self.rows)]
        title = f"The claims, and what was found: {len(self.rows)} of them"
        return f"<details><summary>{title}</summary>\n\nSources: {sources}.\n\n" + "\n".join(lines) + "\n\n</details>"

    def __repr__(self) -> str:
        return "\n".join(" · ".join(row) for row in self.rows)


def claims(*rows: tuple[str, ...]) -> Claims:
    """Return the table of a notebook's claims.

    Args:
        rows: (claim, source, found, verdict, section). A source is a short name of `SOURCES`, or several: "KV, HW".
            A verdict begins with one of `VERDICTS`. The section is a heading of the notebook.

    Raises:
        ValueError: a row has an empty cell or not five cells, or names an unknown source or verdict.
    """
    for row in rows:
        if len(row) != len(COLUMNS) or not all(isinstance(cell, str) and cell.strip() for cell in row):
            raise ValueError(f"a claim must be {COLUMNS}, no cell empty, got {row}")
        if not set(row[1].split(", ")) <= set(SOURCES):
            raise ValueError(f"source must be among {', '.join(SOURCES)}, got {row[1]!r}")
        if not row[3].startswith(VERDICTS):
            raise ValueError(f"verdict must begin with one of {', '.join(VERDICTS)}, got {row[3]!r}")
    return Claims(rows)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def stored(notebook: Path) -> list[list[str]]:
    """Return the rows of the claims table that a notebook shows, each a list of cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = ["".join(out.get("data", {}).get("text/markdown", "")) for cell in cells for out in cell.get("outputs", [])]
    tables = [text for text in shown if text.startswith("<details><summary>The claims")]
    lines = [line for text in tables for line in text.splitlines() if line.startswith("| ")]
    rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines]
    return [row for row in rows if row[0] not in (COLUMNS[0], "---")]


def slug(heading: str) -> str:
    """Return the anchor that the book gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def ledger(folder: Path) -> str:
    """Return the page with every claim of all notebooks, its verdict, and a link to the section that tests it."""
    tables = {path: rows for path in sorted(folder.glob("*.ipynb")) if (rows := stored(path))}
    every = [row for rows in tables.values() for row in rows]
    verdicts = Counter(_kind(row[3]) for row in every)
    by_source = Counter((source, _kind(row[3])) for row in every for source in row[1].split(", "))
    used = [verdict for verdict in VERDICTS if verdicts[verdict]]
    lines = [
        "# The ledger of claims",
        "",
        f"The lessons test {len(every)} claims of their sources. Each notebook ends with its own table. This page is",
        "generated from these tables.",
        "",
        _line(("source", *used, "all")),
        _line(("---",) * (len(used) + 2)),
    ]
    for source in SOURCES:
        counts = [by_source[source, verdict] for verdict in used]
        if sum(counts):
            lines.append(_line((f"[{source}](bibliography.md)", *map(str, counts), str(sum(counts)))))
    total = [str(verdicts[verdict]) for verdict in used]
    lines += [_line(("all claims", *total, str(len(every)))), "", "A claim of two sources counts for both."]
    slips = [(path.name, row) for path, rows in tables.items() for row in rows if _kind(row[3]) == "a slip"]
    lines += ["", "## The slips", ""]
    lines += [f"- [{claim}]({name}#{slug(section)}) [{source}]" for name, (claim, source, _, _, section) in slips]
    for path, rows in tables.items():
        lines += ["", f"## {_title(path)}", "", _line(COLUMNS[:-1]), _line(("---",) * 4)]
        lines += [_line_with_link(path.name, *row) for row in rows]
    return "\n".join(lines) + "\n"


def _line_with_link(name: str, claim: str, source: str, found: str, verdict: str, section: str) -> str:
    return "| " + " | ".join((claim, source, found, f"[{verdict}]({name}#{slug(section)})")) + " |"


def _kind(verdict: str) -> str:
    return next(kind for kind in VERDICTS if verdict.startswith(kind))


def _title(notebook: Path) -> str:
    """Return the notebook's first heading."""
    first = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"]
    return "".join(first).splitlines()[0].removeprefix("# ")


if __name__ == "__main__":
    (Path(sys.argv[1]) / "claims.md").write_text(ledger(Path(sys.argv[1])), encoding="utf-8")
