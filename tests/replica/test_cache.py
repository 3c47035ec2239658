"""Decoded data is cached in files that all tasks of a host map into memory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tf2dist.data import mnist
from tf2dist.data.arrays import Arrays
from tf2dist.data.image_files import Files


class Decode:
    """Replaces the decoding of a TFRecord file: counts its calls, and calls `meanwhile` during each of them."""

    def __init__(self) -> None:
        self.calls = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, name: str, files: Files) -> Arrays:
        self.calls += 1
        self.meanwhile()
        return Arrays(np.full((500, 2, 2), 7, np.uint8), np.arange(500) % 10)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Decode:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    replacement = Decode()
    monkeypatch.setattr(mnist, "_decode", replacement)
    (tmp_path / "mnist-train.tfrecord").touch()
    return replacement


def load(tmp_path: Path) -> Arrays:
    """Loads the arrays, and asserts that they are correct and mapped from the cache."""
    arrays = mnist.decoded("mnist", (tmp_path / "mnist-train.tfrecord",))
    assert isinstance(arrays.x, np.memmap), "the array is not mapped"
    np.testing.assert_array_equal(arrays.x, np.full((500, 2, 2), 7))
    np.testing.assert_array_equal(arrays.y, np.arange(500) % 10)
    return arrays


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", mnist.ARRAYS)
@pytest.mark.parametrize("damage", [empty, truncate, Path.unlink])
def test_data_is_decoded_once_and_again_if_the_cache_is_damaged(
    decode: Decode, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    for _ in range(2):
        load(tmp_path)
    assert decode.calls == 1
    (damaged,) = (tmp_path / "cache").rglob(name)
    damage(damaged)
    for _ in range(2):
        load(tmp_path)
    assert decode.calls == 2
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.*")) == ["images.npy", "labels.npy"]


def test_without_a_home_directory_there_is_no_cache(
    decode: Decode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/cache")
    monkeypatch.chdir(tmp_path)  # where other libraries take that for the name of a folder
    for _ in range(2):
        arrays = mnist.decoded("mnist", (tmp_path / "mnist-train.tfrecord",))
        np.testing.assert_array_equal(arrays.y, np.arange(500) % 10)
    assert decode.calls == 2
    assert not [*tmp_path.rglob("*.npy")]


def test_a_cache_that_another_task_writes_during_the_decoding_is_kept(decode: Decode, tmp_path: Path) -> None:
    """Tasks may have mapped its files, and on a network file system a file that is replaced is lost to them."""
    inodes: list[int] = []

    def other_task() -> None:
        decode.meanwhile = lambda: None  # not again while this task decodes
        load(tmp_path)
        inodes.extend(path.stat().st_ino for path in (tmp_path / "cache").rglob("*.npy"))

    decode.meanwhile = other_task
    load(tmp_path)
    assert decode.calls == 2
    assert [path.stat().st_ino for path in (tmp_path / "cache").rglob("*.npy")] == inodes


def test_without_a_writable_cache_data_is_decoded_each_time(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # No user can create a folder below a regular file, not even root.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert len(mnist.decoded("mnist", (tmp_path / "mnist-train.tfrecord",))) == 500
    assert decode.calls == 2
