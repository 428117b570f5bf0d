"""The roofs of several GPUs as a small SVG, in which a script can move the point."""

import html
import math
from collections.abc import Sequence

from pagewise.figures.embed import tag
from pagewise.figures.palette import DASHES, INK, ORANGE, PALETTE
from pagewise.tools.roofline import Gpu

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 260, 48, 398, 10, 220  # of the whole, and where the axes lie
INTENSITIES, FLOPS = (1e-1, 1e4), (1e11, 1e16)  # what the axes span


def roofline_svg(gpus: Sequence[Gpu], point: tuple[float, float]) -> str:
    """Attainable FLOP/s over intensity, both logarithmic: a roof per GPU, and the step at (intensity, FLOP/s)."""
    drawn = []
    for power in range(-1, 5):
        x = _x(10.0**power)
        drawn.append(_line([(x, _y(FLOPS[0])), (x, _y(FLOPS[1]))], stroke="#d9d9e3"))
        drawn.append(_text(x, BOTTOM + 16, f"{10.0**power:g}", text_anchor="middle"))
    for power in range(11, 17):
        y = _y(10.0**power)
        drawn.append(_line([(_x(INTENSITIES[0]), y), (_x(INTENSITIES[1]), y)], stroke="#d9d9e3"))
        drawn.append(_text(LEFT - 4, y + 4, f"{10.0 ** (power - 12):g}", text_anchor="end"))
    for i, gpu in enumerate(gpus):
        roof = [(_x(x), _y(gpu.attainable(x))) for x in (INTENSITIES[0], gpu.ridge, INTENSITIES[1])]
        dash = None if DASHES[i] == "-" else "6 3" if DASHES[i] == "--" else "6 3 2 3"
        drawn.append(_line(roof, stroke=PALETTE[i], stroke_width=2, stroke_dasharray=dash, data_gpu=gpu.name))
        sample = [(250, 140 + 18 * i), (280, 140 + 18 * i)]
        drawn.append(_line(sample, stroke=PALETTE[i], stroke_width=2, stroke_dasharray=dash))
        drawn.append(_text(286, 144 + 18 * i, gpu.name))
    drawn.append(_text((LEFT + RIGHT) / 2, HEIGHT - 6, "intensity (FLOP per byte moved)", text_anchor="middle"))
    drawn.append(_text(LEFT + 6, TOP + 16, "TFLOP/s attainable", text_anchor="start"))
    x, y = _x(point[0]), _y(point[1])
    drawn.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=7, fill=ORANGE, stroke=INK, stroke_width=1.5))
    label = "Attainable FLOP/s over intensity on logarithmic axes: a slope that memory sets, then a flat roof that "
    label += "arithmetic sets, for " + ", ".join(gpu.name for gpu in gpus) + ". A dot marks the step."
    return tag(
        "svg",
        "\n".join(drawn),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=label,
        data_axes=" ".join(f"{n:g}" for n in (*INTENSITIES, *FLOPS, LEFT, RIGHT, BOTTOM, TOP)),
    )


def _x(intensity: float) -> float:
    return LEFT + (RIGHT - LEFT) * _share(intensity, *INTENSITIES)


def _y(flops: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * _share(flops, *FLOPS)


def _share(value: float, low: float, high: float) -> float:
    """Where `value` lies on a logarithmic axis: 0 at its beginning, 1 at its end, never outside."""
    return min(1.0, max(0.0, math.log(value / low) / math.log(high / low)))


def _line(points: Sequence[tuple[float, float]], **attributes: object) -> str:
    written = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return tag("polyline", points=written, fill="none", **attributes)


def _text(x: float, y: float, text: str, **attributes: object) -> str:
    return tag("text", html.escape(text), x=f"{x:.1f}", y=f"{y:.1f}", fill=INK, font_size=12, **attributes)
