"""Figures of a KV cache: what it saves of the time of the next token, and how many users fit beside the weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewise.figures.charts import lines
from pagewise.figures.drawing import chart, subplots
from pagewise.figures.palette import DASHES, INK, MARKERS, PALETTE


def next_token_times(*panels: Any) -> None:
    """Draw ms over tokens in a panel for each `Times` of `experiments.cached_steps`, and mark the ridge."""
    title = "Far beyond its ridge, a machine gains much from a cache"
    with subplots(1, len(panels), size=(6.4, 3.3), title=title, alt=_said(panels)) as (_, axes):
        for ax, times in zip(axes, panels, strict=True):
            series = {"without a cache": times.without, "with a cache": times.cached}
            series = {name: [1e3 * seconds for seconds in each] for name, each in series.items()}
            labels = {"xlabel": "tokens in the text", "ylabel": "ms for the next token" if ax is axes[0] else ""}
            lines(times.lengths, series, title="", logx=True, logy=True, ax=ax, **labels)
            ax.set_title(times.name, fontsize=10)
            ax.axvline(times.ridge, color=INK, lw=1.0, ls=":")
            beside = {"transform": ax.get_xaxis_transform(), "va": "top", "ha": "right"}
            ax.text(times.ridge, 0.97, f"ridge: {times.ridge:.0f} ", **beside)
            powers = [n for n in times.lengths if n.bit_length() % 3 == 1]
            ax.set_xticks(powers, [f"{n:,}" for n in powers])
            if ax is axes[0]:
                ax.legend(loc="center left")  # the ridge's name is at the top
            else:
                ax.get_legend().remove()


def _said(panels: Sequence[Any]) -> str:
    """Return the alternative text: each ridge, and how much longer a step takes up to it and at the longest text."""
    sentences = []
    for times in panels:
        ratio = times.without[-1] / times.cached[-1]
        below = [i for i, n in enumerate(times.lengths) if n <= times.ridge]
        most = max(times.without[i] / times.cached[i] for i in below)
        text = f"{times.name}: up to the ridge at {times.ridge:.0f} tokens, a step without a cache takes at most "
        text += f"{most:.1f} times as long. "
        sentences.append(
            text + f"At {times.lengths[-1]:,} tokens, a step without a cache takes {ratio:.0f} times as long."
        )
    return " ".join(sentences)


def users_until_full(curves: Mapping[str, Sequence[float]], full: float) -> None:
    """Draw ms per token over the number of users, for models that fill one GPU.

    Args:
        curves: model → milliseconds of a step with 1, 2, 3, … users. The last number of users fills the memory.
        full: the milliseconds in which the GPU reads its whole memory.
    """
    title = f"A full GPU takes {full:.0f} ms for a token, whatever the model"
    ends = ", ".join(f"{name} at {len(ms)} users and {ms[-1]:.0f} ms" for name, ms in curves.items())
    alt = f"Milliseconds per token over users. Every curve rises until the memory is full: {ends}."
    with chart(6.4, 3.6, title, alt) as ax:
        ax.axhline(full, color=INK, lw=1.0, ls=":", label="time to read the whole memory")
        for i, (name, ms) in enumerate(curves.items()):
            ax.plot(range(1, len(ms) + 1), ms, color=PALETTE[i], ls=DASHES[i])
            ax.plot(len(ms), ms[-1], MARKERS[i], color=PALETTE[i], ls=DASHES[i], label=f"{name}: {len(ms)} users fit")
        ax.set_xscale("log")
        ax.set_xticks([1, 10, 100], ["1", "10", "100"])
        ax.set(xlabel="users, each with a text of 2,048 tokens", ylabel="ms for a token", ylim=(0, 1.25 * full))
        ax.grid(visible=True)
        ax.legend(loc="center left", fontsize=9)
