"""Decoded data is cached in files that all tasks of a host map into memory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tf2dist.data import cache, mnist
from tf2dist.data.arrays import Arrays


class Decode:
    """Replaces the decoding of a TFRecord file; a test can let something happen during it."""

    def __init__(self) -> None:
        self.times = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, path: Path) -> Arrays:
        self.times += 1
        self.meanwhile()
        return Arrays(np.full((500, 2, 2), 7, np.uint8), np.arange(500) % 10)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Decode:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mnist, "_decode", made := Decode())
    (tmp_path / "mnist-train.tfrecord").touch()
    return made


def cached(tmp_path: Path) -> Arrays:
    arrays = mnist.decoded(tmp_path / "mnist-train.tfrecord")
    assert isinstance(arrays.x, np.memmap), "the array is not mapped"
    np.testing.assert_array_equal(arrays.x, np.full((500, 2, 2), 7))
    np.testing.assert_array_equal(arrays.y, np.arange(500) % 10)
    return arrays


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "sha256.json"])
@pytest.mark.parametrize("damage", [empty, cut, flip, Path.unlink])
def test_data_is_decoded_once_and_again_if_the_cache_is_damaged(
    decode: Decode, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    for _ in range(2):
        cached(tmp_path)
    assert decode.times == 1
    (made,) = (tmp_path / "cache").rglob(name)
    damage(made)
    if damage is flip or name == "sha256.json":
        assert cache.discard_damaged(tmp_path / "mnist-train.tfrecord"), (
            "the launching process did not notice the damage"
        )
    for _ in range(2):
        cached(tmp_path)
    assert decode.times == 2
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.*")) == [
        "images.npy",
        "labels.npy",
        "sha256.json",
    ]


def test_a_cache_that_another_task_has_written_meanwhile_is_kept(decode: Decode, tmp_path: Path) -> None:
    """Other tasks may have mapped it, and on a network file system a file that is replaced is lost to them."""
    inodes: list[int] = []

    def faster() -> None:
        decode.meanwhile = lambda: None
        cached(tmp_path)
        inodes.extend(path.stat().st_ino for path in (tmp_path / "cache").rglob("*.npy"))

    decode.meanwhile = faster
    cached(tmp_path)
    assert decode.times == 2
    assert [path.stat().st_ino for path in (tmp_path / "cache").rglob("*.npy")] == inodes


def test_without_a_writable_cache_data_is_decoded_each_time(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert len(mnist.decoded(tmp_path / "mnist-train.tfrecord")) == 500
    assert decode.times == 2
