"""Published times of kernels over the shapes of a table, beside the model and the least time of the bytes."""

from collections.abc import Mapping, Sequence

from pagewise.figures.drawing import chart
from pagewise.figures.palette import DASHES, INK, MARKERS, PALETTE


def published(
    rows: Sequence,
    *,
    constants: Mapping[str, float] | None = None,
    title: str = "Measured by others",
    level: str = "",
    alt: str = "",
) -> None:
    """Draw the times of published rows, a line with marks for each kernel, and the roofline of the useful work, dotted.

        figures.published(published.rows(table="flash_decoding"), level="67 MB at full speed")

    The x axis has the shapes (sequences × tokens) in the order of the rows, the logarithmic y axis µs.

    Args:
        rows: of `experiments.published`, all of one GPU.
        constants: kernel → its constant. For these kernels the model is drawn through the marks, dashed.
        level: the name of the dotted line, by default the least time on this GPU.

    Raises:
        ValueError: there are no rows, or they are of several GPUs.
    """
    gpus = {row.gpu for row in rows}
    if len(gpus) != 1:
        raise ValueError(f"rows must be of one GPU, got {', '.join(sorted(gpus)) or 'no rows'}")
    shapes = list(dict.fromkeys(row.shape for row in rows))
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    least = {row.shape: 1e6 * row.null(1.0) for row in rows}
    with chart(7.2, 4.0, title, alt or _in_words(title, rows, kernels, least)) as ax:
        for i, kernel in enumerate(kernels):
            of = [row for row in rows if row.kernel == kernel]
            x = [shapes.index(row.shape) for row in of]
            look = {"color": PALETTE[i % 5], "marker": MARKERS[i % 5]}
            modelled = kernel in (constants or {})
            ax.plot(x, [1e6 * row.seconds for row in of], ls="" if modelled else "-", label=kernel, **look)
            if modelled:
                ax.plot(x, [1e6 * row.model(constants[kernel]) for row in of], "--", color=PALETTE[i % 5])
                ax.plot([], [], "--", color=PALETTE[i % 5], label=f"the model, {constants[kernel]:.2f} of the peak")
        least_times = [least[shape] for shape in shapes]
        ax.plot(range(len(shapes)), least_times, DASHES[3], color=INK, label=level or f"least time, {gpus.pop()}")
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right", fontsize=8.5)
        ax.set(xlabel="sequences × tokens", ylabel="µs")
        ax.grid(axis="y")
        ax.legend()


def _in_words(title: str, rows: Sequence, kernels: Sequence[str], least: Mapping[str, float]) -> str:
    """Return the alternative text: each kernel's first and last time."""
    said = []
    for kernel in kernels:
        of = [row for row in rows if row.kernel == kernel]
        said.append(f"{kernel} takes {_at(of[0])} and {_at(of[-1])}")
    times = [f"{value:,.0f} µs" for value in least.values()]
    return f"{title}. {'; '.join(said)}; the least time is {times[0]} and {times[-1]}."


def _at(row) -> str:
    return f"{1e6 * row.seconds:,.0f} µs at {row.shape}"
