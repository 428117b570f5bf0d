"""The exercises that a reader has solved: in this session, and in a list on disk.

`make lab` makes the folder of a reader's lessons, with the list `progress.md`: one line per exercise. A kernel that
works in this folder ticks the lines, and they stay ticked after a restart. In any other folder nothing is written.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE, HEADING = "progress.md", "# Your progress"
_TICKED = re.compile(r"^- \[x\] (\w+)$", re.MULTILINE)
_session: set[str] = set()


def keep(name: str) -> None:
    """Note that an exercise is solved, in this session and in the list of this folder, if there is one."""
    _session.add(name)
    if (text := _list()) is not None:
        ticks = text.replace(f"- [ ] {name}\n", f"- [x] {name}\n")
        Path(FILE).write_text(_with_lessons_ticked(ticks), encoding="utf-8")


def solved() -> set[str]:
    """Return the names of the exercises that are solved, in this session or by the list of this folder."""
    return _session | ticked(_list() or "")


def is_kept() -> bool:
    """Return whether this folder has a list."""
    return _list() is not None


def ticked(text: str) -> set[str]:
    """Return the names of the exercises that are ticked in the text of a list."""
    return set(_TICKED.findall(text))


def listed(lessons: Mapping[str, Iterable[str]], done: set[str]) -> str:
    """Return the text of a list: title of each lesson → names of its exercises, of which those in `done` are ticked."""
    lines = [HEADING, "", "`check.progress()` in a lesson shows this list, and a right answer ticks its line."]
    for title, names in lessons.items():
        lines += ["", f"## {title}", "", *(f"- [{'x' if name in done else ' '}] {name}" for name in names)]
    return _with_lessons_ticked("\n".join(lines) + "\n")


def _with_lessons_ticked(text: str) -> str:
    """Return the text of a list with a tick in the heading of each lesson that has no open exercise."""
    heading, *lessons = text.split("\n## ")
    ticked_lessons = [each if "- [ ]" in each or each.startswith("✓ ") else f"✓ {each}" for each in lessons]
    return "\n## ".join([heading, *ticked_lessons])


def _list() -> str | None:
    """Return the text of the list in the folder in which the kernel works, or None."""
    try:
        text = Path(FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.startswith(HEADING) else None
