"""Loads a data set by its name, and makes up the clicks; the data sets of tf2dist itself are registered here.

The clicks are of users to whom items are shown. The true probability of each click is known, and with it the best
possible AUC. Ids follow Zipf's law: id k comes up about as often as 1 / (k + 1), user 0 and item 0 most often. Each
user has a taste and each item has traits, both FACTORS hidden numbers, and each impression has four visible numbers,
its context. A user clicks with the probability

    sigmoid(BIAS + TASTE * taste . traits / sqrt(FACTORS) + CONTEXT . context)

Hidden numbers are a hash of the id, so nothing here is as large as a table with a row for each id.
"""

import functools
import gzip

import numpy as np

from tf2dist.config.schema import DataConfig
from tf2dist.data import image_files
from tf2dist.data.arrays import Arrays
from tf2dist.data.known import IMAGES
from tf2dist.data.location import digits_file
from tf2dist.data.mnist import decoded
from tf2dist.data.splits import NoiselessLabels, OwnSplits, Splits, checked
from tf2dist.errors import DataError, kind_of
from tf2dist.registry import DATA, call, look_up, register_data

FACTORS = 2  # hidden numbers of a user and of an item
BIAS, TASTE = -1.0, 2.0
CONTEXT = np.array([0.8, -0.4, 0.2, 0.0], np.float32)
USERS, ITEMS = 0, 1  # tell the hashes of users and items apart


def make_impressions(
    num: int, num_users: int, num_items: int, seed: int = 0, sample: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Impressions and their clicks.

    Args:
        seed: of the hidden numbers and the draws.
        sample: other numbers give other impressions of the same users and items.

    Returns:
        x: "user" and "item", int32 [num], and "context", float32 [num, 4].
        y: 1 for a click or 0, float32 [num, 1].
        probabilities: of the clicks, float32 [num, 1].
    """
    draws = np.random.default_rng([seed, sample])
    x = {
        "user": zipf_ids(draws, num, num_users),
        "item": zipf_ids(draws, num, num_items),
        "context": draws.standard_normal((num, len(CONTEXT)), np.float32),
    }
    match = np.einsum("nf,nf->n", hidden_numbers(x["user"], seed, USERS), hidden_numbers(x["item"], seed, ITEMS))
    logits = BIAS + match * np.float32(TASTE / FACTORS**0.5) + x["context"] @ CONTEXT
    probabilities = 1 / (1 + np.exp(-logits[:, None]))
    return x, (draws.random(probabilities.shape, np.float32) < probabilities).astype(np.float32), probabilities


def zipf_ids(draws: np.random.Generator, num: int, size: int) -> np.ndarray:
    """Ids below `size`, int32 [num]: id k has the probability log((k + 2) / (k + 1)) / log(size + 1)."""
    # The inverse of the distribution function: no array has an element for each id. Rounding could give `size`.
    ids: np.ndarray = np.exp(draws.random(num) * np.log(size + 1)).astype(np.int32) - 1
    return ids.clip(0, size - 1)


def hidden_numbers(ids: np.ndarray, seed: int, kind: int) -> np.ndarray:
    """The numbers of users or items, float32 [n, FACTORS]: uniform, with mean 0 and variance 1."""
    (offset,) = np.random.SeedSequence([seed, kind]).generate_state(1, np.uint64)
    # The generator SplitMix64, whose n-th number is a hash of n.
    z = ids[:, None].astype(np.uint64) * np.uint64(FACTORS) + np.arange(1, FACTORS + 1, dtype=np.uint64)
    z = z * np.uint64(0x9E3779B97F4A7C15) + offset
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    fractions: np.ndarray = (z >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    return (fractions - np.float32(0.5)) * np.float32(12**0.5)


def area_under_curve(y: np.ndarray, scores: np.ndarray) -> float:
    """The share of pairs of a click and no click in which the click has the higher score; NaN without a pair."""
    clicked = y.ravel()[np.argsort(scores.ravel())] > 0
    num_pairs = np.count_nonzero(clicked) * np.count_nonzero(~clicked)
    return int(np.cumsum(~clicked)[clicked].sum()) / num_pairs if num_pairs else float("nan")


def load(config: DataConfig) -> Splits:
    """Loads the data set that `config.name` chooses.

    Raises:
        ConfigError: nothing is registered under that name, or it takes no such arguments.
        DataError: the data is missing, or is not as `Splits` and `Arrays` describe it.
    """
    function, name = look_up(DATA, "data", config.name), f"data ({config.name})"
    splits: Splits = call("data", config.name, functools.partial(function, config), config.arguments, {})
    if not isinstance(splits, Splits):
        raise DataError(
            f"{name}: its function gives {kind_of(splits)}, and must give tf2dist.data.Splits of three Arrays"
        )
    splits = checked(name, splits)
    # A run of the command ends with a test. `fit` does not, so `checked` lets the split be missing.
    if "test" not in splits.sizes():
        raise DataError(f"{name}: test has no examples, and the result is that of a test; give it some")
    return splits


def load_images(config: DataConfig) -> Splits:
    """A data set of images that lies in files; its first training examples become the validation set."""
    # Nothing is downloaded here: the launching process has done that, before any task has started.
    if not (found := image_files.find(config)):
        folder = image_files.tfds_dir(config)
        raise DataError(f"data ({config.name}): not in {folder} on this host; set TFDS_DATA_DIR or data.dir")
    train, test = (decoded(config.name, files) for files in (found.train, found.test))
    n = config.num_validation
    return Splits(train[n:], train[:n], test)


for _name in IMAGES:
    register_data(_name)(load_images)


@register_data("digits")
def load_digits(config: DataConfig) -> Splits:
    """The UCI digits that scikit-learn ships: 8x8 pixels, each drawn as 3x3, with a margin of 2 pixels."""
    with gzip.open(digits_file()) as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int32)
    table = np.random.default_rng(0).permutation(table)  # the file is ordered by writer
    # The file has grey levels from 0 to 16.
    pixels = (table[:, :-1].reshape(-1, 8, 8) * 255 // 16).astype(np.uint8)
    images = np.pad(pixels.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))[..., None]
    labels = table[:, -1].astype(np.uint8)
    test, validation = 360, 360 + config.num_validation
    parts = [
        Arrays(*pair) for pair in zip(*(np.split(part, [test, validation]) for part in (images, labels)), strict=True)
    ]
    return Splits(train=parts[2], validation=parts[1], test=parts[0])


@register_data("parabola")
def load_parabola(config: DataConfig, points: int = 200, noise: float = 0.1) -> Splits:
    """Points of y = x^2 + normal noise, x and y float32 [n, 1]; the test set has the same x and noise of its own."""
    x = np.linspace(-1, 1, points, dtype=np.float32)[:, None]
    curve = x**2
    train, test = (curve + np.random.default_rng(seed).normal(0, noise, x.shape).astype(np.float32) for seed in (0, 1))
    return OwnSplits(Arrays(x, train), None, Arrays(x, test), num_classes=None, truth=NoiselessLabels(curve, noise))


@register_data("clicks")
def load_clicks(config: DataConfig, num_users: int, num_items: int, num_impressions: int, seed: int) -> Splits:
    """Made-up clicks of `make_impressions`; the test set has a twentieth of `num_impressions` more."""
    sizes, n = (num_users, num_items, seed), config.num_validation
    x, y, probabilities = make_impressions(num_impressions, *sizes)
    test_x, test_y, test_probabilities = make_impressions(num_impressions // 20, *sizes, sample=1)
    evaluated = {"validation": (y[:n], probabilities[:n]), "test": (test_y, test_probabilities)}
    aucs = [f"{area_under_curve(*pair):.4f} on the {name} set" for name, pair in evaluated.items() if len(pair[0])]
    train = Arrays(x, y)
    note = f"the AUC of the true probabilities is {', '.join(aucs)}"
    return OwnSplits(train[n:], train[:n], Arrays(test_x, test_y), num_classes=None, note=note)
