"""What a worker publishes is what the coordinator's graphs read, with or without a file behind it."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tf2dist import publishing
from tf2dist.data import Arrays, Splits
from tf2dist.publishing import publish, remote_array

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process publishes once; here it does so for every test, and beside what the others' cluster reads."""
    monkeypatch.setattr(publishing, "RAM", f"ram://{tmp_path.name}")


def arrays(images: np.ndarray) -> Arrays:
    return Arrays(images, RANDOM.integers(0, 10, len(images)).astype(np.int32))


def mapped(path: Path, images: np.ndarray, mode: str = "r") -> np.ndarray:
    np.save(path, images)
    array: np.ndarray = np.load(path, mmap_mode=mode)  # type: ignore[arg-type]
    return array


def in_ram(split: str) -> bool:
    """Whether the images are copied there."""
    with tf.io.gfile.GFile(f"{publishing.RAM}/{split}/images", "rb") as file:
        return bool(file.read().startswith(b"ram://"))


def test_arrays_in_memory_and_in_files_are_read_as_they_are(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 256, (100, 3, 2, 1), np.uint8)
    whole = mapped(tmp_path / "a.npy", images)
    splits = Splits(arrays(whole[10:]), arrays(whole[:10]), arrays(images[:40]))
    publish(splits)
    assert [in_ram(split) for split in ("train", "validation", "test")] == [False, True, True]

    def read(split: str) -> tuple[tf.Tensor, tf.Tensor]:
        return remote_array(split, "images", (3, 2, 1)), remote_array(split, "labels", (), tf.int32)

    for split, expected in (("train", splits.train), ("validation", splits.validation), ("test", splits.test)):
        found = tf.function(read, autograph=False)(split)
        np.testing.assert_array_equal(found[0], expected.images)
        np.testing.assert_array_equal(found[1], expected.labels)


@pytest.mark.parametrize("offset", [0, 24, 5_000])
def test_a_map_that_begins_within_its_file(tmp_path: Path, offset: int) -> None:
    content = RANDOM.integers(0, 256, 30_000, np.uint8)
    content.tofile(tmp_path / "raw")
    images = np.memmap(tmp_path / "raw", np.uint8, "r", offset, (2_000, 3, 2))[7:]
    publish(Splits(arrays(images), arrays(images[:0]), arrays(images[:1])))
    assert not in_ram("train")
    np.testing.assert_array_equal(remote_array("train", "images", (3, 2)), images)


def test_what_the_file_does_not_hold_is_copied(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 256, (10, 2, 2), np.uint8)
    private = mapped(tmp_path / "a.npy", images, "c")
    private[0] = 7
    publish(Splits(arrays(private), arrays(images), arrays(images[:, ::2])))
    assert in_ram("train")
    np.testing.assert_array_equal(remote_array("train", "images", (2, 2)), private)
    np.testing.assert_array_equal(remote_array("test", "images", (1, 2)), images[:, ::2])


def test_a_file_that_is_gone_or_another_by_now_is_not_named(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 256, (10, 2, 2), np.uint8)
    gone = mapped(tmp_path / "a.npy", images)
    (tmp_path / "a.npy").unlink()
    replaced = mapped(tmp_path / "b.npy", images)
    np.save(tmp_path / "new.npy", images + 1)
    (tmp_path / "new.npy").rename(tmp_path / "b.npy")
    with tempfile.TemporaryFile() as file:
        file.write(images.tobytes())
        unnamed = np.memmap(file, np.uint8, "r", 0, images.shape)
    for array in (gone, replaced, unnamed):
        publish(Splits(arrays(array), arrays(images), arrays(images)))
        assert in_ram("train")
        np.testing.assert_array_equal(remote_array("train", "images", (2, 2)), images)
        for path in tf.io.gfile.glob(f"{publishing.RAM}/*/*"):
            tf.io.gfile.remove(path)


def test_a_map_in_another_order_is_copied(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 256, (10, 2, 2), np.uint8)
    backwards = mapped(tmp_path / "b.npy", images)[::-1]
    publish(Splits(arrays(backwards), arrays(images), arrays(images)))
    assert in_ram("train")
    np.testing.assert_array_equal(remote_array("train", "images", (2, 2)), images[::-1])
