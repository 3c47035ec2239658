"""The data sets, and batches of their arrays."""

import urllib.parse
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import split_of
from tests.tfds import record, write_mnist
from tests.unit.test_saving import facts
from tf2dist import data, registry
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import input_facts, input_position
from tf2dist.config.schema import DataConfig
from tf2dist.data import image_files, pipeline
from tf2dist.data.known import IMAGES
from tf2dist.data.loading import load_images
from tf2dist.data.passes import InputPosition, Sharding
from tf2dist.data.splits import checked
from tf2dist.errors import DataError

SPLITS = ("train", "validation", "test")
PIXELS = np.arange(8, dtype=np.uint8).reshape(4, 2)


def test_a_run_continues_at_the_same_part_of_other_data() -> None:
    before = input_facts(Sharding(21, 3, 3, 0, True), InputPosition(30, ((22, 24),)))
    snapshot = Snapshot(6, {}, replace(facts(6), examples=28, input=before))
    assert input_position(snapshot, Sharding(21, 5, 2, 1, False)) == InputPosition(30, ((22, 24),))
    assert input_position(snapshot, Sharding(42, 5, 2, 1, False)) == InputPosition(60)


@pytest.mark.parametrize(
    ("whole", "positions", "expected"),
    [(True, (7, 7, 7), 2 * 21 + 9), (False, (5, 7, 5), 2 * 21 + 3 * 3)],
    ids=["sync: seven steps of three in a pass", "async: 17 batches of seven in a pass"],
)
def test_checkpoints_with_a_position_of_each_worker_are_read(
    whole: bool, positions: tuple[int, ...], expected: int
) -> None:
    sharding = Sharding(21, 3, 3, 0, whole)
    snapshot = Snapshot(6, {}, replace(facts(6), input=input_facts(sharding, positions=positions)))
    assert input_position(snapshot, sharding) == InputPosition(expected)


def test_the_splits_of_the_digits() -> None:
    splits = data.load(DataConfig(name="digits", num_validation=180))
    assert [len(split_of(splits, name)) for name in SPLITS] == [1257, 180, 360]
    assert splits.input_shape == (28, 28, 1)
    assert splits.train.x.dtype == np.uint8
    assert splits.train.x.max() == 255
    assert set(split_of(splits, "test").y) == set(range(10))


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (PIXELS, np.zeros(4), " y (float32 (4,)): must be integers [4], the classes; if it is something else, give"),
        (PIXELS, np.arange(7, 11), " y (7 to 10): must be from 0 to 9"),
        (PIXELS, np.zeros(3, int), " has arrays of several lengths (x: 4, y: 3)"),
        ({"b": PIXELS, "a": PIXELS[:3]}, PIXELS[:, 0], " has arrays of several lengths (x[0]: 3, x[1]: 4, y: 4)"),
        (np.zeros(4, complex), PIXELS[:, 0], " x (complex128 (4,)): must be an array of numbers or strings [n, ...]"),
        (np.array([1, "a", None, print]), PIXELS[:, 0], " x (object (4,)): must hold numbers or strings"),
        (
            np.ma.masked_equal(PIXELS, 1),
            PIXELS[:, 0],
            " x has masked values, which would be trained on like the others;",
        ),
        (np.array([b"a\0"] * 4, object), PIXELS[:, 0], " x has text that ends with a zero byte, which numpy drops;"),
        ([1, 2], [3, 4], " x[0] (int64 ()): must be an array of numbers or strings [n, ...]"),
        (None, PIXELS[:, 0], " x (None): must be an array of numbers or strings [n, ...]"),
    ],
)
def test_invalid_arrays_are_refused(monkeypatch: Any, x: Any, y: Any, words: str) -> None:
    arrays = data.Arrays(x, y)
    monkeypatch.setitem(registry.DATA, "broken", lambda config: data.Splits(arrays, arrays, arrays))
    with pytest.raises(DataError) as caught:
        data.load(DataConfig(name="broken"))
    assert f"data (broken): train{words}" in str(caught.value)


def test_splits_of_different_kinds_are_refused(monkeypatch: Any) -> None:
    for other in ({"a": PIXELS}, PIXELS.astype(np.float32), PIXELS[:, :1]):
        train, test = data.Arrays(PIXELS, PIXELS[:, 0]), data.Arrays(other, PIXELS[:, 0])
        splits = data.Splits(train, None, test)
        monkeypatch.setitem(registry.DATA, "broken", lambda config, splits=splits: splits)
        with pytest.raises(DataError, match=r"data \(broken\): test is .*, and train is .*; give both the same kind"):
            data.load(DataConfig(name="broken"))


def test_a_mapped_array_of_floats_is_not_copied(tmp_path: Path) -> None:
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (4, 2))
    found = checked("data (mine)", data.Splits(data.Arrays(mapped, PIXELS[:, 0]), num_classes=None)).train
    assert isinstance(found.x, np.memmap)
    assert np.shares_memory(found.x, mapped)


@pytest.mark.parametrize("dtype", [np.str_, object])
def test_data_of_any_structure(dtype: Any) -> None:
    """The structure is kept; leaves are converted as Keras converts them, contiguous, and in this machine's order."""
    words = ["a", "bc", "ä", ""]
    x = {
        "words": np.array(words, dtype),
        "table": (tf.constant(PIXELS, tf.float64), np.asfortranarray(PIXELS.astype(">u2"))),
    }
    y = [np.arange(8.0).reshape(4, 2), None]
    train = data.Arrays(x, y, sample_weight=[np.ones(4), None])
    splits = checked("data (mine)", data.Splits(train, num_classes=None))
    found = splits.train
    assert keras.tree.map_structure(lambda leaf: leaf is None, (found.x, found.y, found.sample_weight)) == (
        {"words": False, "table": (False, False)},
        [False, True],
        [False, True],
    )
    assert [leaf.dtype.kind for leaf in found.leaves] == ["f", "u", "S", "f", "f"], "dicts are sorted, as in Keras"
    assert {leaf.dtype.name for leaf in found.leaves if leaf.dtype.kind == "f"} == {"float32"}
    assert all(leaf.flags.c_contiguous and leaf.dtype.isnative for leaf in found.leaves)
    assert [word.decode() for word in found.x["words"]] == words
    np.testing.assert_array_equal(found.x["table"][1], PIXELS)
    np.testing.assert_array_equal(found.y[0], y[0])
    assert splits.input_shape == {"words": (), "table": ((2,), (2,))}
    assert len(found[1:3]) == 2
    np.testing.assert_array_equal(found[1:3].x["table"][0], PIXELS[1:3])


def test_batches_of_any_structure(tmp_path: Path) -> None:
    """Batches of strings, numbers and booleans, from arrays in memory and from mapped files."""
    leaves = [np.array([b"a", b"bc", b"", b"d"]), PIXELS, PIXELS * 0.5, np.array([True, False, True, True])]
    mapped = [leaf.copy() for leaf in leaves]
    for number, leaf in enumerate(leaves):
        np.save(tmp_path / f"{number}.npy", leaf)
        mapped[number] = np.load(tmp_path / f"{number}.npy", mmap_mode="r")
    # Without its first example, a mapped array lacks the alignment with which TensorFlow reads it in place.
    for each in (leaves, mapped, [leaf[1:] for leaf in mapped]):
        take = pipeline.of_arrays(data.Arrays(each))
        sharding = Sharding(len(each[0]), 3, 1, 0, True, shuffle=False)
        *found, weights = next(iter(pipeline.batches(take, sharding, 0, InputPosition())))
        assert weights.numpy().tolist() == pytest.approx([1 / 3] * 3)
        for one, expected in zip(found, each, strict=True):
            np.testing.assert_array_equal(one.numpy(), expected[:3])
            assert one.shape == expected[:3].shape


def test_the_newest_complete_version_of_mnist_is_used(tmp_path: Path) -> None:
    config = DataConfig(dir=str(tmp_path))
    names = ["mnist-train.tfrecord-00000-of-00001", "mnist-test.tfrecord-00000-of-00001", "dataset_info.json"]
    # 3.0.0 has no file to train on, and 3.0.2 has no dataset_info.json.
    for version, files in (("3.0.0", names[1:]), ("3.0.1", names), ("3.0.2", names[:2])):
        (tmp_path / "mnist" / version).mkdir(parents=True)
        for name in files:
            (tmp_path / "mnist" / version / name).touch()
        found = image_files.find(config)
        expected = [(tmp_path / "mnist" / "3.0.1" / name,) for name in names[:2]]
        assert found == (None if version == "3.0.0" else (tmp_path, *expected))
    (tmp_path / "mnist" / "3.0.1" / names[0]).unlink()
    with pytest.raises(DataError, match="not in"):
        load_images(config)


def encoded_example(label: int, png: bytes | None = None) -> bytes:
    """An example as tensorflow-datasets encodes it; its image is `png`, or has the label as each pixel."""
    png = tf.io.encode_png(np.full((28, 28, 1), label, np.uint8)).numpy() if png is None else png
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[png])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    encoded: bytes = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    return encoded


def test_damaged_or_missing_records_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    examples = [encoded_example(label) for label in range(6)]
    config = DataConfig(name="mnist", dir=str(tmp_path), num_validation=2)
    train, _ = write_mnist(tmp_path, examples)
    assert data.load(config).train.y.tolist() == [2, 3, 4, 5]
    records = [record(example) for example in examples]
    flipped = bytearray(b"".join(records))
    flipped[len(flipped) // 2] ^= 1
    for content, words in (
        (b"".join(records[:3]), "has 3 of 6 examples"),
        (b"".join([*records, records[0]]), "has 7 of 6 examples"),
        (b"", "has 0 of 6 examples"),
        (b"".join(records)[:-1], "is damaged (DataLossError: "),
        (bytes(flipped), "is damaged (DataLossError: "),
        (b"".join([*records[:5], record(encoded_example(5, b"no picture"))]), "is damaged (InvalidArgumentError: "),
        (b"".join([*records[:5], record(b"no example")]), "is damaged (InvalidArgumentError: "),
    ):
        train.unlink()
        train.write_bytes(content)
        with pytest.raises(DataError) as caught:
            data.load(config)
        assert str(caught.value).startswith(f"data (mnist): {train} {words}")
        assert str(caught.value).endswith(
            f"; put a whole one there, or remove {tmp_path}/mnist to have it downloaded again"
        )


def test_the_splits_of_mnist(real_data: str) -> None:
    if real_data != "mnist":
        pytest.skip("MNIST is not on this machine")
    splits = data.load(DataConfig(name="mnist", num_validation=5000))
    assert [len(split_of(splits, name)) for name in SPLITS] == [55_000, 5_000, 10_000]
    pixels = np.concatenate([split_of(splits, "validation").x, splits.train.x])
    assert pixels.mean() == pytest.approx(33.3184, abs=1e-3)  # the mean over the 60,000 training images
    assert np.bincount(split_of(splits, "test").y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_the_cache_is_used_and_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path, [encoded_example(label % 10) for label in range(12)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = DataConfig(name="mnist", dir=str(tmp_path), num_validation=2)
    decoded, cached = data.load(config), data.load(config)
    expected = split_of(cached, "test").x
    assert len(list(tmp_path.glob("tf2dist/*/images.npy"))) == 2
    np.testing.assert_array_equal(split_of(decoded, "test").x, expected)
    damaged = next(tmp_path.glob("tf2dist/*test*/images.npy"))
    content = damaged.read_bytes()[:-1000]
    damaged.unlink()  # removed, not overwritten, because `cached` maps it
    damaged.write_bytes(content)
    np.testing.assert_array_equal(split_of(data.load(config), "test").x, expected)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # where no folder can be created
    np.testing.assert_array_equal(split_of(data.load(config), "test").x, expected)


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_downloaded_from_the_named_host_and_not_as_a_prepared_copy(name: str) -> None:
    import tensorflow_datasets as tfds

    assert urllib.parse.urlparse(tfds.builder_cls(name).URL).hostname == IMAGES[name].host
    # The access is enabled first, in case a setting of this machine disables it; the download disables it in this way.
    with tfds.testing.enable_gcs_access(), tfds.testing.disable_gcs_access():
        assert not tfds.is_dataset_on_gcs(f"{name}/3.0.1")


def test_the_parabola_knows_its_curve_and_its_noise() -> None:
    splits = data.load(DataConfig(name="parabola", arguments={"points": 1000, "noise": 0.2}))
    assert splits.test is not None
    assert splits.truth is not None
    assert splits.truth.noise == 0.2
    train, test = (np.ravel(split.y - splits.truth.y) for split in (splits.train, splits.test))
    assert np.std(test) == pytest.approx(0.2, rel=0.1)
    assert abs(np.corrcoef(train, test)[0, 1]) < 0.1, "the test set has noise of its own"
    np.testing.assert_allclose(splits.truth.y, splits.test.x**2)
