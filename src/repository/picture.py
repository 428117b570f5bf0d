"""The pictures of the README and of the book's front page: `python src/repository/picture.py` writes them.

GitHub shows an SVG as an image. Its animation runs there, and it needs no script and no font of its own.
lessons/_static/readme.svg shows times of lesson 7's model of a decode step.
lessons/_static/published.svg shows all rows of `pagewise.experiments.published`, and ours with the constants of others.
"""

import math
from pathlib import Path

from pagewise.experiments.decode_model import decode_times
from pagewise.experiments.published import LONG, WITHIN, Judged, foretold, judged
from pagewise.tools.roofline import H200

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "lessons" / "_static"
BUTTONS = {
    "button_book": "Read the book",
    "button_colab": "Open lesson 1 in Colab",
    "button_codespaces": "Open lesson 1 in Codespaces",
}
HEADS, SMS, CUTS, KEYS = 8, 132, 16, 65536  # an H200, Llama-3-8B
SECONDS_PER_MICROSECOND, LOOP = 0.01, 6.0  # of the animation
WIDTH, BAR, COLUMNS = 420, 8, 22  # of the keys, of the row of one head, of the squares

STYLE = """
text { font-family: -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #22223b; }
.card { fill: #fff; stroke: #d0d7de; }
.keys { fill: #e7eaf1; } .sm { fill: none; stroke: #8a8aa0; }
.read { fill: #22437a; transform-box: fill-box; transform-origin: left; }
.busy { fill: #e07a3f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e6f0; } .card { fill: #151b23; stroke: #3d444d; } .keys { fill: #2b3340; } .read { fill: #7aa2f0; }
}
@media (prefers-reduced-motion: reduce) { .read, .busy { animation: none !important; } }
"""


def times() -> tuple[float, float]:
    """Return the microseconds in which lesson 7's model reads the keys: not cut, and cut in 16."""
    terms = (decode_times(1, 4 * HEADS, HEADS, KEYS, H200, splits=splits) for splits in (1, CUTS))
    alone, cut = (round(1e6 * each.reading) for each in terms)
    return alone, cut


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle of SVG with the class `kind`."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def row(top: float, heading: str, name: str, programs: int, microseconds: float, done: float) -> str:
    """Return one half of the picture: keys that are read on the left, and the SMs that read them on the right.

    `done` is the share of the keys that is read in the still picture.
    """
    pieces = programs // HEADS
    width, end = WIDTH / pieces, 100 * microseconds * SECONDS_PER_MICROSECOND / LOOP
    parts = [
        f"<style>@keyframes read-{name} {{ 0% {{ transform: scaleX(0); }} {end:.1f}%, 100% {{ transform: none; }} }}",
        f"@keyframes busy-{name} {{ 0%, {end:.1f}% {{ opacity: 1; }} {end + 0.1:.1f}%, 100% {{ opacity: 0; }} }}",
        f".{name}.read {{ transform: scaleX({done:g}); animation: read-{name} {LOOP:g}s linear infinite; }}",
        f".{name}.busy {{ animation: busy-{name} {LOOP:g}s linear infinite; }}</style>",
        f'<text x="20" y="{top}" font-size="16" font-weight="600">{heading}</text>',
        f'<text x="456" y="{top}" font-size="16">{programs} of {SMS} SMs: <tspan font-weight="600">'
        f"{microseconds:g} µs</tspan></text>",
    ]
    for head in range(HEADS):
        y = top + 10 + head * (BAR + 2)
        parts.append(rectangle(20, y, WIDTH, BAR, "keys"))
        parts += [rectangle(20 + i * width, y, width, BAR, f"read {name}") for i in range(pieces)]
    for sm in range(SMS):
        x, y = 456 + sm % COLUMNS * 12, top + 10 + sm // COLUMNS * 13
        parts.append(rectangle(x, y, 10, 10, "sm"))
        if sm < programs:
            parts.append(rectangle(x, y, 10, 10, f"busy {name}"))
    return "\n".join(parts)


def picture() -> str:
    """Return the SVG: one query over many keys, with the keys not cut and cut in 16."""
    alone, cut = times()
    rows = [
        row(66, "One SM for each KV head", "alone", HEADS, alone, cut / alone),
        row(182, f"Flash-Decoding: {CUTS} SMs for each KV head", "cut", HEADS * CUTS, cut, 1),
    ]
    alt = (
        f"One query reads 65,536 keys. With one SM for each KV head, {HEADS} of {SMS} SMs of the GPU read for "
        f"{alone:g} µs. With {CUTS} SMs for each KV head, {HEADS * CUTS} SMs read for {cut:g} µs."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 300" role="img" aria-label="{alt}">',
            f"<style>{STYLE}</style>",
            '<rect class="card" x="0.5" y="0.5" width="739" height="299" rx="8"/>',
            '<text x="20" y="34" font-size="19" font-weight="700">How much of a GPU reads a book of '
            "65,536 tokens?</text>",
            *rows,
            '<text x="20" y="288" font-size="13">Blue: keys that are read. Orange: SMs (processors) '
            "that read. Times: lesson 7's model of an H200.</text>",
            "</svg>\n",
        ]
    )


TICKS = {1e-5: "10 µs", 1e-4: "100 µs", 1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "100 ms", 1.0: "1 s"}
LEFT, TOP, SIDE = 80, 66, 340  # of the square that both logarithmic axes span
FIRST, LAST = 4e-6, 4.0  # seconds at the ends of both axes
MARKS = """
.grid { stroke: #e3e6ee; } .band { fill: #d5dae6; } .same { stroke: #8a8aa0; }
.prompt { fill: #22437a; } .decode { fill: #e07a3f; } .miss { fill: #fff; stroke: #22223b; stroke-width: 1.3; }
.ours { fill: none; stroke: #22437a; stroke-width: 1.2; } .decode.ours { stroke: #e07a3f; }
.miss.ours { fill: none; stroke: #22223b; }
@media (prefers-color-scheme: dark) {
  .grid { stroke: #2b3340; } .band { fill: #333c4d; } .prompt { fill: #7aa2f0; }
  .ours { fill: none; stroke: #7aa2f0; } .miss { fill: #151b23; stroke: #e6e6f0; } .miss.ours { stroke: #e6e6f0; }
}
"""


def place(seconds: float) -> float:
    """Return how far along an axis a time is."""
    return SIDE * math.log(seconds / FIRST) / math.log(LAST / FIRST)


def mark(x: float, y: float, decodes: bool, fits: bool, ours: bool = False) -> str:
    """Return a mark: a square for a decode step, a circle for a prompt, open if the model misses it; ours: a cross."""
    kind = ("decode" if decodes else "prompt") + ("" if fits else " miss")
    if ours:
        return f'<path class="{kind} ours" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"/>'
    if decodes:
        return f'<rect class="{kind}" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.3"/>'


def published() -> str:
    """Return the SVG: all published times over their modelled times, with the band of WITHIN."""
    found, ours = judged(), foretold()
    right, bottom = LEFT + SIDE, TOP + SIDE
    low, high = place(FIRST * WITHIN), place(LAST / WITHIN)
    corners = ((0, 0), (0, low), (high, SIDE), (SIDE, SIDE), (SIDE, high), (low, 0))
    parts = [f'<polygon class="band" points="{" ".join(f"{LEFT + x:.1f},{bottom - y:.1f}" for x, y in corners)}"/>']
    for seconds, name in TICKS.items():
        x, y = LEFT + place(seconds), bottom - place(seconds)
        parts += [
            f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}M{LEFT} {y:.1f}H{right}"/>',
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" font-size="12">{name}</text>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" font-size="12">{name}</text>',
        ]
    parts.append(f'<path class="same" d="M{LEFT} {bottom}L{right} {TOP}"/>')
    for each in sorted(found, key=lambda each: not each.fits):  # the misses above the others
        x, y = LEFT + place(each.modelled), bottom - place(each.row.seconds)
        parts.append(mark(x, y, each.row.T < each.row.S, each.fits))
    for each in ours:
        x, y = LEFT + place(each.modelled), bottom - place(each.row.seconds)
        parts.append(mark(x, y, each.row.T < each.row.S, each.fits, ours=True))
    parts += [
        f'<text x="{LEFT + SIDE / 2:g}" y="{bottom + 38}" text-anchor="middle" font-size="13">modelled</text>',
        f'<text x="{LEFT}" y="{TOP - 10}" text-anchor="end" font-size="13">measured</text>',
        *(mark(right + x, y - 4, *kind) for y, (_, kinds) in KEY.items() for x, kind in kinds.items()),
        *(f'<text x="{right + 54}" y="{y}" font-size="14">{words}</text>' for y, (words, _) in KEY.items()),
        *(
            f'<text x="{right + 24}" y="{190 + 22 * i}" font-size="14">{words}</text>'
            for i, words in enumerate(said(found, ours))
        ),
    ]
    title = "Attention kernels on GPUs: measured, and counted"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 456" role="img" aria-label="{title}">',
            f"<style>{STYLE}{MARKS}</style>",
            '<rect class="card" x="0.5" y="0.5" width="739" height="455" rx="8"/>',
            f'<text x="20" y="28" font-size="17" font-weight="700">{title}</text>',
            *parts,
            "</svg>\n",
        ]
    )


PROMPT, DECODE = False, True
KEY = {  # y → words, and x → the arguments of `mark`
    80: ("a prompt", {42: (PROMPT, True)}),
    104: ("a decode step", {42: (DECODE, True)}),
    128: ("missed by the model", {18: (PROMPT, False), 30: (DECODE, False), 42: (DECODE, False, True)}),
    152: ("measured by us, on an H200", {30: (PROMPT, True, True), 42: (DECODE, True, True)}),
}


def said(found: list[Judged], ours: list[Judged]) -> list[str]:
    """Return the lines beside the marks."""
    prompts, steps = ([each.fits for each in ours if (each.row.T < each.row.S) == kind] for kind in (PROMPT, DECODE))
    long = [each for each in found if each.row.seconds >= LONG]
    right, null = (sum(fits) for fits in zip(*((each.fits, each.row.fits(each.null)) for each in long), strict=True))
    return [
        f"{len(found)} published times,",
        f"{len({each.row.family for each in found})} constants.",
        f"Of {len(long)} of 100 µs or more,",
        f"{right} lie in the band ({WITHIN} ×).",
        "If only the useful work is",
        f"counted, {null} lie in the band.",
        "Ours have the constants of H100s",
        "that others timed: in the band are",
        f"{sum(prompts)} of {len(prompts)} prompts",
        f"and {sum(steps)} of {len(steps)} decode steps.",
    ]


def button(words: str, main: bool) -> str:
    """Return the SVG of a button. `main` fills it."""
    width = 36 + round(9.6 * len(words))
    fill, ink = ("#22437a", "#fff") if main else ("#fff", "#22437a")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="40" role="img" aria-label="{words}">'
        f'<rect x="1" y="1" width="{width - 2}" height="38" rx="6" fill="{fill}" stroke="#22437a" stroke-width="2"/>'
        f'<text x="{width / 2:g}" y="25.5" text-anchor="middle" font-size="15.5" font-weight="600" fill="{ink}" '
        f'font-family="-apple-system, Segoe UI, Noto Sans, Helvetica, Arial, sans-serif">{words}</text></svg>\n'
    )


def pictures() -> dict[str, str]:
    """Return the text of every picture by the name of its file."""
    buttons = {f"{name}.svg": button(words, name == "button_book") for name, words in BUTTONS.items()}
    return {"readme.svg": picture(), "published.svg": published()} | buttons


if __name__ == "__main__":
    for name, text in pictures().items():
        (STATIC / name).write_text(text, encoding="utf-8")
