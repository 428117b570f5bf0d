"""The text written in this repository, as the tiny model reads it: paragraphs, one in ten of them held out."""

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from pagewise.models.load import ByteTokenizer


def repository() -> Path:
    """The root of the repository that this file belongs to. ValueError if it was installed without one."""
    root = Path(__file__).resolve().parents[3]
    check_repository(root)
    return root


def check_repository(root: Path) -> None:
    """`root` must hold what the corpus is made of."""
    if absent := [name for name in ("README.md", "lessons", "src/pagewise", "tests") if not (root / name).exists()]:
        raise ValueError(
            f"{root} lacks {', '.join(absent)}: training needs the text of the repository, which a wheel does not "
            f"bring. Clone it and pass --repo, or `pip install -e .` in it"
        )


def documents(root: Path) -> list[list[str]]:
    """The paragraphs of each text of the repository, texts in the order of their paths; each paragraph once."""
    files = [root / "README.md"]
    files += [path for end in ("md", "ipynb") for path in sorted((root / "lessons").glob(f"*.{end}"))]
    files += [
        path
        for folder in ("src", "kernels", "tests")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".py", ".cu", ".h")
    ]
    seen: set[str] = set()
    texts = []
    for path in files:
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", prose(path)):
            if (key := normal(paragraph)) and key not in seen:
                seen.add(key)
                paragraphs.append(paragraph.strip("\n").rstrip())
        if paragraphs:
            texts.append(paragraphs)
    return texts


def prose(path: Path) -> str:
    """What a file says to its reader: markdown as it is; docstrings and comments of code, in order."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    if path.suffix == ".py":
        return "\n\n".join(text for _, text in sorted([*_docstrings(text), *_comments(text)]))
    if path.suffix in (".cu", ".h"):
        blocks = re.findall(r"/\*.*?\*/|(?://[^\n]*(?:\n[ \t]*(?=//))?)+", text, flags=re.DOTALL)
        return "\n\n".join(
            re.sub(r"^[ \t]*(/\*+|\*+/|//+|\*(?=\s)) ?", "", b, flags=re.M).rstrip("*/ ") for b in blocks
        )
    return text


def _docstrings(code: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def _comments(code: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments; those on consecutive lines belong together."""
    first, last, lines = 0, -1, []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        text = token.string.lstrip("# -").rstrip()
        if token.type != tokenize.COMMENT or not text or text.startswith(("fmt:", "noqa", "type:")):
            continue
        if token.start[0] != last + 1 and lines:
            yield first, "\n".join(lines)
            lines = []
        first, last, lines = first if lines else token.start[0], token.start[0], [*lines, text]
    if lines:
        yield first, "\n".join(lines)


def normal(paragraph: str) -> str:
    """What two paragraphs have in common if they differ in case, spaces or line breaks only."""
    return " ".join(paragraph.lower().split())


def split(texts: list[list[str]]) -> tuple[Int[Tensor, " train"], Int[Tensor, " held_out"]]:
    """Token ids of nine paragraphs in ten, and of the tenth; an eos ends each text.

    A paragraph's side is settled by its hash alone: none can stand on both sides, and one added later moves no other.
    """
    sides: list[list[int]] = [[], []]
    for paragraphs in texts:
        for held_out in (False, True):
            chosen = [p for p in paragraphs if is_held_out(p) == held_out]
            if chosen:
                sides[held_out] += [*ByteTokenizer().encode("\n\n".join(chosen)), ByteTokenizer.eos_token_id]
    if not all(sides):
        raise ValueError(f"the corpus has only {sum(map(len, texts))} paragraphs: too few to hold one in ten out")
    return torch.tensor(sides[0]), torch.tensor(sides[1])


def is_held_out(paragraph: str) -> bool:
    """One paragraph in ten, by its hash."""
    return hashlib.sha256(normal(paragraph).encode()).digest()[0] % 10 == 0
