"""The keys of a decode step, cut in ranges, and the SMs that read them: a stepper over time."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from pagewise.figures.drawing import bare, colour_key
from pagewise.figures.palette import BLUE, ORANGE
from pagewise.figures.steps import Embedded, stepper
from pagewise.tools.sizes import cdiv

COLUMNS = 256  # cells along the keys of a head
FUTURE, READ, NOW = range(3)
COLOURS = ListedColormap(["#ffffff", BLUE, ORANGE])


def key_range_steps(
    cuts: Mapping[str, tuple[int, float]], *, heads: int, keys: int, num_sms: int, title: str, alt: str
) -> Embedded:
    """Return a stepper over time: a row of keys per KV head, and a square per SM.

    All SMs read side by side, each from the start of its range. A key is white until an SM has read it.

    Args:
        cuts: name → (ranges per head, microseconds until all ranges are read).

    Raises:
        ValueError: there are more ranges than SMs.
    """
    for name, (ranges, _) in cuts.items():
        if heads * ranges > num_sms:
            raise ValueError(f"{name!r}: {heads} · {ranges} ranges must be at most num_sms = {num_sms}: cut in fewer")
    ends = sorted(microseconds for _, microseconds in cuts.values())
    times = sorted({0.0, ends[0] / 2, *ends, *(ends[-1] * i / 4 for i in (1, 2, 3))})
    frames = [(f"After {time:.0f} µs. {_said(cuts, heads, time)}", time) for time in times]

    def draw(figure: Figure, time: float) -> None:
        rows = figure.subplots(len(cuts), 2, width_ratios=[3.2, 1.3], squeeze=False)
        for (left, right), (name, (ranges, microseconds)) in zip(rows, cuts.items(), strict=True):
            _draw_keys(left, name, ranges, time / microseconds, heads, keys)
            _draw_sms(right, heads * ranges if time < microseconds else 0, num_sms)
        rows[-1][0].set_xlabel("key (thousands)")
        looks = {"not read, idle": "white", "read": BLUE, "being read, busy": ORANGE}
        colour_key(figure, looks, loc="outside lower center", ncols=3)

    return stepper(frames, draw, title=title, alt=alt, height=1.6 * len(cuts) + 0.8, still=1)


def _said(cuts: Mapping[str, tuple[int, float]], heads: int, time: float) -> str:
    said = []
    for name, (ranges, microseconds) in cuts.items():
        share = f"{min(time / microseconds, 1):.0%} of the keys are read"
        said.append(f"{name}: {share}, " + (f"{heads * ranges} SMs busy" if time < microseconds else "done"))
    return "; ".join(said) + "."


def _draw_keys(ax: Axes, name: str, ranges: int, done: float, heads: int, keys: int) -> None:
    """Draw the keys of each head, when the fraction `done` of each range is read."""
    place = np.arange(COLUMNS) * ranges / COLUMNS % 1  # of a column within its range
    state = np.where(place < done, READ, FUTURE)
    if done < 1:  # at least two columns, to be seen
        state[(done <= place) & (place < done + max(2 * ranges / COLUMNS, 0.02))] = NOW
    cells, extent = np.tile(state, (heads, 1)), (0, keys / 1000, heads, 0)
    ax.imshow(cells, cmap=COLOURS, vmin=0, vmax=2, aspect="auto", extent=extent, interpolation="nearest")
    for r in range(1, ranges):
        ax.axvline(r * keys / 1000 / ranges, color="#8a8aa0", lw=0.5)
    for h in range(1, heads):
        ax.axhline(h, color="#8a8aa0", lw=0.5)
    ax.set_yticks([h + 0.5 for h in range(heads)], range(heads), fontsize=8)
    ax.set_ylabel("KV head")
    ax.set_title(name, fontsize=10)
    ax.spines[["top", "right"]].set_visible(True)


def _draw_sms(ax: Axes, busy: int, num_sms: int) -> None:
    """Draw the SMs in rows of 16. The first `busy` work."""
    cells = np.full(cdiv(num_sms, 16) * 16, -1)
    cells[:num_sms] = np.where(np.arange(num_sms) < busy, NOW, FUTURE)
    cells = np.ma.masked_equal(cells.reshape(-1, 16), -1)
    ax.pcolormesh(cells, cmap=COLOURS, vmin=0, vmax=2, edgecolors="#8a8aa0", lw=0.3)
    ax.set(xlim=(-0.1, 16.1), ylim=(len(cells) + 0.1, -0.1), xticks=[], yticks=[])
    ax.set_title(f"{busy} of {num_sms} SMs", fontsize=10, fontweight="normal")
    bare(ax)
