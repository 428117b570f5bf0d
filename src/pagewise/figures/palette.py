"""One palette and one style for every figure of the course, readable in grey-scale."""

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb

INK, BLUE, TEAL, ORANGE, SAND = "#22223b", "#22437a", "#2a8f9d", "#e07a3f", "#f0cf8a"
PALETTE = (BLUE, ORANGE, TEAL, SAND, INK)  # neighbours differ in lightness
WARPS = (SAND, TEAL, ORANGE, BLUE)  # of warps side by side
DASHES = ("-", "--", "-.", ":", (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v")
HATCHES = ("", "///", "...", "xx", "\\\\")
SEQUENTIAL, DIVERGING = "cividis", "RdBu_r"

STYLE = {
    "figure.dpi": 110,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.color": "#d9d9e3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.hashsalt": "pagewise",
}
plt.rcParams.update(STYLE)


def readable_on(fill: str | tuple[float, ...]) -> str:
    """Return the colour of text on `fill`: white on a dark colour, INK on a light one."""
    r, g, b = to_rgb(fill)
    return "white" if 0.299 * r + 0.587 * g + 0.114 * b < 0.5 else INK
