"""The repository's address on GitHub: `python src/repository/address.py OWNER/NAME` writes another one everywhere.

The address is the line `Repository` in pyproject.toml. The README, the citation and the forms for issues repeat the
address, because GitHub shows them as they are. A fork changes all of them with this one command.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The files that repeat the address. pyproject.toml, the first one, says which address is right.
FILES = ("pyproject.toml", "README.md", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")
# The pages that belong to a repository: its own, its book, and the two places where a reader can run it.
PAGES = (
    "https://github.com/{owner}/{name}",
    "https://{owner}.github.io/{name}",
    "https://colab.research.google.com/github/{owner}/{name}",
    "https://codespaces.new/{owner}/{name}",
)
_PART = r"[A-Za-z0-9][\w.-]*"


def repository() -> str:
    """Return "OWNER/NAME" as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"]["Repository"].removeprefix("https://github.com/")


def named_in(text: str) -> set[str]:
    """Return each "OWNER/NAME" that an address in `text` names."""
    named = set()
    for page in PAGES:
        pattern = re.escape(page).replace(r"\{", "{").replace(r"\}", "}")
        pattern = pattern.format(owner=f"(?P<owner>{_PART})", name=f"(?P<name>{_PART})")
        named |= {f"{found['owner']}/{found['name']}" for found in re.finditer(pattern, text)}
    return named


def readdressed(text: str, old: str, new: str) -> str:
    """Return `text` with the pages of the repository `new` in place of those of `old`, both "OWNER/NAME"."""
    (old_owner, old_name), (owner, name) = old.split("/"), new.split("/")
    for page in PAGES:
        before = re.escape(page.format(owner=old_owner, name=old_name))
        text = re.sub(rf"{before}(?![\w-])", page.format(owner=owner, name=name), text)
    return text


def main() -> None:
    """Run the command line. Without an argument, print the address."""
    if len(sys.argv) == 1:
        print(repository())
        return
    if len(sys.argv) != 2 or not re.fullmatch(rf"{_PART}/{_PART}", sys.argv[1]):
        sys.exit("usage: python src/repository/address.py [OWNER/NAME]")
    old = repository()
    for path in map(ROOT.joinpath, FILES):
        path.write_text(readdressed(path.read_text(encoding="utf-8"), old, sys.argv[1]), encoding="utf-8")
    print(f"{old} became {sys.argv[1]} in {', '.join(FILES)}")


if __name__ == "__main__":
    main()
