"""What `predict` draws: mistakes stand out, and each picture says whose it is and what came of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tf2dist.palette import BLUE, VERMILLION
from tf2dist.tools.finished.pictures import confusion_figure, drawn, predictions_figure, regression_figure


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def cells(figure: Figure) -> np.ndarray:
    """The colours of the cells of the matrix, [classes, classes, 4]."""
    (image,) = figure.axes[0].images
    return np.asarray(image.to_rgba(np.ma.asarray(image.get_array())))


def lightness(colours: np.ndarray) -> np.ndarray:
    return colours[..., :3] @ [0.2126, 0.7152, 0.0722]


def test_few_mistakes_are_visible_in_the_confusion_matrix(tmp_path: Path) -> None:
    """1% of a class is as dark as it can be where no other mistake is more frequent, and half of it is in between."""
    counts = np.diag([1000] * 10)
    counts[3, 5], counts[7, 2] = 10, 5
    figure = confusion_figure(tmp_path, counts)
    assert figure.axes[0].get_title(loc="left") == f"{tmp_path.name}: accuracy 0.9985 over 10,015 examples"
    light = lightness(cells(figure))
    most, half, none = light[3, 5], light[7, 2], light[0, 1]
    assert none - most > 0.5
    assert none - half > 0.25
    written = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    assert (written[(5, 3)], written[(2, 7)], written[(0, 0)]) == ("10", "5", "1,000")
    assert (1, 0) not in written, "there is no mistake to count"


def test_the_right_ones_have_no_colour_in_the_confusion_matrix(tmp_path: Path) -> None:
    figure = confusion_figure(tmp_path, np.array([[5, 1], [0, 7]]))
    assert cells(figure)[0, 0, 3] == 0, "the grey of the background is seen"


@pytest.mark.parametrize("counts", [np.diag([5, 3]), np.array([[0, 0], [0, 4]]), np.array([[7]])])
def test_a_model_without_mistakes_has_a_confusion_matrix(counts: np.ndarray, tmp_path: Path) -> None:
    figure = confusion_figure(tmp_path, counts)
    assert len(figure.axes) == 1, "there are no colours to explain"
    assert Path(drawn(tmp_path / "a.png", lambda: figure)).read_bytes().startswith(b"\x89PNG")


def predicted_images(num: int, num_wrong: int, shape: tuple[int, ...] = (28, 28, 1)) -> dict[str, Any]:
    """Images of which some are wrong, the later ones more confidently; every pixel of an image is its number."""
    true = np.arange(num) % 10
    is_wrong = np.arange(num) % (num // num_wrong) == 1 if num_wrong else np.zeros(num, bool)
    images = np.broadcast_to(np.arange(num).reshape(-1, *[1] * len(shape)), (num, *shape)).astype(np.uint8)
    predicted = np.where(is_wrong, (true + 1) % 10, true)
    return {"images": images, "true": true, "predicted": predicted, "confidence": np.linspace(0.4, 1, num)}


def shown(figure: Figure) -> list[SimpleNamespace]:
    """The images in their order: their numbers, titles, colours and where their rows are."""
    return [
        SimpleNamespace(
            number=int(axes.images[0].get_array().max()),  # type: ignore[union-attr]
            title=axes.get_title(),
            colour=to_hex(axes.title.get_color()),
            row=axes.get_subplotspec().rowspan.start,  # type: ignore[union-attr]
            height=axes.get_position(original=True).height,
        )
        for axes in figure.axes
        if axes.images
    ]


def test_the_most_confident_mistakes_are_drawn_first(tmp_path: Path) -> None:
    figure = predictions_figure(tmp_path, **predicted_images(200, 50))
    images = shown(figure)
    mistakes, right = images[:36], images[36:]
    assert [image.number for image in mistakes] == list(range(197, 197 - 4 * 36, -4))
    assert [image.number for image in right] == [0, 2, 3, 4, 6, 7]
    assert {image.colour for image in mistakes} == {VERMILLION}
    assert {image.colour for image in right} == {BLUE}
    assert mistakes[0].title == "8  (99.4%)\nis 7"
    assert {image.title.partition("\n")[2] for image in right} == {"right"}
    title, about = texts(figure)
    assert title == f"{tmp_path.name}: accuracy 0.7500 over 200 examples"
    assert about.startswith("the 36 most confident of 50 mistakes, then 6 right ones; ")


def test_all_rows_have_one_height_and_the_right_ones_their_own(tmp_path: Path) -> None:
    images = shown(predictions_figure(tmp_path, **predicted_images(80, 8)))
    assert [image.row for image in images] == [0] * 6 + [1] * 2 + [2] * 6
    assert len({round(image.height, 6) for image in images}) == 1
    assert {image.title.count("\n") for image in images} == {1}, "a second line would shift the image"


@pytest.mark.parametrize(
    ("num", "num_wrong", "about"),
    [(30, 0, "0 mistakes, then 6 right"), (30, 1, "1 mistake, then 6 right"), (3, 3, "3 mistakes, then 0 right")],
)
def test_few_images_are_drawn_too(num: int, num_wrong: int, about: str, tmp_path: Path) -> None:
    examples = predicted_images(num, num_wrong, (20, 40, 3))
    if num == num_wrong:
        examples["predicted"] = examples["true"] + 1
    figure = predictions_figure(tmp_path, **examples)
    assert texts(figure)[1].startswith(f"{about} ones; ")
    assert len(shown(figure)) == min(num_wrong, 36) + min(6, num - num_wrong)


X = np.linspace(-1, 1, 50)


def regression(tmp_path: Path, truth: Any) -> tuple[Figure, Axes]:
    order = np.random.default_rng(0).permutation(50)
    figure = regression_figure(tmp_path, X[order], X[order] ** 2 + 0.5, X[order] ** 2, truth=truth)
    return figure, figure.axes[0]


def test_a_regression_shows_the_curve_without_noise_and_the_noise(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(50)
    figure, axes = regression(tmp_path, SimpleNamespace(y=X[order, None] ** 2 + 3, noise=0.25))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "test points",
        "95% of the noise",
        "without noise",
        "the model",
    ]
    true, model = axes.lines
    np.testing.assert_allclose(np.asarray(true.get_xydata(), float), np.stack([X, X**2 + 3], axis=1))
    np.testing.assert_allclose(np.asarray(model.get_xydata(), float), np.stack([X, X**2], axis=1))
    band = np.asarray(axes.collections[1].get_paths()[0].vertices)
    assert np.ptp(band[np.isclose(band[:, 0], X[20])][:, 1]) == pytest.approx(1.0), "two standard deviations each side"
    assert texts(figure) == [
        f"{tmp_path.name}: root mean square error 0.500 over 50 test points",
        "a model without any error has that of the noise, 0.25",
    ]


def test_data_whose_truth_is_unknown_are_drawn_without_it(tmp_path: Path) -> None:
    figure, axes = regression(tmp_path, None)
    assert len(axes.lines) == len(axes.collections) == 1
    assert texts(figure)[1] == ""
