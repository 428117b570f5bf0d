"""Calculators with sliders: the size of a KV cache, an attention step under the roofline, one sequence on many GPUs.

The page computes the same as `kv_cache_bytes`, `AttentionCost`, `Gpu` and `sent_bytes`. It gets every constant from
here as JSON. Without scripts, the page shows the table of the first settings.
"""

import base64
import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context
from typing import Any, NamedTuple

import torch

from pagewise.figures.palette import INK, ORANGE, PALETTE
from pagewise.figures.steps import Embedded, fill, tag
from pagewise.tools.roofline import GPUS, H100, AttentionCost

Values = dict[str, Any]  # of the inputs, by their names

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}  # bytes of a number
THREE_DIGITS = Context(prec=3, rounding=ROUND_HALF_UP)  # as the script's toPrecision(3)
POWERS = [2**i for i in range(18)]
LINKS = {"NVLink, 450 GB/s": 450e9, "network, 50 GB/s": 50e9}  # bytes/s that a GPU can send

# The drawing of the roofline: its size, the place of its axes, and their ranges.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 260, 48, 398, 10, 220
INTENSITIES, FLOPS = (1e-1, 1e4), (1e11, 1e16)


class Slider(NamedTuple):
    """An `<input type=range>` over a list of numbers."""

    name: str
    label: str
    choices: Sequence[int]
    start: int


class Choice(NamedTuple):
    """A `<select>`. Each option has values. A value with the name of a slider moves this slider."""

    name: str
    label: str
    options: Mapping[str, Values]
    start: str


class Result(NamedTuple):
    """A row of the table, with its first value. If `unit` is not "", the value is written with an SI prefix."""

    name: str
    label: str
    value: float | str
    unit: str = ""


def cache_calculator(kv_cache_bytes: Callable[..., int], models: Mapping[str, tuple[int, int, int, float]]) -> Embedded:
    """Return a calculator of the bytes of a KV cache, and of the number of sequences that fit beside the weights.

    Args:
        kv_cache_bytes: lesson 2's function. Tests compare the numbers of the page with it.
        models: name → (layers, KV heads, head size, bytes of the weights). The calculator starts with the first.
    """
    names = ("num_layers", "num_kv_heads", "head_size", "weights")
    presets = {model: dict(zip(names, numbers, strict=True)) for model, numbers in models.items()}
    first, start = next(iter(presets.items()))
    inputs = [
        Choice("model", "start from", presets, first),
        Slider("num_layers", "layers", range(1, 129), start["num_layers"]),
        Slider("num_kv_heads", "KV heads", range(1, 129), start["num_kv_heads"]),
        Slider("head_size", "head size", range(32, 257, 8), start["head_size"]),
        Slider("context", "context (tokens)", POWERS, 2048),
        Choice("dtype", "dtype of the cache", {name: {"itemsize": n} for name, n in DTYPES.items()}, "float16"),
        Choice("gpu", "card", {gpu.name: {"memory": gpu.memory} for gpu in GPUS}, GPUS[0].name),
    ]

    v = _start(inputs)
    sizes = {name: v[name] for name in names[:3]} | {"dtype": getattr(torch, v["dtype"])}
    sequence, left = kv_cache_bytes(v["context"], **sizes), v["memory"] - v["weights"]
    results = [
        Result("token", "one token", kv_cache_bytes(1, **sizes), "B"),
        Result("sequence", "one sequence", sequence, "B"),
        Result("weights", "weights of the model started from", v["weights"], "B"),
        Result("left", "left on the card for K and V", left, "B"),
        Result("fit", "sequences that fit", max(0, math.floor(left / sequence))),
    ]
    title = "How much memory do K and V take, and how many sequences fit?"
    return _calculator("cache_size.js", inputs, results, title)


def roofline_calculator() -> Embedded:
    """Return a calculator of an attention step: its intensity, its limit, and its shortest time on a GPU."""
    cards = {gpu.name: {"peak_flops": gpu.peak_flops, "bandwidth": gpu.bandwidth} for gpu in GPUS}
    inputs = [
        Slider("B", "batch B", POWERS[:11], 1),
        Slider("Hkv", "KV heads", POWERS[:8], 8),
        Slider("group", "query heads for each", POWERS[:6], 4),
        Slider("D", "head size D", (32, 64, 80, 96, 112, 128, 192, 256), 128),
        Slider("S", "context S (tokens)", POWERS, 2048),
        Slider("T", "new tokens T ≤ S", POWERS, 1),
        Choice("gpu", "card", cards, GPUS[0].name),
    ]

    v, gpu = _start(inputs), GPUS[0]
    new = min(v["T"], v["S"])
    cost = AttentionCost(v["B"], v["Hkv"] * v["group"], v["Hkv"], new, v["S"], v["D"], causal=True)
    attainable = gpu.attainable(cost.intensity)
    results = [
        Result("new", "new tokens", new),
        Result("flops", "arithmetic", cost.flops, "FLOP"),
        Result("bytes", "bytes moved, 16 bits a number", cost.bytes_moved, "B"),
        Result("intensity", "intensity", cost.intensity, "FLOP/B"),
        Result("ridge", "the card's ridge", gpu.ridge, "FLOP/B"),
        Result("limit", "limited by", "arithmetic" if cost.intensity >= gpu.ridge else "memory"),
        Result("attainable", "attainable", attainable, "FLOP/s"),
        Result("seconds", "least time", gpu.seconds(cost.flops, cost.bytes_moved), "s"),
    ]
    drawing = _roofline_svg((cost.intensity, attainable))
    title = "Where does a step of attention sit under the roof?"
    return _calculator("roofline.js", inputs, results, title, drawing)


def link_calculator(sent_bytes: Callable[..., dict[str, float]], models: Mapping[str, tuple[int, ...]]) -> Embedded:
    """Return a calculator of one long causal sequence on several H100: the bytes that a layer sends, and their time.

    Args:
        sent_bytes: lesson 10's function. Tests compare the numbers of the page with it.
        models: name → (layers, query heads, KV heads, head size). The calculator starts with the first.
    """
    names = ("num_layers", "H", "Hkv", "D")
    presets = {model: dict(zip(names, numbers, strict=True)) for model, numbers in models.items()}
    links = {name: {"link_bandwidth": link, "peak_flops": H100.peak_flops} for name, link in LINKS.items()}
    inputs = [
        Choice("model", "model", presets, next(iter(presets))),
        Slider("n", "GPUs", POWERS[1:8], 8),
        Slider("S", "context S (tokens)", [2**i for i in range(10, 24)], 2**20),
        Choice("link", "link", links, next(iter(LINKS))),
    ]

    v = _start(inputs)
    n, S, H, Hkv, D = (v[name] for name in ("n", "S", "H", "Hkv", "D"))
    sent = sent_bytes(n, S, H, Hkv, D)
    flops = AttentionCost(1, H, Hkv, S, S, D, causal=True).flops / n**2  # of a GPU in a step of the ring
    results = [
        Result("held", "K and V of all layers, on each GPU", 4 * v["num_layers"] * S // n * Hkv * D, "B"),
        Result("ring", "a GPU sends per layer: ring", sent["ring"], "B"),
        Result("all_to_all", "all-to-all", sent["all-to-all"] if n <= Hkv else "too few KV heads", "B"),
        Result("decode", "split decode, one token", sent["decode"], "B"),
        Result("compute", "a step of the ring: to compute", flops / H100.peak_flops, "s"),
        Result("send", "to send", sent["ring"] / (n - 1) / v["link_bandwidth"], "s"),
    ]
    return _calculator("many_gpus.js", inputs, results, "One sequence on many GPUs: which method sends how much?")


def _calculator(
    script: str, inputs: Sequence[Slider | Choice], results: Sequence[Result], title: str, drawing: str = ""
) -> Embedded:
    rows = {result.label: written(result.value, result.unit) for result in results}
    constants = {
        "choices": {each.name: list(each.choices) for each in inputs if isinstance(each, Slider)},
        "options": {each.name: each.options for each in inputs if isinstance(each, Choice)},
        "units": {result.name: result.unit for result in results},
    }
    at = ", ".join(f"{each.label} {each.start}" for each in inputs)
    table = []
    for result in results:
        label = tag("th", html.escape(result.label), scope="row")
        table.append(tag("tr", label + tag("td", rows[result.label], data_result=result.name)))
    markup = fill(
        "calculator.html",
        title=html.escape(title),
        constants=html.escape(json.dumps(constants, separators=(",", ":"))),
        kind=script.removesuffix(".js").replace("_", "-"),
        inputs="\n".join(map(_input, inputs)),
        at=html.escape(at),
        picture=_as_picture(drawing) if drawing else "",
        drawing=drawing,
        results="\n".join(table),
        script=fill(script),
    )
    said = ", ".join(f"{label} {text}" for label, text in rows.items())
    return Embedded(markup, f"{title} At {at}: {said}.")


def _as_picture(drawing: str) -> str:
    """Return an <img> of an <svg>, which stays where <svg> is removed."""
    alone = drawing.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    source = f"data:image/svg+xml;base64,{base64.b64encode(alone.encode()).decode()}"
    return tag("img", src=source, width=WIDTH, alt=html.unescape(re.search(r'aria-label="([^"]*)"', drawing)[1]))


def _start(inputs: Sequence[Slider | Choice]) -> Values:
    values: Values = {}
    for each in inputs:
        values[each.name] = each.start
        values |= each.options[each.start] if isinstance(each, Choice) else {}
    return values


def _input(of: Slider | Choice) -> str:
    label = tag("span", html.escape(of.label))
    if isinstance(of, Choice):
        options = "".join(tag("option", html.escape(name), selected=name == of.start) for name in of.options)
        return tag("label", label + tag("select", options, name=of.name))
    place = list(of.choices).index(of.start)
    slider = tag("input", type="range", name=of.name, min=0, max=len(of.choices) - 1, step=1, value=place)
    return tag("label", f"{label}{slider}" + tag("b", f"{of.start:,}"))


def written(value: float | str, unit: str) -> str:
    """Return a value as the script writes it: a word, a count with commas, or three digits with an SI prefix."""
    if isinstance(value, str):
        return value
    if not unit:
        return f"{value:,}"
    sizes = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
    prefix, size = next(((p, size) for p, size in sizes.items() if abs(value) >= size), ("", 1.0))
    return f"{float(THREE_DIGITS.create_decimal(value / size)):g} {prefix}{unit}"


def _roofline_svg(point: tuple[float, float]) -> str:
    """Return a drawing of attainable FLOP/s over intensity, with a roof per GPU and a point for the step."""

    def share(value: float, low: float, high: float) -> float:
        """Return the place of `value` on a logarithmic axis, from 0 at its beginning to 1 at its end."""
        return min(1.0, max(0.0, math.log(value / low) / math.log(high / low)))

    def place(intensity: float, flops: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * share(intensity, *INTENSITIES), BOTTOM - (BOTTOM - TOP) * share(flops, *FLOPS)

    def line(*points: tuple[float, float], **attributes: object) -> str:
        return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", **attributes)

    def text(x: float, y: float, words: str, **attributes: object) -> str:
        return tag("text", html.escape(words), x=f"{x:.1f}", y=f"{y:.1f}", fill=INK, font_size=12, **attributes)

    drawn = []
    for power in range(-1, 5):
        ends = [place(10.0**power, flops) for flops in FLOPS]
        drawn.append(line(*ends, stroke="#d9d9e3"))
        drawn.append(text(ends[0][0], BOTTOM + 16, f"{10.0**power:g}", text_anchor="middle"))
    for power in range(11, 17):
        ends = [place(intensity, 10.0**power) for intensity in INTENSITIES]
        drawn.append(line(*ends, stroke="#d9d9e3"))
        drawn.append(text(LEFT - 4, ends[0][1] + 4, f"{10.0 ** (power - 12):g}", text_anchor="end"))
    for i, gpu in enumerate(GPUS):
        look = {"stroke": PALETTE[i], "stroke_width": 2, "stroke_dasharray": (None, "6 3", "6 3 2 3")[min(i, 2)]}
        roof = [place(x, gpu.attainable(x)) for x in (INTENSITIES[0], gpu.ridge, INTENSITIES[1])]
        y = 140 + 18 * i
        drawn += [line(*roof, **look, data_gpu=gpu.name), line((250, y), (280, y), **look), text(286, y + 4, gpu.name)]
    drawn.append(text((LEFT + RIGHT) / 2, HEIGHT - 6, "intensity (FLOP per byte moved)", text_anchor="middle"))
    drawn.append(text(LEFT + 6, TOP + 16, "TFLOP/s attainable", text_anchor="start"))
    x, y = place(*point)
    drawn.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=7, fill=ORANGE, stroke=INK, stroke_width=1.5))
    label = "Attainable FLOP/s over intensity on logarithmic axes: a slope that memory sets, then a flat roof that "
    label += "arithmetic sets, for " + ", ".join(gpu.name for gpu in GPUS) + ". A dot marks the step."
    axes = " ".join(f"{n:g}" for n in (*INTENSITIES, *FLOPS, LEFT, RIGHT, BOTTOM, TOP))
    box = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", "\n".join(drawn), viewBox=box, role="img", aria_label=label, data_axes=axes)
