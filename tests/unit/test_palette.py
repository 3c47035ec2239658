"""The styles of the pictures can be told apart by everyone, on paper and on a screen."""

from itertools import combinations

import numpy as np
import pytest

from tf2dist.config.schema import MODES
from tf2dist.palette import MODE_STYLES, SPLIT_STYLES, Style

# What dichromats see of linear RGB: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of
# Color Vision Deficiency" (2009), severity 1.
VISIONS = {
    "common": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
# From linear sRGB to XYZ, and the white of both: IEC 61966-2-1.
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(axis=1)
MIN_DIFFERENCE = 35.0  # in CIELAB, where 2.3 is the least that is seen
MIN_CONTRAST = 3.0  # of WCAG 2.2, 1.4.11, for parts of a picture


def linear(colour: str) -> np.ndarray:
    """[3], red, green and blue from 0 to 1, proportional to the light."""
    encoded = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def lab(colour: str, vision: str) -> np.ndarray:
    ratios = TO_XYZ @ np.clip(VISIONS[vision] @ linear(colour), 0, 1) / WHITE
    x, y, z = np.where(ratios > (6 / 29) ** 3, np.cbrt(ratios), ratios / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("styles", [MODE_STYLES, SPLIT_STYLES], ids=["modes", "splits"])
def test_styles_are_told_apart_with_and_without_colours(styles: dict[str, Style]) -> None:
    for vision in VISIONS:
        for one, other in combinations(styles.values(), 2):
            assert difference(one.colour, other.colour, vision) >= MIN_DIFFERENCE, (vision, one, other)
    for style in styles.values():
        assert contrast(style.colour, "#ffffff") >= MIN_CONTRAST, style
    for of_all in ([style.dash for style in styles.values()], [style.marker for style in styles.values()]):
        assert len(set(of_all)) == len(styles)


def test_the_measure_sees_what_dichromats_confuse() -> None:
    """The brown and the green that async and sync_replicas once had."""
    assert difference("#c2571a", "#2f7d4f", "common") > 2 * MIN_DIFFERENCE
    assert difference("#c2571a", "#2f7d4f", "protanopia") < MIN_DIFFERENCE
    assert contrast("#f0e442", "#ffffff") < MIN_CONTRAST


def test_every_mode_has_a_style() -> None:
    assert set(MODE_STYLES) == set(MODES)
