"""What clients of a server see: how long each waits, and which letters of a text come in one step (lesson 9)."""

from collections.abc import Mapping, Sequence

from pagewise.figures.drawing import bare, box, colour_key, rectangle, subplots
from pagewise.figures.palette import BLUE, ORANGE, SAND, TEAL

WAITS = {"fc": "#f6d9c8", "ec": ORANGE, "hatch": "///"}


def waiting_clients(servers: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
    """Draw a panel per server and a row per client: it asks, waits for its first token, and reads its answer.

    `servers`: name → (asked, first token, done) of each client, in steps of the model.
    """
    end = max(done for clients in servers.values() for _, _, done in clients)
    title = "Eight clients ask one model. How long does each wait?"
    with subplots(len(servers), size=(7.2, 1.95 * len(servers) + 0.9), title=title, sharex=True) as (figure, axes):
        for ax, (name, clients) in zip(axes, servers.items(), strict=True):
            for row, (asked, first, done) in enumerate(clients):
                rectangle(ax, asked, row + 0.1, first - asked, 0.8, **WAITS)
                rectangle(ax, first, row + 0.1, max(done - first, 0.6), 0.8, BLUE, lw=0)
            longest = max(first - asked for asked, first, _ in clients)
            last = max(done for _, _, done in clients)
            ax.set_title(
                f"{name}: longest wait {longest} step{'s' * (longest > 1)}, all is done after {last}", fontsize=10
            )
            ax.set(xlim=(0, end + 1), ylim=(len(clients) + 0.1, -0.1), ylabel="client")
            ax.set_yticks([row + 0.5 for row in range(len(clients))], range(1, len(clients) + 1), fontsize=8)
        axes[-1].set_xlabel("steps of the model")
        looks = {"waits for the first token": WAITS, "reads the answer": {"fc": BLUE, "ec": "none"}}
        colour_key(figure, looks, loc="outside lower center", ncols=2, fontsize=9)


def tokens_by_step(runs: Mapping[str, Sequence[str]], width: int = 32) -> None:
    """Draw the letters of a text, a panel per run. Neighbouring letters of one colour come from one step.

    `runs`: name → the piece of text that each step of the model gave.
    """
    length = max(sum(map(len, pieces)) for pieces in runs.values())
    rows = -(-length // width)
    title = "The same text: a change of colour is a step of the model"
    with subplots(len(runs), size=(7.2, (0.33 * rows + 0.45) * len(runs) + 0.4), title=title) as (_, axes):
        for ax, (name, pieces) in zip(axes, runs.items(), strict=True):
            place = 0
            for step, piece in enumerate(pieces):
                for letter in piece:
                    shown = {"\n": "⏎", " ": ""}.get(letter, letter)
                    x, y = place % width, place // width
                    box(ax, x, y, 1, 1, shown, fill=(SAND, TEAL)[step % 2], lw=0.3)
                    place += 1
            ax.set_title(f"{name}: {place} letters in {len(pieces)} steps", fontsize=10)
            ax.set(xlim=(-0.05, width + 0.05), ylim=(rows + 0.05, -0.05), xticks=[], yticks=[])
            bare(ax)
