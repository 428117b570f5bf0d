"""The claims of the sources, each with a verdict: `python src/repository/claims.py FOLDER` writes FOLDER/claims.md.

The notebooks hold the claims, most of them lessons/sources.ipynb. A claim is one of two things:

- a row of a table with the columns COLUMNS, in the stored output of a code cell; "see also" may be empty;
- a quotation in the text, `> **[KV]** The claim.`, and after it, in the same section, `**Verdict: false.** The reason.`

The ledger lists all of them with their verdicts, and links each verdict to the cells that test the claim.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("claim", "source", "found here", "verdict", "see also")
VERDICTS = ("true", "partly true", "false", "a slip", "a choice", "open", "not shown")
"""A verdict begins with one of these. An explanation may follow: "true: up to rounding". "open" needs a GPU, a model or
a rival that we did not have, and "not shown" gives the reason."""
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

QUOTATION = re.compile(r"^> \*\*\[([^\]]+)\]\*\* (.+)$")
VERDICT = re.compile(r"^\*\*Verdict: ([^*]+?)\.?\*\*(.*)$")
LINK = re.compile(r"\]\(((?:\w+\.(?:ipynb|md))?)(#[^)\s]*)?\)")


class Claim(NamedTuple):
    """A claim of one source or several, what was found, the verdict, a link to more, and the section that tests it."""

    claim: str
    sources: tuple[str, ...]
    found: str
    verdict: str
    more: str
    address: str

    @property
    def kind(self) -> str:
        """The one of VERDICTS with which the verdict begins."""
        return next(kind for kind in VERDICTS if self.verdict.startswith(kind))


def claims_of(notebook: Path) -> list[Claim]:
    """Return the claims of a notebook, in its order.

    Raises:
        ValueError: a row has an empty cell, or a claim names an unknown source or verdict, or a quotation has no
            verdict, or a verdict has no quotation.
    """
    found: list[Claim] = []
    section, quoted = "", None
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            found += [_of_row(notebook, section, row) for row in _rows(cell)]
            continue
        for paragraph in _paragraphs("".join(cell["source"])):
            if heading := re.match(r"#+ (.*)", paragraph):
                if quoted:
                    raise ValueError(f"{notebook.name}: the section {section!r} has no verdict for {quoted[2]!r}")
                section = heading[1]
            elif quotation := QUOTATION.match(paragraph):
                quoted = quotation
            elif verdict := VERDICT.match(paragraph):
                if quoted is None:
                    raise ValueError(f"{notebook.name}: the section {section!r} has a verdict and no quotation")
                reason = re.split(r"(?<=[.!?]) ", verdict[2].strip())[0]
                row = (quoted[2].rstrip("."), quoted[1], reason.rstrip("."), verdict[1], "")
                found.append(_of_row(notebook, section, row))
                quoted = None
    if quoted:
        raise ValueError(f"{notebook.name}: the section {section!r} has no verdict for {quoted[2]!r}")
    return found


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a cell of text, each as one line. A heading is a paragraph of its own."""
    for part in re.sub(r"^(#.*)$", r"\n\1\n", _without_code(text), flags=re.MULTILINE).split("\n\n"):
        if lines := part.strip().splitlines():
            yield " ".join([lines[0], *(line.removeprefix("> ") for line in lines[1:])])


def _rows(cell: dict) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the tables of claims that a code cell shows."""
    for output in cell["outputs"]:
        lines = "".join(output.get("data", {}).get("text/markdown", "")).splitlines()
        if lines and lines[0] == _line(COLUMNS):
            for line in lines[2:]:
                yield tuple(text.strip() for text in re.split(r"(?<!\\)\|", line.strip()[1:-1]))


def _of_row(notebook: Path, section: str, row: tuple[str, ...]) -> Claim:
    claim, sources, found, verdict, more = row
    if not all((claim, found)):
        raise ValueError(f"{notebook.name}: a claim must have {COLUMNS[:4]}, none of them empty, got {row}")
    names = tuple(sources.split(", "))
    if not set(names) <= set(SOURCES):
        raise ValueError(f"{notebook.name}: a source must be among {', '.join(SOURCES)}, got {sources!r}: {claim}")
    if not verdict.startswith(VERDICTS):
        raise ValueError(
            f"{notebook.name}: a verdict must begin with one of {', '.join(VERDICTS)}, got {verdict!r}: {claim}"
        )
    return Claim(claim, names, found, verdict, more, f"{notebook.name}#{slug(section)}")


def slug(heading: str) -> str:
    """Return the anchor that the book gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    """Return a sentence for each link of a page to a file or to a heading that does not exist.

    The page is a notebook or a Markdown file, and the targets are pages of its folder.
    """
    problems = []
    for name, anchor in dict.fromkeys(LINK.findall(_text(page))):
        target = page.parent / name if name else page
        if not target.is_file():
            problems.append(f"{page.name} links to {name}, which does not exist")
        elif anchor and anchor[1:] not in (anchors := [slug(heading) for heading in _headings(target)]):
            problems.append(
                f"{page.name} links to {target.name}{anchor}, but {target.name} has no such heading. Link to the page "
                f"alone, or to one of its headings: {', '.join(anchors)}"
            )
    return problems


def _text(page: Path) -> str:
    """Return the text of a page: of a notebook, its cells of text and its outputs in Markdown."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    shown = ["".join(out.get("data", {}).get("text/markdown", "")) for cell in cells for out in cell.get("outputs", [])]
    return "\n".join(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"] + shown)


def _headings(page: Path) -> list[str]:
    return re.findall(r"^#{1,3} (.*)$", _without_code(_text(page)), re.MULTILINE)


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def ledger(folder: Path) -> str:
    """Return the page with every claim of all notebooks, its verdict, and a link to the cells that test it."""
    notebooks = {path: found for path in sorted(folder.glob("*.ipynb")) if (found := claims_of(path))}
    every = [claim for found in notebooks.values() for claim in found]
    verdicts = Counter(claim.kind for claim in every)
    by_source = Counter((source, claim.kind) for claim in every for source in claim.sources)
    used = [verdict for verdict in VERDICTS if verdicts[verdict]]
    lines = [
        "# The ledger of claims",
        "",
        f"The course tests {len(every)} claims of its sources. This page is generated from the notebooks that test",
        "them, and each verdict links to its test.",
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
    slips = [claim for claim in every if claim.kind == "a slip"]
    lines += ["", "## The slips", ""]
    lines += [f"- [{slip.claim}]({slip.address}) [{', '.join(slip.sources)}]" for slip in slips]
    for path, found in notebooks.items():
        lines += ["", f"## {_headings(path)[0]}", "", _line(COLUMNS), _line(("---",) * len(COLUMNS))]
        lines += [
            _line((each.claim, ", ".join(each.sources), each.found, f"[{each.verdict}]({each.address})", each.more))
            for each in found
        ]
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    """Return a line of a table. The cells come from tables of Markdown, in which a | is escaped."""
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    (Path(sys.argv[1]) / "claims.md").write_text(ledger(Path(sys.argv[1])), encoding="utf-8")
