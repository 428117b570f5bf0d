"""A calculator of attention in a decode step: what limits the step, and how many splits are enough (lesson 7).

The page computes the same as `experiments.decode_model.decode_times`, and has the form of `calculators`.
"""

import html
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from pagewise.figures.calculators import (
    BOTTOM,
    HEIGHT,
    LEFT,
    POWERS,
    RIGHT,
    TOP,
    WIDTH,
    Choice,
    Result,
    Slider,
    _calculator,
    _start,
)
from pagewise.figures.palette import INK, ORANGE, PALETTE
from pagewise.figures.steps import Embedded, tag
from pagewise.tools.roofline import GPUS

DECODE_SECONDS = (1e-6, 1e-2)  # of a decode step, the range of the drawing
SPLITS = (1, 2, 3, 4, 6, 8, 10, 13, 16, 24, 32, 48, 54, 64, 96, 128)
DECODE_TILES = {
    "128 rows, one query head": {"rows": 128, "packed": 0},
    "16 rows, one query head": {"rows": 16, "packed": 0},
    "16 rows, all heads of a KV head": {"rows": 16, "packed": 1},
}


def decode_calculator(model: ModuleType) -> Embedded:
    """Return a calculator of attention in a decode step: padded products, bytes and launches over the splits.

    It starts with the last row of Flash-Decoding's announcement that reads 67 MB, as FlashAttention-2 computes it.

    Args:
        model: `experiments.decode_model`, with its function `decode_times` and its constants. Tests compare the page
            with it.
    """
    names = ("peak_flops", "bandwidth", "num_sms")
    cards = {gpu.name: {name: getattr(gpu, name) for name in names} for gpu in GPUS}
    constants = {name.lower(): getattr(model, name) for name in ("IN_FLIGHT", "LATENCY", "LAUNCH", "SHARE")}
    constants["D"] = model.D
    tiles = {name: tile | constants for name, tile in DECODE_TILES.items()}
    inputs = [
        Slider("B", "sequences", POWERS[:9], 1),
        Slider("S", "keys of each", POWERS[7:], 2**16),
        Slider("Hkv", "KV heads", POWERS[:6], 2),
        Slider("group", "query heads for each", POWERS[:4], 8),
        Choice("tile", "tile of queries", tiles, next(iter(tiles))),
        Slider("splits", "splits of the keys", SPLITS, 1),
        Choice("gpu", "card", cards, GPUS[0].name),
    ]

    v, gpu = _start(inputs), GPUS[0]

    def times(splits: int) -> Any:
        shape = v["B"], v["Hkv"] * v["group"], v["Hkv"], v["S"]
        return model.decode_times(*shape, gpu, splits=splits, rows=v["rows"], packed=bool(v["packed"]))

    now, programs = times(v["splits"]), v["B"] * v["Hkv"] * v["group"] * v["splits"]
    results = [
        Result("programs", "programs", programs),
        Result("waves", "waves", math.ceil(programs / gpu.num_sms)),
        Result("products", "products, padding included", now.products, "s"),
        Result("reading", "reading keys and values", now.reading, "s"),
        Result("merging", "moving partial results", now.merging, "s"),
        Result("launches", "launches", now.launches, "s"),
        Result("total", "the step", now.total, "s"),
        Result("limit", "limited by", "products" if now.products > now.reading else "reading"),
    ]
    drawing = _decode_svg({s: times(s) for s in SPLITS}, v["splits"])
    return _calculator("decode_step.js", inputs, results, "Move the splits: what limits a decode step?", drawing)


def _decode_svg(times: Mapping[int, Any], splits: int) -> str:
    """Return a drawing of a decode step's time and its terms over the number of splits, with a point at `splits`."""
    low, high, (fast, slow) = SPLITS[0], SPLITS[-1], DECODE_SECONDS

    def place(s: float, seconds: float) -> tuple[float, float]:
        x, y = (math.log(a / b) / math.log(c / b) for a, b, c in ((s, low, high), (seconds, fast, slow)))
        return LEFT + (RIGHT - LEFT) * x, BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, y))

    def text(x: float, y: float, words: str, **attributes: object) -> str:
        return tag("text", html.escape(words), x=f"{x:.1f}", y=f"{y:.1f}", fill=INK, font_size=12, **attributes)

    def line(points: Sequence[tuple[float, float]], **attributes: object) -> str:
        return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", **attributes)

    drawn = []
    for microseconds in (1, 10, 100, 1000):
        ends = [place(s, 1e-6 * microseconds) for s in (low, high)]
        drawn += [line(ends, stroke="#d9d9e3"), text(LEFT - 4, ends[0][1] + 4, f"{microseconds:,}", text_anchor="end")]
    for s in (1, 2, 4, 8, 16, 32, 64, 128):
        drawn.append(text(place(s, fast)[0], BOTTOM + 16, f"{s}", text_anchor="middle"))
    looks = (("total", 0, None), ("products", 1, "6 3"), ("reading", 2, "2 3"))  # the wide line is below the others
    for i, (term, colour, dashes) in enumerate(looks):
        look = {"stroke": PALETTE[colour], "stroke_width": 4 if term == "total" else 2, "stroke_dasharray": dashes}
        drawn.append(line([place(s, getattr(each, term)) for s, each in times.items()], **look, data_term=term))
        y = TOP + 14 + 18 * i
        drawn += [
            line([(RIGHT - 130, y - 4), (RIGHT - 100, y - 4)], **look),
            text(RIGHT - 94, y, {"total": "the step"}.get(term, term)),
        ]
    drawn.append(text((LEFT + RIGHT) / 2, HEIGHT - 6, "splits of the keys", text_anchor="middle"))
    drawn.append(text(LEFT + 6, BOTTOM - 6, "µs (model)", text_anchor="start"))
    x, y = place(splits, times[splits].total)
    drawn.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=7, fill=ORANGE, stroke=INK, stroke_width=1.5))
    label = "The time of a decode step over the number of splits, on logarithmic axes: the products, the reading, and "
    label += "the step, which is the longer of the two with merge and launches. A dot marks the chosen number."
    axes = " ".join(f"{n:g}" for n in (low, high, fast, slow, LEFT, RIGHT, BOTTOM, TOP))
    return tag("svg", "\n".join(drawn), viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label, data_axes=axes)
