"""The data as trees of arrays in memory, by name."""

import contextlib
import functools
import gzip
import os
import re
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config.schema import DataConfig
from tf2dist.data import cache, location
from tf2dist.data.layout import Layout, Tree, leaves_of
from tf2dist.data.location import mnist_dir, mnist_files
from tf2dist.errors import DataError, first_line, kind_of
from tf2dist.registry import DATA, call, look_up, register_data

if TYPE_CHECKING:
    from tf2dist.data.stream import Stream

# AutoGraph's rewriting takes longer than the tracing, and a task that is killed leaves the new source in /tmp.
NO_AUTOGRAPH = tf.autograph.experimental.do_not_convert


@dataclass(frozen=True)
class Arrays:
    """Examples as `keras.Model.fit` takes them: trees (dicts, lists, tuples) of arrays [n, ...], or one array each.

    Attributes:
        x: what the model is given.
        y: what it should give; None for a model whose losses are its own.
        sample_weight: None if all examples count alike.
    """

    x: Tree
    y: Tree = None
    sample_weight: Tree = None

    @functools.cached_property
    def leaves(self) -> list[np.ndarray]:
        """All arrays, in the order of `layout`."""
        return leaves_of((self.x, self.y, self.sample_weight))

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout((self.x, self.y, self.sample_weight))

    def __len__(self) -> int:
        return len(self.leaves[0])

    def __str__(self) -> str:
        return f"{len(self)} of {self.layout}"

    def __getitem__(self, part: slice) -> "Arrays":
        """A range of the examples, not copied."""
        return Arrays(*self.layout.pack([leaf[part] for leaf in self.leaves]))

    def take(self, index: np.ndarray) -> list[np.ndarray]:
        """The leaves of some examples."""
        return [leaf.take(index, axis=0) for leaf in self.leaves]


@dataclass(frozen=True)
class Splits:
    """The data of a run.

    Attributes:
        train: without examples if they come from `stream`.
        validation, test: None, or without examples, if there is no such split.
        num_classes: of a classification; None for other data.
        stream: gives the training set in batches, for data that do not fit into memory.
    """

    train: Arrays
    validation: Arrays | None = None
    test: Arrays | None = None
    num_classes: int | None = 10
    stream: "Stream | None" = None

    @property
    def input_shape(self) -> Any:
        """The shape of one example's x, or a tree of such shapes."""
        return keras.tree.map_structure(lambda array: tuple(array.shape[1:]), self.train.x)

    @property
    def layout(self) -> Layout:
        return self.train.layout

    def sizes(self) -> dict[str, int]:
        """The number of examples of those splits that can be evaluated."""
        found = {"validation": self.validation, "test": self.test}
        return {name: len(arrays) for name, arrays in found.items() if arrays is not None and len(arrays)}


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
    splits = checked(name, splits)
    if "test" not in splits.sizes():
        raise DataError(f"{name}: test has no examples, and the result is that of a test; give it some")
    return splits


def checked(name: str, splits: Splits) -> Splits:
    """The data as the tasks use it: arrays in one piece, floats of Keras' type.

    Args:
        name: of the data, for messages.

    Raises:
        DataError: a split is not as `Arrays` describes it, or not of the same kind as the training set.
    """
    num_classes = splits.num_classes
    train = _checked(f"{name}: train", splits.train, num_classes)
    others: dict[str, Arrays | None] = {"validation": splits.validation, "test": splits.test}
    for split, arrays in others.items():
        if arrays is None:
            continue
        others[split] = found = _checked(f"{name}: {split}", arrays, num_classes)
        if len(found) and found.layout != train.layout:
            raise DataError(f"{name}: {split} is {found.layout}, and train is {train.layout}; give both the same kind")
    return Splits(train, others["validation"], others["test"], num_classes)


def _checked(name: str, arrays: Arrays, num_classes: int | None) -> Arrays:
    if not isinstance(arrays, Arrays):
        raise DataError(f"{name} is {kind_of(arrays)}, and must be tf2dist.data.Arrays of x and y")
    if not leaves_of(arrays.x):
        raise DataError(f"{name} x ({kind_of(arrays.x)}): must be an array of numbers or strings [n, ...]")
    leaves = [_standard(f"{name} {path}", leaf) for path, leaf in _paths(arrays)]
    if len({len(leaf) for leaf in leaves}) > 1:
        shown = ", ".join(f"{path}: {len(leaf)}" for (path, _), leaf in zip(_paths(arrays), leaves, strict=True))
        raise DataError(f"{name} has arrays of several lengths ({shown}); give each one the same number of examples")
    left, tree = iter(leaves), (arrays.x, arrays.y, arrays.sample_weight)
    found = Arrays(*keras.tree.map_structure(lambda leaf: None if leaf is None else next(left), tree))
    y = found.y
    if num_classes and isinstance(y, np.ndarray) and y.ndim == 1 and len(y):
        if not np.issubdtype(y.dtype, np.integer):
            raise DataError(
                f"{name} y ({y.dtype} {y.shape}): must be integers [{len(y)}], the classes; if it is something "
                "else, give Splits num_classes=None"
            )
        if not 0 <= y.min() <= y.max() < num_classes:
            raise DataError(f"{name} y ({y.min()} to {y.max()}): must be from 0 to {num_classes - 1}")
        return Arrays(found.x, y.astype(np.int32), found.sample_weight)
    return found


def _paths(arrays: Arrays) -> list[tuple[str, Any]]:
    """Each leaf with its place, such as "x[1]"; the number counts the leaves of its part."""
    found = []
    for part in ("x", "y", "sample_weight"):
        leaves = leaves_of(getattr(arrays, part))
        names = [part] if len(leaves) == 1 else [f"{part}[{number}]" for number in range(len(leaves))]
        found += list(zip(names, leaves, strict=True))
    return found


def _standard(name: str, leaf: Any) -> np.ndarray:
    """An array in one piece; floats as Keras' floatx, words as bytes, which TensorFlow's strings are."""
    array = np.asanyarray(leaf)
    if array.ndim < 1 or array.dtype.kind not in "biufSUO":
        raise DataError(f"{name} ({array.dtype} {array.shape}): must be an array of numbers or strings [n, ...]")
    if array.dtype.kind == "f":
        array = array.astype(keras.config.floatx(), copy=False)
    elif array.dtype.kind in "UO":
        words = array.ravel().tolist()
        if not all(isinstance(word, str | bytes) for word in words):
            raise DataError(f"{name} ({array.dtype} {array.shape}): must hold numbers or strings")
        as_bytes = [word.encode() if isinstance(word, str) else word for word in words]
        array = np.array(as_bytes, np.bytes_).reshape(array.shape)
    return np.ascontiguousarray(array) if not array.flags.c_contiguous else array


@register_data("mnist")
def load_mnist(config: DataConfig) -> Splits:
    """MNIST as prepared by tensorflow-datasets; its first training examples become the validation set."""
    files = mnist_files(mnist_dir(config))
    if files is None:
        raise DataError(f"data (mnist): not in {mnist_dir(config)} on this host; set TFDS_DATA_DIR or data.dir")
    train, test = map(_cached, files)
    n = config.num_validation
    return Splits(train[n:], train[:n], test)


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


@register_data("parabola")
def load_parabola(config: DataConfig, points: int = 200, noise: float = 0.1) -> Splits:
    """Points of y = x^2 + normal noise, x and y float32 [n, 1]; those of the test are as many others."""
    x = np.linspace(-1, 1, points, dtype=np.float32)[:, None]
    train, test = (x**2 + np.random.default_rng(seed).normal(0, noise, x.shape).astype(np.float32) for seed in (0, 1))
    return Splits(Arrays(x, train), None, Arrays(x, test), num_classes=None)


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
            for name, array in zip(cache.ARRAYS, arrays.leaves, strict=True):
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
