"""The calculators: what a page computes is what Python computes, at any setting; without scripts a table stays."""

import base64
import html
import json
import random
import re
from xml.etree import ElementTree

import pytest
import torch
from browser import BROWSER, probe
from stepped import untrusted

from pagewise.exercises import solutions
from pagewise.experiments.cached_steps import MODELS as DECODERS
from pagewise.experiments.cached_steps import least_step
from pagewise.figures.block_memory import CAPACITY, _slots_in_blocks, paging_calculator
from pagewise.figures.calculators import (
    LINKS,
    THREE_DIGITS,
    cache_calculator,
    exponent_calculator,
    link_calculator,
    plain_sum,
    roofline_calculator,
    saving_calculator,
    written,
)
from pagewise.kv_cache import kv_cache_bytes
from pagewise.online_softmax import Partial
from pagewise.tools.roofline import GPUS, H100, MEMORY, AttentionCost

PAGE = "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><body>"
MODELS = {"LLaMA-13B": (40, 40, 128, 26.0e9), "Llama-3-8B": (32, 8, 128, 16.1e9)}


def cache():
    return cache_calculator(kv_cache_bytes, MODELS)


def python_cache(v):
    sizes = {name: v[name] for name in ("num_layers", "num_kv_heads", "head_size")}
    sizes["dtype"] = getattr(torch, v["dtype"])
    weights = MODELS[v["model"]][3]
    left = next(n for gpu, n in MEMORY.items() if gpu.name == v["gpu"]) - weights
    sequence = kv_cache_bytes(v["context"], **sizes)
    token, fit = kv_cache_bytes(1, **sizes), max(0, int(left // sequence))
    return {"token": token, "sequence": sequence, "weights": weights, "left": left, "fit": fit}


def python_roofline(v):
    new = min(v["T"], v["S"])
    cost = AttentionCost(v["B"], v["Hkv"] * v["group"], v["Hkv"], new, v["S"], v["D"], causal=True)
    gpu = next(gpu for gpu in GPUS if gpu.name == v["gpu"])
    return {
        "new": new,
        "flops": cost.flops,
        "bytes": cost.bytes_moved,
        "intensity": cost.intensity,
        "ridge": gpu.ridge,
        "limit": "memory" if gpu.attainable(cost.intensity) < gpu.peak_flops else "arithmetic",
        "attainable": gpu.attainable(cost.intensity),
        "seconds": gpu.seconds(cost.flops, cost.bytes_moved),
    }


SHAPES = {"Llama-3-8B": (32, 32, 8, 128), "Llama-2-7B": (32, 32, 32, 128)}


def links():
    return link_calculator(solutions["sent_bytes"], SHAPES)


def python_links(v):
    (layers, H, Hkv, D), n, S = SHAPES[v["model"]], v["n"], v["S"]
    sent = solutions["sent_bytes"](n, S, H, Hkv, D)
    return {
        "held": kv_cache_bytes(S // n, num_layers=layers, num_kv_heads=Hkv, head_size=D, dtype=torch.float16),
        "ring": sent["ring"],
        "all_to_all": sent["all-to-all"] if n <= Hkv else "too few KV heads",
        "decode": sent["decode"],
        "compute": AttentionCost(1, H, Hkv, S, S, D, causal=True).flops / n**2 / H100.peak_flops,
        "send": sent["ring"] / (n - 1) / LINKS[v["link"]],
    }


def saving():
    return saving_calculator(least_step, DECODERS)


def python_saving(v):
    model, gpu = DECODERS[v["model"]], next(gpu for gpu in GPUS if gpu.name == v["gpu"])
    without, cached = (least_step(model, gpu, v["n"], cached=way, batch=v["batch"]) for way in (False, True))
    weights, ridge = model.weight_bytes, gpu.ridge / v["batch"]
    gain = f"{float(THREE_DIGITS.create_decimal(without / cached)):g}"
    return {"without": without, "cached": cached, "gain": gain, "weights": weights, "ridge": ridge}


def python_exponent(v):
    scores = torch.arange(1.0, 5.0, dtype=torch.float64) + v["shift"]
    values = 10 * torch.arange(1.0, 5.0, dtype=torch.float64)
    pieces = [slice(0, v["split"]), slice(v["split"], 4)]
    first, second = (Partial.of(scores[piece], values[piece, None]) for piece in pieces)
    whole = first.merge(second)
    numbers = {"l": whole.l, "acc": whole.acc, "out": whole.output()}
    shown = {name: f"{x.item():.4f}" for name, x in numbers.items()}
    return {"m": f"{whole.m:.0f}", **shown, "plain": plain_sum(scores.tolist(), values.tolist())}


def test_the_exponent_at_its_start_is_that_of_the_package():
    shown = dict(re.findall(r'data-result="(\w+)">([^<]*)<', exponent_calculator()._repr_html_()))
    assert shown == python_exponent({"shift": 90, "split": 2})
    assert shown["plain"] == "∞, output NaN"


def python_paging(v):
    capacity = int(v["memory"].split()[0].replace(",", ""))
    held = min(v["held"], v["longest"])
    pieces = {"reserved": v["longest"], "paged": v["P"] if v["P"] > held else held + (v["P"] - 1) / 2}
    fit = {name: int(capacity // piece) for name, piece in pieces.items()}
    used = {f"{name}_used": f"{int(100 * n * held / capacity + 0.5)} %" for name, n in fit.items()}
    return fit | used | {"times": fit["paged"] / fit["reserved"]}


CALCULATORS = {
    "exponent": (exponent_calculator, python_exponent),
    "saving": (saving, python_saving),
    "cache": (cache, python_cache),
    "roofline": (roofline_calculator, python_roofline),
    "links": (links, python_links),
    "paging": (paging_calculator, python_paging),
}


def inputs(markup):
    """(choices of each slider, options of each select), as the page has them."""
    constants = json.loads(html.unescape(re.search(r'data-constants="([^"]*)"', markup)[1]))
    return constants["choices"], constants["options"]


@pytest.mark.parametrize("make", [make for make, _ in CALCULATORS.values()], ids=CALCULATORS)
def test_same_bytes_each_time_nothing_from_elsewhere_and_a_label_for_every_input(make):
    markup = make()._repr_html_()
    assert make()._repr_html_() == markup
    assert not re.search(r"https?:|@import|url\(|<link| src=(?!\"data:)", markup)
    labelled = re.findall(r"<label><span>[^<]+</span><(?:input|select) ", markup)
    assert len(labelled) == len(re.findall(r"<(?:input|select) ", markup)) > 1


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(819200, "B", "819 kB"), (64.25, "B", "64.3 B"),
     (1677721600, "B", "1.68 GB"), (4.1e-6, "s", "4.1 µs"), (61, "", "61"), (0, "B", "0 B"),
     (1048576, "", "1,048,576"), (152.99, "FLOP/B", "153 FLOP/B"), (-2.5e9, "B", "-2.5 GB"), ("memory", "", "memory")],
)  # fmt: skip
def test_quantities_have_three_digits_and_a_prefix(value, unit, text):
    assert written(value, unit) == text


def test_without_scripts_the_table_stands_and_says_at_which_settings():
    left = untrusted(cache()._repr_html_())
    assert not re.search(r"<(input|select|label|svg|img)\b", left)
    assert "At start from LLaMA-13B, layers 40, KV heads 40, head size 128, context (tokens) 2048" in left
    assert "You can move these in the book" in left
    assert '<th scope="row">one sequence</th><td data-result="sequence">1.68 GB</td>' in left
    assert "one sequence 1.68 GB" in repr(cache())


@pytest.mark.parametrize("make", [roofline_calculator, saving, exponent_calculator])
def test_without_scripts_a_drawing_is_a_picture(make):
    left = untrusted(make()._repr_html_())
    (source,) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)" width="420" alt="[^"]{40,}"', left)
    drawing = ElementTree.fromstring(base64.b64decode(source))
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<svg" not in left


def test_the_first_setting_of_the_chats_is_that_of_python_and_its_bars_are_drawn():
    shown = dict(re.findall(r'data-result="(\w+)">([^<]*)<', paging_calculator()._repr_html_()))
    expected = python_paging({"memory": f"{CAPACITY:,} tokens", "longest": 2048, "held": 400, "P": 16})
    assert shown == {name: written(value, "×" if name == "times" else "") for name, value in expected.items()}
    drawing = paging_calculator()._repr_html_().split("<svg", 1)[1].split("</svg>")[0]
    assert drawing.count("<rect") == 2 * (expected["reserved"] + expected["paged"])


@pytest.mark.parametrize(("held", "P", "slots"), [(400, 16, 407.5), (400, 1024, 1024), (400, 401, 401), (16, 1, 16)])
def test_a_chat_that_is_shorter_than_a_block_takes_the_whole_block(held, P, slots):
    assert _slots_in_blocks(held, P) == slots


def test_the_bytes_of_the_first_settings_are_those_of_python():
    shown = dict(re.findall(r'data-result="(\w+)">([^<]*)<', links()._repr_html_()))
    expected = python_links({"model": "Llama-3-8B", "n": 8, "S": 2**20, "link": next(iter(LINKS))})
    assert shown == {
        name: written(value, "s" if name in ("compute", "send") else "B") for name, value in expected.items()
    }


if BROWSER:
    SET = """
        const root = document.querySelector(".pw-calculator"), settings = %s;
        const read = () => Object.fromEntries([...root.querySelectorAll("[data-result]")].map(
            (cell) => [cell.dataset.result, [cell.dataset.value, cell.textContent]]));
        const seen = [read()];
        for (const setting of settings) {
            for (const kind of ["select", "input"]) {
                for (const element of root.querySelectorAll(kind)) {
                    element.value = setting[element.name];
                    element.dispatchEvent(new Event(kind === "select" ? "change" : "input"));
                }
            }
            seen.push(read());
        }
        const wide = [...root.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > innerWidth).length;
        const cut = [...root.querySelectorAll("label b")].filter((e) => e.scrollWidth > e.clientWidth).length;
        const reached = [...root.querySelectorAll("input, select")].map(
            (e) => { e.focus(); return document.activeElement === e; });
        return {seen, wide, cut, reached, page: document.scrollingElement.scrollWidth - innerWidth};
    """

    @pytest.mark.parametrize("width", [1400, 420])
    @pytest.mark.parametrize("name", CALCULATORS)
    def test_page_computes_what_python_computes(tmp_path, name, width):
        make, python = CALCULATORS[name]
        markup = make()._repr_html_()
        choices, options = inputs(markup)
        draw = random.Random(width)
        settings, values = [], []
        for _ in range(10):
            places = {slider: draw.randrange(len(of)) for slider, of in choices.items()}
            chosen = {select: draw.choice(list(of)) for select, of in options.items()}
            settings.append(places | chosen)
            values.append({slider: choices[slider][i] for slider, i in places.items()} | chosen)
        page = tmp_path / "page.html"
        page.write_text(PAGE + markup)
        found, errors = probe(page, SET % json.dumps(settings), width=width)
        units = json.loads(html.unescape(re.search(r'data-constants="([^"]*)"', markup)[1]))["units"]
        for value, seen in zip(values, found["seen"][1:], strict=True):
            expected = python(value)
            assert {key: text for key, (_, text) in seen.items()} == {
                key: written(result, units[key]) for key, result in expected.items()
            }
            for key, (raw, _) in seen.items():
                if not isinstance(expected[key], str):
                    assert float(raw) == pytest.approx(expected[key], rel=1e-12)
        at_start = {key: text for key, (_, text) in found["seen"][0].items()}
        assert at_start == dict(re.findall(r'data-result="(\w+)">([^<]*)<', markup))
        assert found["wide"] == 0
        assert found["page"] <= 0
        assert found["cut"] == 0
        assert all(found["reached"])
        assert errors == []
