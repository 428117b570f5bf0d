"""Calculators with sliders: a KV cache's size and gain, a step under the roofline, a merge, a sequence on many GPUs.

The page computes the same as `kv_cache_bytes`, `least_step`, `AttentionCost`, `Gpu` and `sent_bytes`. It gets every
constant from here as JSON. Without scripts, the page shows the table of the first settings.
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

from pagewise.figures.palette import INK, ORANGE, PALETTE, SAND
from pagewise.figures.steps import Embedded, fill, tag
from pagewise.tools.roofline import GPUS, H100, MEMORY, AttentionCost

Values = dict[str, Any]  # of the inputs, by their names

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}  # bytes of a number
THREE_DIGITS = Context(prec=3, rounding=ROUND_HALF_UP)  # as the script's toPrecision(3)
POWERS = [2**i for i in range(18)]
LINKS = {"NVLink, 450 GB/s": 450e9, "network, 50 GB/s": 50e9}  # bytes/s that a GPU can send


# A drawing: its size and the place of its axes.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 260, 48, 398, 10, 220


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
        Choice("gpu", "card", {gpu.name: {"memory": n} for gpu, n in MEMORY.items()}, GPUS[0].name),
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
        Result("flops", "arithmetic of the pairs that a causal mask leaves", cost.flops, "FLOP"),
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


def saving_calculator(least_step: Callable[..., float], models: Mapping[str, Any]) -> Embedded:
    """Return a calculator of the least time for the next token, with a KV cache and without.

    Args:
        least_step: lesson 2's function, `experiments.cached_steps.least_step`. Tests compare the page with it.
        models: name → its `Sizes`. The calculator starts with the first.
    """
    gpus = {gpu.name: gpu for gpu in GPUS}
    presets = {name: model._asdict() for name, model in models.items()}
    cards = {name: {"peak_flops": gpu.peak_flops, "bandwidth": gpu.bandwidth} for name, gpu in gpus.items()}
    inputs = [
        Choice("model", "model, 16 bits", presets, next(iter(presets))),
        Slider("n", "tokens in each text", POWERS, 256),
        Slider("batch", "texts in one call", POWERS[:9], 1),
        Choice("gpu", "card", cards, H100.name),
    ]
    v = _start(inputs)
    model, gpu, batch = models[v["model"]], gpus[v["gpu"]], v["batch"]
    without, cached = (least_step(model, gpu, v["n"], cached=way, batch=batch) for way in (False, True))
    results = [
        Result("without", "least time without a cache", without, "s"),
        Result("cached", "least time with a cache", cached, "s"),
        Result("gain", "a cache saves a factor of", f"{float(THREE_DIGITS.create_decimal(without / cached)):g}"),
        Result("weights", "weights that each call reads", model.weight_bytes, "B"),
        Result("ridge", "tokens at which arithmetic takes over", gpu.ridge / batch, "tokens"),
    ]
    curves = {
        name: [(n, least_step(model, gpu, n, cached=way, batch=batch)) for n in POWERS]
        for name, way in (("without a cache", False), ("with a cache", True))
    }
    drawing = _saving_svg(curves, v["n"], gpu.ridge / batch)
    return _calculator("cache_saving.js", inputs, results, "When does a KV cache save time?", drawing)


def exponent_calculator() -> Embedded:
    """Return a calculator that merges two summaries (m, l, acc) of four keys, with any number added to every score.

    Beside the merge, the table shows the plain sum of exp(score) in float32, which overflows.
    """
    inputs = [
        Slider("shift", "add to every score", range(-120, 121, 10), 90),
        Slider("split", "keys in the first piece", (1, 2, 3), 2),
    ]
    v = _start(inputs)
    scores, values = [s + v["shift"] for s in (1, 2, 3, 4)], [10.0, 20.0, 30.0, 40.0]

    def summary(start: int, stop: int) -> tuple[int, float, float]:
        m = max(scores[start:stop])
        weights = [math.exp(s - m) for s in scores[start:stop]]
        return m, sum(weights), sum(w * value for w, value in zip(weights, values[start:stop], strict=True))

    first, second = summary(0, v["split"]), summary(v["split"], 4)
    m, l, acc = merged = summary(0, 4)
    results = [
        Result("m", "m of all keys", str(m)),
        Result("l", "l", f"{l:.4f}"),
        Result("acc", "acc", f"{acc:.4f}"),
        Result("out", "output acc / l", f"{acc / l:.4f}"),
        Result("plain", "without m, in float32: Σ exp(score)", plain_sum(scores, values)),
    ]
    drawing = _merge_svg({"first": first, "second": second, "merged": merged}, scores, v["split"])
    return _calculator("exponent.js", inputs, results, "m is only an exponent: which numbers change with it?", drawing)


def plain_sum(scores: Sequence[float], values: Sequence[float]) -> str:
    """Return the sum of exp(score) in float32 and the output that follows from it, as the page writes them."""
    weights = torch.tensor(scores, dtype=torch.float64).exp().float()
    plain, weighted = weights.sum().item(), (weights * torch.tensor(values)).sum().item()
    size = "∞" if plain == math.inf else "0" if plain == 0 else re.sub(r"e([+-])0*", r"e\1", f"{plain:.2e}")
    out = weighted / plain if plain not in (0.0, math.inf) and weighted < math.inf else math.nan
    return f"{size}, output {'NaN' if math.isnan(out) else format(out, '.2f')}"


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


class _LogAxes(NamedTuple):
    """Two logarithmic axes of a drawing, and what is drawn on them."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the point of the drawing, inside of the axes."""
        shares = []
        for value, (low, high) in ((x, self.x), (y, self.y)):
            shares.append(min(1.0, max(0.0, math.log(value / low) / math.log(high / low))))
        return LEFT + (RIGHT - LEFT) * shares[0], BOTTOM - (BOTTOM - TOP) * shares[1]

    def curve(self, points: Sequence[tuple[float, float]], **attributes: object) -> str:
        return _line(*(self.place(*point) for point in points), **attributes)

    def grid(self, xs: Mapping[float, str], ys: Mapping[float, str]) -> list[str]:
        """Return a grey line and a label for each of these values."""
        drawn = []
        for x, label in xs.items():
            ends = [self.place(x, y) for y in self.y]
            drawn.append(_line(*ends, stroke="#d9d9e3"))
            drawn.append(_text(ends[0][0], BOTTOM + 16, label, text_anchor="middle"))
        for y, label in ys.items():
            ends = [self.place(x, y) for x in self.x]
            drawn.append(_line(*ends, stroke="#d9d9e3"))
            drawn.append(_text(LEFT - 4, ends[0][1] + 4, label, text_anchor="end"))
        return drawn

    def svg(self, drawn: Sequence[str], label: str) -> str:
        axes = " ".join(f"{n:g}" for n in (*self.x, *self.y, LEFT, RIGHT, BOTTOM, TOP))
        box = f"0 0 {WIDTH} {HEIGHT}"
        return tag("svg", "\n".join(drawn), viewBox=box, role="img", aria_label=label, data_axes=axes)


def _line(*points: tuple[float, float], **attributes: object) -> str:
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", **attributes)


def _text(x: float, y: float, words: str, **attributes: object) -> str:
    return tag("text", html.escape(words), x=f"{x:.1f}", y=f"{y:.1f}", fill=INK, font_size=12, **attributes)


def _dot(x: float, y: float, **attributes: object) -> str:
    look = {"fill": ORANGE, "stroke": INK, "stroke_width": 1.5}
    return tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=7, **(look | attributes))


def _roofline_svg(point: tuple[float, float]) -> str:
    """Return a drawing of attainable FLOP/s over intensity, with a roof per GPU and a point for the step."""
    axes = _LogAxes((1e-1, 1e4), (1e11, 1e16))
    flops = {10.0**power: f"{10.0 ** (power - 12):g}" for power in range(11, 17)}
    drawn = axes.grid({10.0**power: f"{10.0**power:g}" for power in range(-1, 5)}, flops)
    for i, gpu in enumerate(GPUS):
        look = {"stroke": PALETTE[i], "stroke_width": 2, "stroke_dasharray": (None, "6 3", "6 3 2 3")[min(i, 2)]}
        roof = [(x, gpu.attainable(x)) for x in (axes.x[0], gpu.ridge, axes.x[1])]
        y = 140 + 18 * i
        drawn += [axes.curve(roof, **look, data_gpu=gpu.name), _line((250, y), (280, y), **look)]
        drawn.append(_text(286, y + 4, gpu.name))
    drawn.append(_text((LEFT + RIGHT) / 2, HEIGHT - 6, "intensity (FLOP per byte moved)", text_anchor="middle"))
    drawn.append(_text(LEFT + 6, TOP + 16, "TFLOP/s attainable", text_anchor="start"))
    drawn.append(_dot(*axes.place(*point)))
    label = "Attainable FLOP/s over intensity on logarithmic axes: a slope that memory sets, then a flat roof that "
    label += "arithmetic sets, for " + ", ".join(gpu.name for gpu in GPUS) + ". A dot marks the step."
    return axes.svg(drawn, label)


def _saving_svg(curves: Mapping[str, Sequence[tuple[int, float]]], n: int, ridge: float) -> str:
    """Return a drawing of seconds over tokens: a curve for each way, a dot on each at n, and a line at the ridge."""
    axes = _LogAxes((1, POWERS[-1]), (1e-3, 1e3))
    times = {1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s", 1e3: "1000 s"}
    drawn = axes.grid({n: f"{n:,}" for n in (1, 16, 256, 4096, 65536)}, times)
    for i, (name, curve) in enumerate(curves.items()):
        look = {"stroke": (ORANGE, INK)[i], "stroke_width": 2.5, "stroke_dasharray": (None, "6 3")[i]}
        y = TOP + 22 + 18 * i
        drawn += [axes.curve(curve, **look, data_curve=name), _line((LEFT + 12, y), (LEFT + 42, y), **look)]
        drawn.append(_text(LEFT + 48, y + 4, name))
    drawn.append(axes.curve([(ridge, y) for y in axes.y], stroke=INK, stroke_dasharray="2 3", data_ridge="here"))
    drawn += [_dot(*axes.place(n, dict(curve)[n]), data_dot=name) for name, curve in curves.items()]
    drawn.append(_text((LEFT + RIGHT) / 2, HEIGHT - 6, "tokens in each text (dotted: the ridge)", text_anchor="middle"))
    label = "Least seconds of the next token over the tokens of the text, on logarithmic axes. Up to the ridge, both "
    label += "curves are flat and equal. Beyond it, the curve without a cache rises. A dot on each marks the setting."
    return axes.svg(drawn, label)


def _merge_svg(summaries: Mapping[str, tuple[int, float, float]], scores: Sequence[int], split: int) -> str:
    """Return a drawing of two summaries that merge: boxes with m, l and acc, and the factor of each on its edge."""
    drawn, places = [], {"first": (90, 24), "second": (290, 24), "merged": (190, 152)}
    m = summaries["merged"][0]
    for name, (x, y) in places.items():
        if name != "merged":
            drawn.append(_line((x, y + 78), (190, 152), stroke=INK, stroke_width=1.5))
            factor = "× 1" if summaries[name][0] == m else f"× e^({summaries[name][0]} − {m})"
            side = ("end", -20) if name == "first" else ("start", 20)
            middle = ((x + 190) / 2 + side[1], y + 112)
            drawn.append(_text(*middle, factor, text_anchor=side[0], data_text=f"{name}-factor"))
            of = scores[:split] if name == "first" else scores[split:]
            words = ", ".join(map(str, of))
            drawn.append(_text(x, y - 8, words, text_anchor="middle", data_text=f"{name}-scores"))
        fill = SAND if name == "merged" else "#ffffff"
        drawn.append(tag("rect", x=x - 65, y=y, width=130, height=78, fill=fill, stroke=INK))
        top, l, acc = summaries[name]
        for i, (key, text) in enumerate((("m", f"m = {top}"), ("l", f"l = {l:.4f}"), ("acc", f"acc = {acc:.4f}"))):
            weight = "bold" if key == "m" else None
            look = {"text_anchor": "middle", "font_weight": weight, "data_text": f"{name}-{key}"}
            drawn.append(_text(x, y + 21 + 22 * i, text, **look))
    label = (
        "Two boxes with the scores, m, l and acc of a piece, and a box of both pieces below. Each edge has the factor "
    )
    label += "of l and acc in the merge. When a number is added to every score, only the three m change."
    return tag("svg", "\n".join(drawn), viewBox=f"0 0 {WIDTH} 240", role="img", aria_label=label)
