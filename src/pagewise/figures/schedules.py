"""Schedules over time: the programs and SMs of a GPU, waves, the spans of a profiled step, a ring of buffers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pagewise.figures.blocks import OWNERS
from pagewise.figures.charts import bars
from pagewise.figures.drawing import box, colour_key, diagram, rectangle, subplots
from pagewise.figures.palette import BLUE, DASHES, INK, ORANGE, PALETTE, SAND, TEAL
from pagewise.figures.steps import Embedded, stepper
from pagewise.tools.schedule import Run, schedule
from pagewise.tools.sizes import cdiv

COLUMNS = 22  # of squares, a square per SM
STEPS = 12  # of `sm_steps`, at most
PIXELS = 900  # of a panel, along its time


def programs_over_time(
    panels: Mapping[str, Sequence[Run]], at_once: int, *, ideal: float, marked: int, title: str, alt: str = ""
) -> None:
    """Draw a panel per schedule, and a row for each place of a program on the GPU. It is white while it is idle.

    Args:
        ideal: the time to read everything at full speed; a dashed line.
        at_once: the number of programs that the GPU runs at a time.
        marked: the index of one sequence, which is dark. All other sequences share a light colour.
    """
    end = max(run.stop for runs in panels.values() for run in runs)
    size = (5.2, 1.05 * len(panels) + 1.1)
    with subplots(len(panels), size=size, title=title, alt=alt, sharex=True) as (figure, axes):
        for ax, (name, runs) in zip(axes, panels.items(), strict=True):
            image = np.ones((at_once, PIXELS, 3))
            for run in runs:
                start, stop = (round(time / end * PIXELS) for time in (run.start, run.stop))
                image[run.sm, start : max(stop, start + 1)] = to_rgb(BLUE if run.sequence == marked else SAND)
            ax.imshow(image, aspect="auto", extent=(0, end, at_once, 0), interpolation="nearest")
            ax.axvline(ideal, color=INK, ls="--", lw=1.2)
            last = max(run.stop for run in runs)
            ax.set_title(f"{name}: {ideal / last:.0%} of the bandwidth", fontsize=10, fontweight="normal")
            ax.set_yticks([0, at_once])
        figure.supylabel("program, of those that run at a time", fontsize=10)
        axes[-1].set_xlabel(f"time, in tiles of a program (dashed: the ideal, {ideal:.0f})")
        looks = {f"sequence {marked}": BLUE, "another sequence": SAND, "idle": "white"}
        colour_key(figure, looks, loc="outside lower center", ncols=3)


# Colour and hatch of each span. Strong colours mark the work that paging removes; the model's own work is pale.
LOOK = {
    "step": ("#f1f1f5", ""),
    "schedule": (INK, ""),
    "prefill": ("#dcdce6", ""),
    "decode": ("#dcdce6", ""),
    "build batch": (ORANGE, "///"),
    "block tables": (SAND, "..."),
    "model": ("#b9c3d9", ""),
    "cache write": ("#c9b8dc", "\\\\"),
    "attention": (TEAL, "xx"),
    "sampling": (BLUE, ""),
}


def step_timelines(panels: Mapping[str, Sequence[Any]], *, title: str, alt: str = "") -> None:
    """Draw a panel per way to run a step. Each span is below the span that contains it.

    Args:
        panels: name → the spans of one step: name, start, seconds, depth, as `Profile.spans` has them.
    """
    begins = {name: min(span.start for span in spans) for name, spans in panels.items()}
    lasts = {name: max(span.start + span.seconds for span in spans) - begins[name] for name, spans in panels.items()}
    everything = [span for spans in panels.values() for span in spans]
    looks = {}
    for span in everything:
        fill, hatch = LOOK.get(span.name, ("white", ""))
        looks[span.name] = {"fc": fill, "hatch": hatch, "lw": 0.3}
    size = (5.6, 1.5 * len(panels) + 1.0)
    with subplots(len(panels), size=size, title=title, alt=alt, sharex=True) as (figure, axes):
        for ax, (name, spans) in zip(axes, panels.items(), strict=True):
            for span in spans:
                left = 1e3 * (span.start - begins[name])
                rectangle(ax, left, span.depth, 1e3 * span.seconds, 1, **looks[span.name])
            ax.set_title(f"{name}: {1e3 * lasts[name]:.1f} ms", fontsize=10)
            deepest = 1 + max(span.depth for span in everything)
            ax.set(xlim=(0, 1e3 * max(lasts.values())), ylim=(deepest, 0), yticks=())
        axes[-1].set_xlabel("time of the host (ms)")
        colour_key(figure, looks, loc="outside lower center", ncols=5, fontsize=8, handlelength=1.4)


def ring(panels: Mapping[str, Sequence[Any]], *, title: str, alt: str = "") -> None:
    """Draw a panel per ring: the tile that each stage loads or holds in each turn of the loop.

    Args:
        panels: name → the events of one warp in order. An event has `what` ("copy" or "multiply"), `turn` (the turn in
            which this tile is multiplied), `stage`, and `k_tile` (the number of the tile).
    """
    copies = {name: _copies(events) for name, events in panels.items()}
    num_stages = [1 + max(event.stage for event in events) for events in panels.values()]
    turns = 1 + max(event.turn for events in panels.values() for event in events)
    size = (6.4, 0.42 * sum(num_stages) + 0.75 * len(panels) + 0.6)
    with subplots(len(panels), size=size, title=title, alt=alt, height_ratios=num_stages) as (_, axes):
        for ax, (name, of_ring), height in zip(axes, copies.items(), num_stages, strict=True):
            for started, copy in of_ring:
                box(ax, started, copy.stage + 0.1, copy.turn - started, 0.8, fill=SAND, hatch="///")
                box(ax, copy.turn, copy.stage + 0.1, 1, 0.8, str(copy.k_tile), fill=BLUE)
            ax.set(xlim=(-1.1, turns + 0.1), ylim=(height, 0), ylabel="stage")
            ax.set_title(name, fontweight="normal", fontsize=10)
            ax.set_yticks([i + 0.5 for i in range(height)], range(height))
            ax.set_xticks([i + 0.5 for i in range(-1, turns)], ["before", *range(turns)])
        axes[-1].set_xlabel("turn of the loop over K (dark: the tile that is multiplied; hatched: on its way)")


def memory_in_use(of_gpu: Mapping[str, Sequence[float]], rings: Iterable[str], *, title: str, alt: str = "") -> None:
    """Draw how busy rings of buffers keep the memories of several GPUs.

    `of_gpu`: GPU → per cent of its bandwidth with each ring, as `flat_gemm_trace.memory_in_use` returns them.
    """
    looks = {"values": ".0f", "width": 6.8, "legend_outside": True, "caption": "buffers × size of each"}
    found = "; ".join(f"{gpu}: {', '.join(f'{share:.0f}' for share in shares)}" for gpu, shares in of_gpu.items())
    alt = alt or f"{' '.join(title.split())}. % of the bandwidth with {', '.join(rings)}: {found}."
    bars([*rings], of_gpu, title=title, ylabel="% of the bandwidth (model)", alt=alt, **looks)


def _copies(events: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return each copy with the turn of the loop in which it was started, −1 for the copies before the loop.

    A turn starts a copy, then multiplies. So all but one of the copies before the first product precede the loop.
    """
    first = next(i for i, event in enumerate(events) if event.what == "multiply")
    copies, now = [], -1
    for i, event in enumerate(events):
        if i >= first - 1 and (event.what == "copy" or event.turn > now):
            now += 1
        if event.what == "copy":
            copies.append((now, event))
    return copies


def sm_steps(
    grids: Mapping[str, Sequence[tuple[int, int]]], num_sms: int, *, title: str, alt: str, owner: str = "sequence"
) -> Embedded:
    """Return a stepper over time. Squares show the SMs that work, and curves show their number.

    Args:
        grids: name → (sequence, tokens to read) of each thread block. The order is that of the grid.
        owner: the name of the first number of a pair, which chooses the colour of a thread block.
    """
    runs = {name: schedule(grid, num_sms) for name, grid in grids.items()}
    moments = sorted({time for of_grid in runs.values() for run in of_grid for time in (run.start, run.stop)})
    end, steps = moments[-1], min(STEPS, len(moments))
    times = [moments[i * (len(moments) - 1) // max(steps - 1, 1)] for i in range(steps)]
    frames = []
    for time in times:
        said = ", ".join(f"{name}: {len(_at(of, time))} of {num_sms} SMs busy" for name, of in runs.items())
        done = [name for name, of_grid in runs.items() if all(run.stop <= time for run in of_grid)]
        said += f"; {' and '.join(done)} done" if done else ""
        frames.append((f"At time {time:,}. {said}.", time))

    def draw(figure: Figure, time: int) -> None:
        rows, colours = cdiv(num_sms, COLUMNS), ListedColormap(["#ffffff", *OWNERS])
        *panels, curve = figure.subplots(len(runs) + 1, 1, height_ratios=[1.0] * len(runs) + [1.2])
        for i, (ax, (name, of_grid)) in enumerate(zip(panels, runs.items(), strict=True)):
            owners = np.full(rows * COLUMNS, -1)
            owners[num_sms:] = -2  # no SM
            for run in _at(of_grid, time):
                owners[run.sm] = run.sequence % len(OWNERS)
            cells = np.ma.masked_equal(owners.reshape(rows, COLUMNS), -2)
            ax.pcolormesh(cells, cmap=colours, vmin=-1.5, vmax=len(OWNERS) - 0.5, edgecolors="#8a8aa0", lw=0.3)
            ax.set_aspect("equal")
            diagram(ax, (0, COLUMNS), (rows + 0.1, -0.1))
            ax.set_title(f"{name}: {len(of_grid)} thread blocks (a colour per {owner})", fontsize=10)
            edges = sorted({0, end} | {t for run in of_grid for t in (run.start, run.stop)})
            busy = [len(_at(of_grid, t)) for t in edges]
            curve.step(edges, busy, where="post", color=PALETTE[i], ls=DASHES[i], label=name)
        curve.axvline(time, color=INK, lw=1)
        curve.grid(visible=True)
        curve.set(xlim=(0, end), ylim=(0, num_sms * 1.08), ylabel="SMs busy")
        curve.set_xlabel("time (tokens read by a thread block)")
        curve.xaxis.set_major_locator(MaxNLocator(5))
        curve.legend(loc="upper right")

    return stepper(frames, draw, title=title, alt=alt, height=4.6, still=len(times) // 2)


def _at(runs: Sequence[Run], time: int) -> list[Run]:
    return [run for run in runs if run.start <= time < run.stop]
