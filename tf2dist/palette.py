"""The colours, dashes and markers of all pictures: the same mode looks the same everywhere.

The colours are those of Masataka Okabe and Kei Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/,
which people of every kind of colour vision can tell apart.
"""

from dataclasses import dataclass

# Those of the eight that are dark enough for thin lines on white, without the reddish purple.
BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072b2", "#d55e00", "#009e73"


@dataclass(frozen=True)
class Style:
    """How a line looks; `dash` and `marker` as matplotlib names them, so that it is known without its colour, too."""

    colour: str
    dash: str
    marker: str


# A dotted line is a target, so no mode has one.
MODE_STYLES = {
    "async": Style(VERMILLION, "-", "o"),
    "sync": Style(BLUE, "--", "s"),
    "sync_replicas": Style(GREEN, "-.", "^"),
}
SPLIT_STYLES = {
    "training": Style(BLUE, "-", "o"),
    "validation": Style(VERMILLION, "--", "s"),
    "test": Style(BLACK, ":", "D"),
}
