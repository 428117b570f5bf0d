"""The parts of a figure that tests look at."""


def texts(ax):
    return [text.get_text() for text in ax.texts]


def arrows(ax):
    return [text for text in ax.texts if getattr(text, "arrow_patch", None)]


def titles(figure):
    return [ax.get_title(loc="left") for ax in figure.axes]
