"""Loads a data set by its name; the data sets of tf2dist itself are registered here."""

import functools
import gzip
from importlib import resources

import numpy as np

from tf2dist.config.schema import DataConfig
from tf2dist.data import clicks
from tf2dist.data.arrays import Arrays, Splits, Truth, checked
from tf2dist.data.location import mnist_dir, mnist_files
from tf2dist.data.mnist import decoded
from tf2dist.errors import DataError, kind_of
from tf2dist.registry import DATA, call, look_up, register_data


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


@register_data("mnist")
def load_mnist(config: DataConfig) -> Splits:
    """MNIST as prepared by tensorflow-datasets; its first training examples become the validation set."""
    # Nothing is downloaded here: the launching process has done that, before any task has started.
    files = mnist_files(mnist_dir(config))
    if files is None:
        raise DataError(f"data (mnist): not in {mnist_dir(config)} on this host; set TFDS_DATA_DIR or data.dir")
    train, test = map(decoded, files)
    n = config.num_validation
    return Splits(train[n:], train[:n], test)


@register_data("digits")
def load_digits(config: DataConfig) -> Splits:
    """The UCI digits that scikit-learn ships: 8x8 pixels, each drawn as 3x3, with a margin of 2 pixels."""
    # Read from the package's own file: importing sklearn.datasets takes longer than training on it.
    with (
        resources.files("sklearn.datasets.data").joinpath("digits.csv.gz").open("rb") as packed,
        gzip.open(packed) as file,
    ):
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
    return Splits(Arrays(x, train), None, Arrays(x, test), num_classes=None, truth=Truth(curve, noise))


@register_data("clicks")
def load_clicks(config: DataConfig, num_users: int, num_items: int, num_impressions: int, seed: int) -> Splits:
    """Made-up clicks of `clicks.make_impressions`; the test set has a twentieth of `num_impressions` more."""
    sizes, n = (num_users, num_items, seed), config.num_validation
    x, y, probabilities = clicks.make_impressions(num_impressions, *sizes)
    test_x, test_y, test_probabilities = clicks.make_impressions(num_impressions // 20, *sizes, sample=1)
    evaluated = {"validation": (y[:n], probabilities[:n]), "test": (test_y, test_probabilities)}
    aucs = [
        f"{clicks.area_under_curve(*pair):.4f} on the {name} set" for name, pair in evaluated.items() if len(pair[0])
    ]
    train = Arrays(x, y)
    note = f"the AUC of the true probabilities is {', '.join(aucs)}"
    return Splits(train[n:], train[:n], Arrays(test_x, test_y), num_classes=None, note=note)
