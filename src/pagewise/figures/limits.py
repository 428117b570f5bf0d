"""The least time of a launch on several GPUs, unit by unit."""

from collections.abc import Sequence

from pagewise.figures.charts import bars


def unit_times(limits: Sequence, *, title: str, alt: str = "") -> None:
    """Draw the least time of each unit of a GPU, with bars of another kind for each GPU.

    `limits` are the results of `report.limits(gpu)` for different GPUs. A unit without a time has no bar.
    """
    units = list(dict.fromkeys(unit for each in limits for unit in each.seconds))
    times = {each.gpu: [1e6 * each.seconds.get(unit, float("nan")) for unit in units] for each in limits}
    bars(units, times, title=title, ylabel="least time (µs)", horizontal=True, values=".3g", alt=alt)
