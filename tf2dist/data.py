"""The data as arrays in memory, and the tf.data pipeline that shards, shuffles and batches them.

Which examples a worker sees at its step k is a pure function of the seed and of `Sharding`, so
a run can go on anywhere without a saved shuffle buffer, and N workers with batches of b see the
examples of one worker with batches of N*b.
"""

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
from tf2dist.sources import mnist_dir


@dataclass(frozen=True)
class Arrays:
    """`images`: uint8 [n, height, width, channels]; `labels`: integers [n]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


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
    images, labels = np.asanyarray(arrays.images), np.asanyarray(arrays.labels)
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
    folder = next(iter(sorted(mnist_dir(config).glob("mnist/3.*"))), None)
    if folder is None:
        raise DataError(f"data (mnist): not in {mnist_dir(config)} on this host; set TFDS_DATA_DIR or data.dir")
    train, test = (_cached(next(folder.glob(f"mnist-{split}.tfrecord*"))) for split in ("train", "test"))
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
    try:
        return Arrays(np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "labels.npy", mmap_mode="r"))
    except (OSError, ValueError):  # not there, or not whole
        arrays = _decode(path)
    with contextlib.suppress(OSError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            for name, array in (("images", arrays.images), ("labels", arrays.labels)):
                np.save(f"{temporary}/{name}.npy", array)
            folder.mkdir(exist_ok=True)
            for name in ("images", "labels"):  # each whole or invisible; another task may have been faster
                os.replace(f"{temporary}/{name}.npy", folder / f"{name}.npy")
    return arrays


def _decode(path: Path) -> Arrays:
    """Decodes a TFRecord file of tensorflow-datasets; 4 times as fast as `tfds.load`, which imports more too."""
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def decode(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        examples = tf.io.parse_example(records, features)
        image = tf.TensorSpec([28, 28, 1], tf.uint8)
        images = tf.map_fn(lambda png: tf.io.decode_png(png, 1), examples["image"], fn_output_signature=image)
        return images, tf.cast(examples["label"], tf.uint8)

    with tf.device("CPU:0"):
        records = tf.data.TFRecordDataset(str(path), buffer_size=1 << 20).batch(2000)
        blocks = list(records.map(decode, num_parallel_calls=2).as_numpy_iterator())
    return Arrays(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))


@dataclass(frozen=True)
class Sharding:
    """How the training set is cut into batches.

    Attributes:
        num_examples: of the whole training set.
        batch_size: of one worker.
        num_shards: the number of workers.
        seed: of the permutations; every epoch has its own.
        whole_batch_loss: whether the loss is the mean over the batches of all workers (sync) or
            over the worker's own batch (async). They differ in the last, uneven step of an epoch.
    """

    num_examples: int
    batch_size: int
    num_shards: int
    seed: int
    whole_batch_loss: bool

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.num_shards

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one worker."""
        return -(-self.num_examples // self.global_batch_size)

    @property
    def updates_per_epoch(self) -> int:
        """Batches of all workers in an epoch, without those that would be empty."""
        full_steps, rest = divmod(self.num_examples, self.global_batch_size)
        return full_steps * self.num_shards + min(rest, self.num_shards)

    def epoch_rows(self, epoch: tf.Tensor, shard: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """One epoch of one worker: indices of its examples, int32 [steps, batch], and their weights.

        The weights, float32 [steps, batch], turn a sum over examples into a mean. What is left
        over after the last full step is divided evenly; the places that stay empty hold other
        examples with weight 0, so that every batch has one shape.
        """
        n, batch, shards = self.num_examples, self.batch_size, self.num_shards
        order = tf.random.experimental.stateless_shuffle(tf.range(n), tf.stack([self.seed, epoch]), alg="philox")
        full_steps, rest = divmod(n, self.global_batch_size)
        full = tf.reshape(order[: n - rest], [full_steps, shards, batch])[:, shard]
        scale = self.global_batch_size if self.whole_batch_loss else batch
        weights = tf.fill([full_steps, batch], 1.0 / scale)
        if rest == 0:
            return full, weights
        share = rest // shards + tf.cast(shard < rest % shards, tf.int32)
        first = n - rest + shard * (rest // shards) + tf.minimum(shard, rest % shards)
        last = tf.gather(order, (first + tf.range(batch)) % n)
        count = rest if self.whole_batch_loss else tf.maximum(share, 1)
        last_weights = tf.cast(tf.range(batch) < share, tf.float32) / tf.cast(count, tf.float32)
        return tf.concat([full, last[None]], 0), tf.concat([weights, last_weights[None]], 0)


def batches(
    images: tf.Tensor, labels: tf.Tensor, sharding: Sharding, shard: int | tf.Tensor, first_step: int | tf.Tensor = 0
) -> tf.data.Dataset:
    """An endless dataset of one worker's steps: (images uint8 [batch, ...], labels int32 [batch], weights [batch]).

    It begins at the worker's own step `first_step`. Batches are gathered whole: shuffling elements costs far more.
    """
    return _gathered(_rows(sharding, shard, first_step), images, labels)


def blocks(
    images: tf.Tensor,
    labels: tf.Tensor,
    sharding: Sharding,
    shard: int | tf.Tensor,
    size: int,
    first_step: int | tf.Tensor = 0,
) -> tf.data.Dataset:
    """Like `batches`, `size` steps an element: one call of the iterator for many steps.

    A step that has no example of its own for this worker is left out: its update would do nothing.
    """
    rows = _rows(sharding, shard, first_step).filter(lambda _, weights: weights[0] > 0)
    return _gathered(rows.batch(size, drop_remainder=True), images, labels)


def _rows(sharding: Sharding, shard: int | tf.Tensor, first_step: int | tf.Tensor) -> tf.data.Dataset:
    shard, first_step = tf.cast(shard, tf.int32), tf.cast(first_step, tf.int64)

    def epoch_dataset(epoch: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(sharding.epoch_rows(tf.cast(epoch, tf.int32), shard))

    first_epoch = first_step // sharding.steps_per_epoch
    epochs = tf.data.Dataset.range(first_epoch, np.iinfo(np.int32).max)
    return epochs.flat_map(epoch_dataset).skip(first_step % sharding.steps_per_epoch)


def _gathered(rows: tf.data.Dataset, images: tf.Tensor, labels: tf.Tensor) -> tf.data.Dataset:
    def gather(index: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return tf.gather(images, index), tf.gather(labels, index), weights

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF  # sharded above
    options.threading.private_threadpool_size = 1
    return rows.map(gather).prefetch(2).with_options(options)
