"""Draws predictions, confusion matrices and curves into PNG files."""

import io
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tf2dist.errors import ConfigError
from tf2dist.files import write_whole

# Draws without a screen, whatever the user's matplotlibrc names.
matplotlib.use("agg")

COLUMNS = 6
NUM_DRAWN = COLUMNS * COLUMNS
RIGHT, WRONG = "#2f6f4f", "#c0392b"
MOST_NUMBERS = 20  # with more classes the cells of the matrix have no room for a number


def are_images(x: np.ndarray) -> bool:
    """Whether an array [n, ...] has the shape of images."""
    return x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3, 4))


def draw_predictions(
    run_dir: Path, images: np.ndarray, true: np.ndarray, predicted: np.ndarray, confidence: np.ndarray
) -> Path:
    """Draws the first 36 images into predictions.png, with class and probability; the wrong ones in a red frame.

    Args:
        images: [n, height, width] or [n, height, width, channels].
        true, predicted: class numbers, [n].
        confidence: the probability of the predicted class, [n].
    """
    figure = Figure(figsize=(9, 10), layout="constrained")
    for number, axes in enumerate(figure.subplots(COLUMNS, COLUMNS).flat):
        axes.set(xticks=[], yticks=[])
        if number >= len(images):
            axes.set_axis_off()
            continue
        image = images[number]
        # matplotlib clips floats above 1.
        if image.dtype.kind == "f" and image.max() > 1:
            image = image / 255
        is_grey = image.ndim == 2 or image.shape[-1] == 1
        axes.imshow(image.reshape(image.shape[:2]) if is_grey else image, cmap="gray" if is_grey else None)
        is_right = true[number] == predicted[number]
        text = f"{predicted[number]}  {confidence[number]:.0%}" + ("" if is_right else f"\nis {true[number]}")
        axes.set_title(text, fontsize=10, color=RIGHT if is_right else WRONG)
        for spine in axes.spines.values():
            spine.set(color=RIGHT if is_right else WRONG, linewidth=1 if is_right else 3)
    return _save(figure, run_dir / "predictions.png")


def draw_confusion(run_dir: Path, counts: np.ndarray) -> Path:
    """Draws the confusion matrix into confusion.png, each row coloured by its shares."""
    num_classes = len(counts)
    # Shares, since the colours of counts would hide rare classes. A class without examples is divided by 1.
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure = Figure(figsize=(7, 6.2), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted class", ylabel="true class")
    figure.colorbar(drawn, ax=axes, label="share of the true class")
    if num_classes <= MOST_NUMBERS:
        axes.set(xticks=range(num_classes), yticks=range(num_classes))
        for (row, column), count in np.ndenumerate(counts):
            if count:
                # Readable on the dark half of the colours, too.
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=8, color=color)
    return _save(figure, run_dir / "confusion.png")


def draw_curve(run_dir: Path, x: np.ndarray, y: np.ndarray, line: np.ndarray, predicted: np.ndarray) -> Path:
    """Draws points (x, y) and the curve of a model (line, predicted), all [n], into regression.png."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(x, y, s=12, color="#7a8793", label="training points")
    axes.plot(line, predicted, color=WRONG, linewidth=2.5, label="the model")
    axes.set(xlabel="x", ylabel="y")
    axes.legend()
    return _save(figure, run_dir / "regression.png")


def _save(figure: Figure, path: Path) -> Path:
    """Writes the picture whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    # Through memory: `savefig` on a path would follow a link and leave half a file on a full disk.
    with io.BytesIO() as buffer:
        figure.savefig(buffer, format="png", dpi=110)
        try:
            write_whole(path, buffer.getvalue())
        except OSError as error:
            raise ConfigError(
                f"RUN_DIR ({path.parent}): {path.name} cannot be written ({error.strerror}); make room"
            ) from None
    return path
