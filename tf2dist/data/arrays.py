"""The data as arrays in memory, by name."""

import contextlib
import gzip
import hashlib
import os
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf2dist.config import DataConfig
from tf2dist.errors import DataError
from tf2dist.registry import DATA, look_up, register_data
from tf2dist.sources import mnist_dir, mnist_files

# Rewriting functions takes longer than tracing them, and a task that is killed leaves the new source in /tmp.
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
    """Reads the data that `config.name` names.

    Raises:
        ConfigError: nothing is registered under that name.
        DataError: it is not where it should be, or not what `Splits` promises.
    """
    splits: Splits = look_up(DATA, "data", config.name)(config)
    name, num_classes = f"data ({config.name})", splits.num_classes
    return Splits(
        train=_checked(f"{name}: train", splits.train, num_classes),
        validation=_checked(f"{name}: validation", splits.validation, num_classes),
        test=_checked(f"{name}: test", splits.test, num_classes),
        num_classes=num_classes,
    )


def _checked(name: str, arrays: Arrays, num_classes: int) -> Arrays:
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
    """MNIST as tensorflow-datasets has prepared it; its first examples are the validation set."""
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
    table = np.random.default_rng(0).permutation(table)  # the file is in the order of the writers
    pixels = (table[:, :-1].reshape(-1, 8, 8) * 255 // 16).astype(np.uint8)
    images = np.pad(pixels.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))[..., None]
    labels = table[:, -1].astype(np.uint8)
    test, validation = 360, 360 + config.num_validation
    parts = [
        Arrays(*pair) for pair in zip(*(np.split(part, [test, validation]) for part in (images, labels)), strict=True)
    ]
    return Splits(train=parts[2], validation=parts[1], test=parts[0])


def _cached(path: Path) -> Arrays:
    """The decoded images and labels of a TFRecord file, decoded once for each user and mapped from then on.

    Decoding 60,000 PNG images takes a second in every worker; where the cache cannot be written, it is done again.
    """
    status = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tf2dist"
    folder = root / f"{path.name.split('.')[0]}-{key}"
    with contextlib.suppress(OSError, ValueError, EOFError):  # not there, or not whole
        return _mapped(folder)
    is_broken, arrays = folder.exists(), _decode(path)
    with contextlib.suppress(OSError, ValueError, EOFError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            for name, array in (("images", arrays.images), ("labels", arrays.labels)):
                np.save(made / f"{name}.npy", array)
            if is_broken:
                folder.rename(Path(temporary, "broken"))
            with contextlib.suppress(OSError):  # another task was faster, and what it has made may be mapped already
                made.rename(folder)
        return _mapped(folder)
    return arrays


def _mapped(folder: Path) -> Arrays:
    return Arrays(np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "labels.npy", mmap_mode="r"))


def _decode(path: Path) -> Arrays:
    """Decodes a TFRecord file of tensorflow-datasets; 4 times as fast as `tfds.load`, which imports more too."""
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    @NO_AUTOGRAPH
    def decode(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        examples = tf.io.parse_example(records, features)
        image = tf.TensorSpec([28, 28, 1], tf.uint8)
        images = tf.map_fn(lambda png: tf.io.decode_png(png, 1), examples["image"], fn_output_signature=image)
        return images, tf.cast(examples["label"], tf.uint8)

    with tf.device("CPU:0"):
        records = tf.data.TFRecordDataset(str(path), buffer_size=1 << 20).batch(2000)
        blocks = list(records.map(decode, num_parallel_calls=2).as_numpy_iterator())
    return Arrays(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
