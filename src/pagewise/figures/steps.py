"""HTML in a cell's output: a stepper with one picture per step, and the markup that it shares with the calculators.

The output holds markup, style, script and pictures, so that it needs neither a network nor a kernel. Jupyter shows the
output, and the book takes it from the notebook's text/html. GitHub, and Jupyter in a notebook that it does not trust,
remove scripts with their text, styles, and `hidden`. Whatever needs a script is therefore the text of a script element,
and without scripts a stepper is one picture and a sentence.
"""

import base64
import html
import io
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TypeVar

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

import pagewise.figures.palette  # noqa: F401  (the style of all figures)

Frame = TypeVar("Frame")

WIDTH = 4.6  # inches: text of 10 points is still 10 pixels high on a phone with 340 pixels
SHOWN_DPI, DRAWN_DPI = 120, 170
COLOURS = 64  # a drawing needs few colours, and a palette makes a frame ten times smaller
SLOT = re.compile(r"\{\{(\w+)\}\}")


class Embedded:
    """HTML that a notebook shows, and a sentence that replaces it where HTML is not shown."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def fill(template: str, **slots: str) -> str:
    """Return the text of a file beside this module with each {{slot}} replaced. A missing slot raises KeyError."""
    text = files(__package__).joinpath(template).read_text(encoding="utf-8")
    return SLOT.sub(lambda match: slots[match[1]], text)


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """Return an element with escaped attributes. `data_x` becomes data-x, and None and False are left out."""
    written = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            text = "" if value is True else f'="{html.escape(str(value))}"'
            written += f" {key.replace('_', '-')}{text}"
    return f"<{name}{written}>" if name in ("img", "input") else f"<{name}{written}>{content}</{name}>"


def stepper(
    frames: Sequence[tuple[str, Frame]],
    draw: Callable[[Figure, Frame], None],
    *,
    title: str,
    alt: str,
    height: float = 3.4,
    still: int = -1,
) -> Embedded:
    """Return pictures that a reader steps through by button, slider or arrow key.

    Args:
        frames: (caption, argument of `draw`) of each step. A caption says what has just happened.
        draw: draws one step onto an empty figure. Every step should use the same places and limits.
        title: the question that the steps answer.
        alt: a description for readers who do not see the pictures. Each step adds its caption.
        height: the height of a picture in inches. All pictures have the same width and the same size of text.
        still: the number of the step that is shown without scripts.

    Raises:
        ValueError: there is not a single frame.
    """
    if not frames:
        raise ValueError("frames must hold at least one (caption, frame), got none")
    still %= len(frames)
    pictures = []
    for i, (caption, frame) in enumerate(frames):
        figure = Figure(figsize=(WIDTH, height), dpi=DRAWN_DPI, layout="constrained")
        draw(figure, frame)
        source = f"data:image/png;base64,{base64.b64encode(_png(figure)).decode()}"
        size = {"width": round(WIDTH * SHOWN_DPI), "height": round(height * SHOWN_DPI)}
        words = f"{alt} Step {i + 1} of {len(frames)}: {caption}"
        if i == still:
            picture, source = tag("img", src=source, **size, alt=words), None
        pictures.append(tag("img", src=source, **size, alt=words, data_caption=caption, hidden=True))
    markup = fill(
        "stepper.html",
        title=html.escape(title),
        caption=html.escape(frames[still][0]),
        picture=picture,
        number=str(still + 1),
        count=str(len(frames)),
        pictures="\n".join(pictures),
        last=str(len(frames) - 1),
    )
    return Embedded(markup, f"{title} {len(frames)} steps. {alt}")


def _png(figure: Figure) -> bytes:
    """Return the figure as a PNG with a palette. The same drawing gives the same bytes."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
    image = Image.fromarray(pixels).quantize(COLOURS, dither=Image.Dither.NONE)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
