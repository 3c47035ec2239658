"""The pictures of what a finished model predicts: mistakes among classes, images, a curve."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tf2dist.files import raising, write_whole
from tf2dist.launch.console import number_of
from tf2dist.palette import BLACK, BLUE, SPLIT_STYLES, VERMILLION
from tf2dist.tools.plotting import GREY, as_png, own_look, set_head, set_style

if TYPE_CHECKING:
    from tf2dist.data.splits import NoiselessLabels  # imports Keras

MAX_MISTAKES, NUM_RIGHT, IMAGES_A_ROW = 36, 6, 6  # of predictions.png
ROW_INCHES, HEAD_INCHES, TEXT_INCHES, IMAGES_WIDTH = 1.75, 0.75, 0.42, 9.0
RIGHT, WRONG = BLUE, VERMILLION
MAX_NUMBERED_CLASSES = 20  # with more the cells of the confusion matrix have no room for a number
BAND = 2.0  # standard deviations of the noise, within which 95% of it lie


def drawn(path: Path, draw: Callable[[], Figure]) -> str:
    """Draws into a file, which is written whole or not at all; returns its path."""
    with own_look(), raising(f"RUN_DIR ({path.parent}): {path.name} cannot be written", "make room"):
        write_whole(path, as_png(draw()))
    return str(path)


def are_images(x: np.ndarray) -> bool:
    """Whether an array [n, ...] has the shape of images."""
    return x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3, 4))


def predictions_figure(
    run_dir: Path, images: np.ndarray, true: np.ndarray, predicted: np.ndarray, confidence: np.ndarray
) -> Figure:
    """Images: the mistakes of which the model is most confident, then a few right ones.

    The right ones begin a row of their own; all rows have one height.

    Args:
        images: [n, height, width] or [n, height, width, channels].
        true, predicted: class numbers, [n].
        confidence: the probability of the predicted class, [n].
    """
    wrong, right = np.flatnonzero(true != predicted), np.flatnonzero(true == predicted)
    mistakes = wrong[np.argsort(-confidence[wrong], kind="stable")][:MAX_MISTAKES]
    cells = [*mistakes, *[None] * (-len(mistakes) % IMAGES_A_ROW), *right[:NUM_RIGHT]]
    num_rows = -(-len(cells) // IMAGES_A_ROW)
    height = HEAD_INCHES + ROW_INCHES * num_rows
    figure = Figure(figsize=(IMAGES_WIDTH, height))
    figure.subplots_adjust(
        left=0.02,
        right=0.98,
        top=1 - (HEAD_INCHES + TEXT_INCHES) / height,
        bottom=0.08 / height,
        hspace=(TEXT_INCHES + 0.08) / (ROW_INCHES - TEXT_INCHES - 0.08),
    )
    mistaken = f"the {len(mistakes)} most confident of {len(wrong):,} mistakes"
    shown = mistaken if len(wrong) > len(mistakes) else number_of(len(wrong), "mistake")
    about = f"{shown}, then {len(right[:NUM_RIGHT])} right ones; above each what the model says, and how surely"
    set_head(figure, [_title(run_dir, len(right), len(true))], [about])
    for axes, number in zip(figure.subplots(num_rows, IMAGES_A_ROW, squeeze=False).flat, cells, strict=False):
        if number is None:
            axes.set_axis_off()
        else:
            _draw_image(axes, images[number], true[number], predicted[number], confidence[number])
    for axes in figure.axes[len(cells) :]:
        axes.set_axis_off()
    return figure


def _title(run_dir: Path, num_right: int, num_examples: int) -> str:
    return f"{run_dir.resolve().name}: accuracy {num_right / num_examples:.4f} over {num_examples:,} examples"


def _draw_image(axes: Axes, image: np.ndarray, true: int, predicted: int, confidence: float) -> None:
    """Draws one image with the class and probability that the model gave it, in a frame."""
    # matplotlib clips floats above 1.
    if image.dtype.kind == "f" and image.max() > 1:
        image = image / 255
    is_grey = image.ndim == 2 or image.shape[-1] == 1
    axes.imshow(image.reshape(image.shape[:2]) if is_grey else image, cmap="gray" if is_grey else None)
    axes.set(xticks=[], yticks=[])
    is_right = true == predicted
    color = RIGHT if is_right else WRONG
    axes.set_title(
        f"{predicted}  ({confidence:.1%})\n{'right' if is_right else f'is {true}'}", fontsize=10, color=color
    )
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=1 if is_right else 3)


def confusion_figure(run_dir: Path, counts: np.ndarray) -> Figure:
    """The confusion matrix, [classes, classes], with the mistakes coloured by their share of the true class.

    The diagonal would hide them, so it has no colour.
    """
    num_classes = len(counts)
    is_right = np.eye(num_classes, dtype=bool)
    # Shares, since the colours of counts would hide rare classes. A class without examples is divided by 1.
    shares = np.ma.array(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), mask=is_right)
    most = shares.max() or 1.0
    figure = Figure(figsize=(7.4, 6.6), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1))
    axes = figure.subplots()
    axes.set_facecolor("#dddddd")  # of the diagonal
    # The root, since one class that is often mistaken would hide the others.
    drawn = axes.imshow(shares, cmap="Oranges", norm=PowerNorm(0.5, 0, most))
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(
        _title(run_dir, counts.trace(), counts.sum()),
        fontsize=12,
        weight="bold",
        loc="left",
        parse_math=False,
        wrap=True,
    )
    if shares.max():
        label = "mistakes: share of the true class (square root scale); grey: right"
        figure.colorbar(drawn, ax=axes, label=label, shrink=0.9, format=PercentFormatter(1.0))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(min(num_classes, MAX_NUMBERED_CLASSES), integer=True))
    if num_classes <= MAX_NUMBERED_CLASSES:
        axes.set(xticks=range(num_classes), yticks=range(num_classes))
        for (row, column), count in np.ndenumerate(counts):
            if count:
                # Readable on the dark half of the colours, too.
                is_dark = row != column and shares[row, column] > most / 2
                weight = "bold" if row == column else "normal"
                color = "white" if is_dark else "black"
                axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=8, color=color, weight=weight)
    return figure


def regression_figure(
    run_dir: Path, x: np.ndarray, y: np.ndarray, predicted: np.ndarray, *, truth: "NoiselessLabels | None"
) -> Figure:
    """The points (x, y) and the model's curve through (x, predicted), all [n]."""
    figure = Figure(figsize=(9, 5))
    figure.subplots_adjust(left=0.08, right=0.975, top=1 - 1.1 / 5, bottom=0.11)
    error = float(np.sqrt(np.mean(np.square(predicted - y))))
    lines = [f"a model without any error has that of the noise, {truth.noise:.3g}"] if truth else []
    title = f"{run_dir.resolve().name}: root mean square error {error:#.3g} over {len(x):,} test points"
    set_head(figure, [title], lines)
    axes = figure.subplots()
    set_style(axes)
    order = x.argsort()
    axes.scatter(x, y, s=12, color=GREY, label="test points")
    if truth:
        y_true = truth.y.reshape(-1)[order]
        width = BAND * truth.noise
        axes.fill_between(
            x[order], y_true - width, y_true + width, color=GREY, alpha=0.15, lw=0, label="95% of the noise"
        )
        axes.plot(x[order], y_true, color=BLACK, ls=":", lw=1.6, label="without noise")
    axes.plot(x[order], predicted[order], color=SPLIT_STYLES["training"].colour, lw=2, label="the model")
    axes.set(xlabel="x", ylabel="y")
    axes.margins(x=0.02)
    figure.legend(loc="lower left", bbox_to_anchor=(0.07, 1 - 1.1 / 5), ncols=4, frameon=False, fontsize=9)
    return figure
