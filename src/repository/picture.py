"""The pictures of the README: `python src/repository/picture.py` writes lessons/_static/readme.svg and the buttons.

GitHub shows an SVG as an image. Its animation runs there, and it needs no script and no font of its own. The picture
shows the times that lesson 7 prints, so the lesson stays their only source.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "lessons" / "_static"
BUTTONS = {
    "button_book": "Read the book",
    "button_colab": "Open lesson 1 in Colab",
    "button_codespaces": "Open lesson 1 in Codespaces",
}
HEADS, SMS, CUTS = 8, 132, 16  # of lesson 7's figure
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
    """Return the microseconds that lesson 7 prints: for keys that are not cut, and for keys cut in 16."""
    lesson = json.loads((ROOT / "lessons" / "07_flash_decoding.ipynb").read_text(encoding="utf-8"))
    printed = "".join("".join(output.get("text", "")) for cell in lesson["cells"] for output in cell.get("outputs", []))
    found = re.search(r"reading: (\d+) µs not cut, (\d+) µs cut in 16", printed)
    return float(found[1]), float(found[2])


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
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
        row(66, "Keys not cut: one program per KV head", "alone", HEADS, alone, cut / alone),
        row(182, "Flash-Decoding: keys cut in 16", "cut", HEADS * CUTS, cut, 1),
    ]
    alt = (
        f"One query reads 65,536 keys. Not cut, {HEADS} of {SMS} SMs read for {alone:g} µs. "
        f"Cut in {CUTS}, {HEADS * CUTS} SMs read for {cut:g} µs."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 300" role="img" aria-label="{alt}">',
            f"<style>{STYLE}</style>",
            '<rect class="card" x="0.5" y="0.5" width="739" height="299" rx="8"/>',
            '<text x="20" y="34" font-size="19" font-weight="700">A question about a book of 65,536 tokens: '
            "how many SMs read?</text>",
            *rows,
            '<text x="20" y="288" font-size="13">Blue: keys that are read. Orange: SMs that read. '
            "The times are lesson 7's model of an H200.</text>",
            "</svg>\n",
        ]
    )


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
    return {"readme.svg": picture()} | buttons


if __name__ == "__main__":
    for name, text in pictures().items():
        (STATIC / name).write_text(text, encoding="utf-8")
