"""Two calculators to drag: what a KV cache costs, and where an attention step sits under the roofline.

The page computes what `kv_cache_bytes`, `AttentionCost` and `Gpu` compute; every constant travels from here as JSON.
Without scripts the table stays, at the settings it starts from.
"""

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context
from typing import Any, NamedTuple

import torch

from pagewise.figures.embed import Embedded, fill, tag
from pagewise.figures.roofline_svg import roofline_svg
from pagewise.tools.roofline import GPUS, AttentionCost

Values = dict[str, Any]  # of the inputs, by their names

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
THREE_DIGITS = Context(prec=3, rounding=ROUND_HALF_UP)  # as the script's toPrecision(3)
POWERS = [2**i for i in range(18)]


class Slider(NamedTuple):
    """An `<input type=range>` over a list of numbers."""

    name: str
    label: str
    choices: Sequence[int]
    start: int


class Choice(NamedTuple):
    """A `<select>`. Each option stands for values; those that name sliders move them."""

    name: str
    label: str
    options: Mapping[str, Values]
    start: str


class Result(NamedTuple):
    """A row of the table. `unit` "": a count or a word; else written with an SI prefix."""

    name: str
    label: str
    unit: str = ""


def cache_calculator(kv_cache_bytes: Callable[..., int], models: Mapping[str, tuple[int, int, int, float]]) -> Embedded:
    """Layers, KV heads, head size, context and dtype → bytes, and the sequences that fit beside the weights.

    Args:
        kv_cache_bytes: lesson 2's function; the page's numbers are tested against it.
        models: name → (layers, KV heads, head size, bytes of the weights). The first is where the calculator starts.
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
        Choice("dtype", "dtype of the cache", {_name(d): {"itemsize": d.itemsize} for d in DTYPES}, "float16"),
        Choice("gpu", "card", {gpu.name: {"memory": gpu.memory} for gpu in GPUS}, GPUS[0].name),
    ]

    def compute(v: Values) -> Values:
        sizes = {name: v[name] for name in names[:3]} | {"dtype": getattr(torch, v["dtype"])}
        sequence, left = kv_cache_bytes(v["context"], **sizes), v["memory"] - v["weights"]
        fit = max(0, math.floor(left / sequence))
        token = kv_cache_bytes(1, **sizes)
        return {"token": token, "sequence": sequence, "weights": v["weights"], "left": left, "fit": fit}

    results = [
        Result("token", "one token", "B"),
        Result("sequence", "one sequence", "B"),
        Result("weights", "weights of the model started from", "B"),
        Result("left", "left on the card for K and V", "B"),
        Result("fit", "sequences that fit"),
    ]
    title = "How much memory do K and V take, and how many sequences fit?"
    return _calculator("cache_size.js", inputs, results, compute, title)


def roofline_calculator() -> Embedded:
    """Batch, heads, context and new tokens T (causal) → intensity, what limits the step, its least time on a card."""
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

    def compute(v: Values) -> Values:
        gpu = next(gpu for gpu in GPUS if gpu.name == v["gpu"])
        heads, new = v["Hkv"] * v["group"], min(v["T"], v["S"])
        cost = AttentionCost(v["B"], heads, v["Hkv"], new, v["S"], v["D"], causal=True)
        return {
            "new": new,
            "flops": cost.flops,
            "bytes": cost.bytes_moved,
            "intensity": cost.intensity,
            "ridge": gpu.ridge,
            "limit": "arithmetic" if cost.intensity >= gpu.ridge else "memory",
            "seconds": gpu.seconds(cost.flops, cost.bytes_moved),
            "attainable": gpu.attainable(cost.intensity),
        }

    results = [
        Result("new", "new tokens"),
        Result("flops", "arithmetic", "FLOP"),
        Result("bytes", "bytes moved, 16 bits a number", "B"),
        Result("intensity", "intensity", "FLOP/B"),
        Result("ridge", "the card's ridge", "FLOP/B"),
        Result("limit", "limited by"),
        Result("attainable", "attainable", "FLOP/s"),
        Result("seconds", "least time", "s"),
    ]
    at_start = compute(_start(inputs))
    drawing = roofline_svg(GPUS, (at_start["intensity"], at_start["attainable"]))
    title = "Where does a step of attention sit under the roof?"
    return _calculator("roofline.js", inputs, results, compute, title, drawing)


def _calculator(
    script: str,
    inputs: Sequence[Slider | Choice],
    results: Sequence[Result],
    compute: Callable[[Values], Values],
    title: str,
    drawing: str = "",
) -> Embedded:
    computed = compute(_start(inputs))
    rows = {result.label: written(computed[result.name], result.unit) for result in results}
    constants = {
        "choices": {each.name: list(each.choices) for each in inputs if isinstance(each, Slider)},
        "options": {each.name: each.options for each in inputs if isinstance(each, Choice)},
        "units": {result.name: result.unit for result in results},
    }
    at = ", ".join(f"{each.label} {each.start}" for each in inputs)
    table = "\n".join(
        tag("tr", tag("th", html.escape(result.label), scope="row") + tag("td", text, data_result=result.name))
        for result, text in zip(results, rows.values(), strict=True)
    )
    markup = fill(
        "calculator.html",
        title=html.escape(title),
        constants=html.escape(json.dumps(constants, separators=(",", ":"))),
        kind=script.removesuffix(".js").replace("_", "-"),
        inputs="\n".join(map(_input, inputs)),
        at=html.escape(at),
        drawing=drawing,
        results=table,
        script=fill(script),
    )
    said = ", ".join(f"{label} {text}" for label, text in rows.items())
    return Embedded(markup, f"{title} At {at}: {said}.")


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
    """A word as it is, a count with its commas, a quantity with three digits and an SI prefix. As the script does."""
    if isinstance(value, str):
        return value
    if not unit:
        return f"{value:,}"
    sizes = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
    prefix, size = next(((p, size) for p, size in sizes.items() if abs(value) >= size), ("", 1.0))
    return f"{float(THREE_DIGITS.create_decimal(value / size)):g} {prefix}{unit}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
