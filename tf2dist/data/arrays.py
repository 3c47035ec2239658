"""The data as arrays in memory, by name."""

import contextlib
import functools
import gzip
import os
import re
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf2dist.config.schema import DataConfig
from tf2dist.data import cache, location
from tf2dist.data.location import mnist_dir, mnist_files
from tf2dist.errors import DataError, first_line, kind_of
from tf2dist.registry import DATA, call, look_up, register_data

# AutoGraph's rewriting takes longer than the tracing, and a task that is killed leaves the new source in /tmp.
NO_AUTOGRAPH = tf.autograph.experimental.do_not_convert


@dataclass(frozen=True)
class Arrays:
    """`images`: uint8 [n, ...]; `labels`: integers [n]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The images and labels of some examples."""
        return self.images.take(index, axis=0), self.labels.take(index)


@dataclass(frozen=True)
class Splits:
    train: Arrays
    validation: Arrays
    test: Arrays
    num_classes: int = 10

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train.images.shape[1:]


def load(config: DataConfig) -> Splits:
    """Loads the data set that `config.name` chooses.

    Raises:
        ConfigError: nothing is registered under that name, or it takes no such arguments.
        DataError: it is missing, or is not as `Splits` and `Arrays` describe it.
    """
    function, name = look_up(DATA, "data", config.name), f"data ({config.name})"
    splits: Splits = call("data", config.name, functools.partial(function, config), config.arguments, {})
    if not isinstance(splits, Splits):
        raise DataError(
            f"{name}: its function gives {kind_of(splits)}, and must give tf2dist.data.Splits of three Arrays"
        )
    num_classes = splits.num_classes
    if isinstance(splits.test, Arrays) and not len(splits.test):
        raise DataError(f"{name}: test has no examples, and the result is that of a test; give it some")
    return Splits(
        train=_checked(f"{name}: train", splits.train, num_classes),
        validation=_checked(f"{name}: validation", splits.validation, num_classes),
        test=_checked(f"{name}: test", splits.test, num_classes),
        num_classes=num_classes,
    )


def _checked(name: str, arrays: Arrays, num_classes: int) -> Arrays:
    if not isinstance(arrays, Arrays):
        raise DataError(f"{name} is {kind_of(arrays)}, and must be tf2dist.data.Arrays of images and labels")
    images, labels = np.ascontiguousarray(arrays.images), np.asanyarray(arrays.labels)
    if images.dtype != np.uint8 or images.ndim < 2:
        raise DataError(f"{name} images ({images.dtype} {images.shape}): must be uint8 [n, ...]")
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        raise DataError(f"{name} labels ({labels.dtype} {labels.shape}): must be integers [{len(images)}]")
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise DataError(f"{name} labels ({labels.min()} to {labels.max()}): must be from 0 to {num_classes - 1}")
    return Arrays(images, labels.astype(np.int32))


@register_data("mnist")
def load_mnist(config: DataConfig) -> Splits:
    """MNIST as prepared by tensorflow-datasets; its first training examples become the validation set."""
    files = mnist_files(mnist_dir(config))
    if files is None:
        raise DataError(f"data (mnist): not in {mnist_dir(config)} on this host; set TFDS_DATA_DIR or data.dir")
    train, test = map(_cached, files)
    n = config.num_validation
    validation = Arrays(train.images[:n], train.labels[:n])
    return Splits(Arrays(train.images[n:], train.labels[n:]), validation, test)


@register_data("digits")
def load_digits(config: DataConfig) -> Splits:
    """The UCI digits that scikit-learn ships: 8x8, each pixel drawn as 3x3 with a margin of 2."""
    # Read from the package's own file: importing sklearn.datasets takes longer than training on it.
    with (
        resources.files("sklearn.datasets.data").joinpath("digits.csv.gz").open("rb") as packed,
        gzip.open(packed) as file,
    ):
        table = np.loadtxt(file, delimiter=",", dtype=np.int32)
    table = np.random.default_rng(0).permutation(table)  # the file is ordered by writer
    pixels = (table[:, :-1].reshape(-1, 8, 8) * 255 // 16).astype(np.uint8)
    images = np.pad(pixels.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))[..., None]
    labels = table[:, -1].astype(np.uint8)
    test, validation = 360, 360 + config.num_validation
    parts = [
        Arrays(*pair) for pair in zip(*(np.split(part, [test, validation]) for part in (images, labels)), strict=True)
    ]
    return Splits(train=parts[2], validation=parts[1], test=parts[0])


def _cached(path: Path) -> Arrays:
    """The images and labels of a TFRecord file: decoded once for each user, then mapped from a cache.

    Decoding 60,000 PNG images takes a second in every worker. If the cache cannot be written, every run does it.

    Raises:
        DataError: the file is damaged.
    """
    try:
        folder = cache.folder_of(path)
    except OSError as error:
        raise location.damaged(path, f"cannot be read: {error.strerror}") from None
    if folder is None:
        return _decode(path)
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing or incomplete
        return _mapped(folder)
    is_broken, arrays = os.path.exists(folder), _decode(path)
    with contextlib.suppress(OSError, ValueError, EOFError):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            for name, array in zip(cache.ARRAYS, (arrays.images, arrays.labels), strict=True):
                np.save(made / name, array)
            cache.seal(made)
            if is_broken:
                folder.rename(Path(temporary, "broken"))
            with contextlib.suppress(OSError):  # another task was faster, and its files may be mapped already
                made.rename(folder)
        return _mapped(folder)
    return arrays


def _mapped(folder: Path) -> Arrays:
    """The arrays in a folder of the cache, which the launching process has compared with their hashes.

    Raises:
        OSError, ValueError, EOFError: they are missing or incomplete.
    """
    if not cache.is_sealed(folder):
        raise ValueError(f"{folder} has no hashes")
    return Arrays(*(np.load(folder / name, mmap_mode="r") for name in cache.ARRAYS))


def _decode(path: Path) -> Arrays:
    """The images and labels of a TFRecord file of tensorflow-datasets.

    Raises:
        DataError: it is damaged, or does not hold as many examples as it should.
    """
    expected = location.num_examples(path)
    try:
        arrays = _decode_records(path)
    except tf.errors.OpError as error:
        reason = re.sub(r"\{\{.*?\}\}\s*", "", first_line(str(error)))  # without the names of nodes
        raise location.damaged(path, f"is damaged ({type(error).__name__}: {reason[:100]})") from None
    if len(arrays) != expected:
        raise location.damaged(path, f"has {len(arrays):,} of {expected:,} examples")
    return arrays


def _decode_records(path: Path) -> Arrays:
    """Four times as fast as `tfds.load`, which also has to import more."""
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    @NO_AUTOGRAPH
    def decode(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        examples = tf.io.parse_example(records, features)
        image = tf.TensorSpec([28, 28, 1], tf.uint8)
        images = tf.map_fn(lambda png: tf.io.decode_png(png, 1), examples["image"], fn_output_signature=image)
        return images, tf.cast(examples["label"], tf.uint8)

    with tf.device("CPU:0"):
        records = tf.data.TFRecordDataset(str(path), buffer_size=1 << 20).batch(2000)
        none = np.empty([0, 28, 28, 1], np.uint8), np.empty([0], np.uint8)
        blocks = [none, *records.map(decode, num_parallel_calls=2).as_numpy_iterator()]
    return Arrays(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
