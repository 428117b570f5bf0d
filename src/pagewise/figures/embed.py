"""Pieces of a page that carry everything with them: markup, style and script, no network, no kernel.

They show themselves in Jupyter and are stored in the notebook as text/html, from where the book takes them.
"""

import html
import re
from importlib.resources import files

SLOT = re.compile(r"\{\{(\w+)\}\}")


class Embedded:
    """HTML that a notebook shows, and the sentence that stands for it where HTML is not shown."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def fill(template: str, **slots: str) -> str:
    """The text of a file beside this module, each {{slot}} replaced. KeyError if a slot is not given."""
    text = files(__package__).joinpath(template).read_text(encoding="utf-8")
    return SLOT.sub(lambda match: slots[match[1]], text)


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """One element, its attributes escaped: `data_x` becomes data-x, `class_` class; True has no value, None is none."""
    written = ""
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            written += f" {key}"
        elif value is not None and value is not False:
            written += f' {key}="{html.escape(str(value))}"'
    return f"<{name}{written}>" if name in ("img", "input") else f"<{name}{written}>{content}</{name}>"
