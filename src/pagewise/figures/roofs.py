"""The roofline of `tools.roofline`, drawn: what a GPU can attain, and where a kernel's intensity puts it."""

from collections.abc import Mapping, Sequence

from pagewise.figures.drawing import chart
from pagewise.figures.palette import DASHES, INK, PALETTE


def roofline(gpus: Sequence, points: Mapping[str, float], *, title: str, alt: str | None = None) -> None:
    """Attainable TFLOP/s over intensity for each GPU of `tools.roofline`, and where each point's intensity stands.

    A diamond marks each ridge; a roof that several GPUs share is named once, on the roof.
    """
    top = max(gpu.peak_flops for gpu in gpus) / 1e12
    with chart(6.4, 4.4, title, alt) as ax:
        for i, gpu in enumerate(gpus):
            x = [0.1, gpu.ridge, 1e4]
            ax.loglog(x, [gpu.attainable(v) / 1e12 for v in x], color=PALETTE[i], ls=DASHES[i])
            label = f"{gpu.name}, ridge at {gpu.ridge:.0f}"
            ax.plot([], [], "D", color=PALETTE[i], ls=DASHES[i], ms=6, label=label)
            ax.plot(gpu.ridge, gpu.peak_flops / 1e12, "D", color=PALETTE[i], ms=6)
        for peak in {gpu.peak_flops / 1e12 for gpu in gpus}:
            names = " and ".join(gpu.name.split()[0] for gpu in gpus if gpu.peak_flops / 1e12 == peak)
            ax.annotate(f"{names}: {peak:.0f}", (9e3, peak), (0, 3), textcoords="offset points", ha="right")
        ax.text(0.13, top, "memory-bound", fontstyle="italic", va="center")
        ax.text(9e3, top / 8, "compute-bound", fontstyle="italic", ha="right", va="center")
        for i, (label, intensity) in enumerate(points.items()):
            ax.axvline(intensity, color=INK, lw=0.8, ls=":")
            ax.plot([intensity] * len(gpus), [g.attainable(intensity) / 1e12 for g in gpus], "o", color=INK, ms=4)
            plate = {"fc": "white", "ec": "none", "pad": 1}
            ax.annotate(label, (intensity, top * (2, 4, 8)[i % 3]), ha="center", fontsize=8.5, bbox=plate)
        ax.set_ylim(0.1, top * 14)
        ax.set(xlabel="intensity (FLOPs per byte moved)", ylabel="attainable TFLOP/s")
        ax.legend(loc="lower right", frameon=True, framealpha=1, edgecolor="none")
