"""The calculator of a decode step computes what `decode_times` computes, at any setting."""

import base64
import re
from xml.etree import ElementTree

import pytest
import test_calculators
from browser import BROWSER
from stepped import untrusted

from pagewise.experiments import decode_model
from pagewise.experiments.decode_model import decode_times
from pagewise.figures.calculators import written
from pagewise.figures.decode_calculator import DECODE_TILES, decode_calculator
from pagewise.tools.roofline import GPUS

SECONDS = {"products", "reading", "merging", "launches", "total"}


def python_decode(v):
    gpu, tile = next(gpu for gpu in GPUS if gpu.name == v["gpu"]), DECODE_TILES[v["tile"]]
    H = v["Hkv"] * v["group"]
    programs = v["B"] * (v["Hkv"] if tile["packed"] else H) * v["splits"]
    shape = {"splits": v["splits"], "rows": tile["rows"], "packed": bool(tile["packed"])}
    times = decode_times(v["B"], H, v["Hkv"], v["S"], gpu, **shape)
    limit = "products" if times.products > times.reading else "reading"
    waves = -(-programs // gpu.num_sms)
    return {"programs": programs, "waves": waves, **times._asdict(), "total": times.total, "limit": limit}


def test_it_starts_with_the_announcements_book():
    shown = dict(re.findall(r'data-result="(\w+)">([^<]*)<', decode_calculator(decode_model)._repr_html_()))
    book = {"B": 1, "S": 2**16, "Hkv": 2, "group": 8, "tile": next(iter(DECODE_TILES)), "splits": 1}
    expected = python_decode(book | {"gpu": GPUS[0].name})
    assert shown == {name: written(value, "s" if name in SECONDS else "") for name, value in expected.items()}


def test_without_scripts_it_is_a_picture():
    left = untrusted(decode_calculator(decode_model)._repr_html_())
    (source,) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)" width="420" alt="The time of a decode', left)
    assert ElementTree.fromstring(base64.b64decode(source)).tag.endswith("svg")


if BROWSER:

    @pytest.mark.parametrize("width", [1400, 420])
    def test_the_page_computes_what_python_computes(tmp_path, monkeypatch, width):
        monkeypatch.setitem(
            test_calculators.CALCULATORS, "decode", (lambda: decode_calculator(decode_model), python_decode)
        )
        test_calculators.test_page_computes_what_python_computes(tmp_path, "decode", width)
