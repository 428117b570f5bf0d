"""Many GPUs: what each holds, tokens for heads in an all-to-all, what a prompt and a token cost (lesson 10)."""

from collections.abc import Mapping, Sequence

from matplotlib.patheffects import withStroke

from pagewise.figures.charts import bars
from pagewise.figures.drawing import arrow, box, diagram, rectangle, subplots
from pagewise.figures.moving_rings import PROCESSES
from pagewise.figures.palette import BLUE, HATCHES, INK, ORANGE, SAND, TEAL
from pagewise.tools.roofline import Gpu


def all_to_all(num_processes: int, num_heads: int, *, marked: int, title: str, alt: str = "") -> None:
    """Draw tokens × heads before and after an all-to-all. The colour and number of a box name its process.

    Args:
        marked: a process. Thick frames mark what it sends, and where these boxes are afterwards.

    Raises:
        ValueError: the heads cannot be shared out evenly, or there are more processes than colours.
    """
    if num_processes > len(PROCESSES) or num_heads % num_processes:
        message = f"num_heads must be a multiple of num_processes, which is at most {len(PROCESSES)}"
        raise ValueError(f"{message}, got {num_heads} and {num_processes}")
    share = num_heads // num_processes
    with subplots(1, size=(5.4, 0.45 * num_processes + 1.3), title=title, alt=alt) as (_, (ax,)):
        right = num_heads + 2.4
        diagram(ax, (-1.0, right + num_heads + 0.1), (num_processes + 0.9, -1.05))
        for left, name in ((0.0, "before: own tokens, all heads"), (right, "after: all tokens, own heads")):
            ax.text(left, -0.4, name, fontsize=9, fontweight="bold")
            ax.text(left + num_heads / 2, num_processes + 0.75, "head", ha="center", fontsize=9)
            for head in range(num_heads):
                ax.text(left + head + 0.5, num_processes + 0.3, f"{head}", ha="center", fontsize=8)
        for piece in range(num_processes):
            ax.text(-0.2, piece + 0.5, f"tokens {piece}", ha="right", va="center", fontsize=8)
            for head in range(num_heads):
                for left, holder in ((0.0, piece), (right, head // share)):
                    box(ax, left + head, piece, 1, 1, f"{holder}", fill=PROCESSES[holder])
        on_dark_boxes = [withStroke(linewidth=5.0, foreground="white")]
        for head in range(num_heads):
            if head // share != marked:
                for left in (0.0, right):
                    frame = {"ec": INK, "lw": 2.6, "path_effects": on_dark_boxes}
                    rectangle(ax, left + head + 0.07, marked + 0.07, 0.86, 0.86, "none", **frame)
        middle = num_processes / 2
        arrow(ax, (num_heads + 0.3, middle), (right - 0.3, middle), lw=2)


def memory_on_each(weights: float, cache: float, gpu: Gpu, counts: Sequence[int] = (1, 2, 4, 8, 16)) -> None:
    """Draw the bytes that each GPU holds if several share the keys and values of one sequence, and not the weights.

    Args:
        weights, cache: the bytes of all weights, and of the keys and values of the whole sequence.
        counts: numbers of GPUs, a bar for each.
    """
    held = {"K and V": [cache / n / 1e9 for n in counts], "weights": [weights / 1e9] * len(counts)}
    fits = next((n for n in counts if weights + cache / n <= gpu.memory), None)
    found = "The sequence fits on none of them" if fits is None else f"The sequence fits from {fits} GPUs on"
    alt = f"{found}. Held by each GPU: " + ", ".join(
        f"{(weights + cache / n) / 1e9:.1f} GB of {n}" if n > 1 else f"{(weights + cache) / 1e9:.1f} GB of one"
        for n in counts
    )
    bars(
        [f"{n} GPU{'s' * (n > 1)}" for n in counts],
        held,
        title=f"{found}:\nK and V are shared, the weights are not",
        ylabel="GB on each GPU",
        stacked=True,
        ranges={
            f"beyond the {gpu.memory / 1e9:.0f} GB of an {gpu.name}": (gpu.memory / 1e9, 1.08 * (weights + cache) / 1e9)
        },
        alt=alt + ".",
    )


def prompt_and_token(
    prompt: Mapping[str, float],
    arithmetic: float,
    token: Mapping[str, tuple[float, float, float]],
    *,
    title: str,
    alt: str = "",
) -> None:
    """Draw what ways of sharing a model cost, for a prompt and for one new token.

    Args:
        prompt: way → milliseconds of sending in one layer. `arithmetic` is the least time of its arithmetic.
        token: way → milliseconds of a whole step to read the weights, to read K and V, and to wait for the exchanges.
    """
    said = ", ".join(f"{way} {ms:.3g} ms" for way, ms in prompt.items())
    then = ", ".join(f"{way} {sum(parts):.3g} ms" for way, parts in token.items())
    found = f"{title}. A layer of a prompt: {said} of sending, {arithmetic:.3g} ms of arithmetic. A new token: {then}."
    with subplots(2, size=(6.4, 4.2), title=title, alt=alt or found, height_ratios=[len(prompt), len(token)]) as (
        _,
        axes,
    ):
        above, below = axes
        above.axvspan(0, arithmetic, fc="#b8b8c4", alpha=0.45, zorder=0, label="arithmetic of the layer")
        drawn = above.barh(list(prompt), list(prompt.values()), 0.7, color=ORANGE, ec="white", label="sending")
        above.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=9)
        above.set_title("prompt: ms per layer", fontsize=10)
        left = [0.0] * len(token)
        for i, (name, fill) in enumerate({"weights": BLUE, "K and V": TEAL, "waiting for exchanges": SAND}.items()):
            widths = [parts[i] for parts in token.values()]
            drawn = below.barh(
                list(token), widths, 0.7, left=left, color=fill, ec="white", hatch=HATCHES[i], label=name
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        below.bar_label(drawn, [f"{total:.3g}" for total in left], padding=2, fontsize=9)
        below.set_title("one new token: ms per step", fontsize=10)
        for ax in axes:
            ax.invert_yaxis()
            ax.grid(axis="x")
            ax.margins(x=0.1)
        above.legend(loc="lower right", fontsize=9)
        below.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=9)
