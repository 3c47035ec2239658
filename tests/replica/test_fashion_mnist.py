"""Fashion-MNIST from idx files: where they are looked for, what they hold, and how damaged ones are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.idx import NAMES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS, idx, write, write_fashion_mnist
from tests.replica.small_runs import split_of
from tf2dist import data
from tf2dist.config.schema import DataConfig
from tf2dist.data import image_files, location
from tf2dist.data.known import IMAGES
from tf2dist.errors import ConfigError, DataError
from tf2dist.launch import findings

PACKAGE_DIR = IMAGES["fashion_mnist"].package_dir


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of TensorFlow Datasets; neither a package nor the network is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    package = replace(IMAGES["fashion_mnist"], package_dir=tmp_path / "package", host="no-such-host.invalid")
    monkeypatch.setitem(IMAGES, "fashion_mnist", package)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(location, "_download", lambda *arguments: "no network")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def config(folder: Path | None = None, **options: object) -> DataConfig:
    return replace(DataConfig(name="fashion_mnist", dir=folder and str(folder), offline="fail"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_splits(folder: Path, suffix: str) -> None:
    write_fashion_mnist(folder, 40, 20, suffix)
    for _ in range(2):  # decoded, then from the cache
        splits = data.load(config(folder, num_validation=3))
        for name, numbers in (("validation", range(3)), ("train", range(3, 40)), ("test", range(20))):
            split = splits.train if name == "train" else split_of(splits, name)
            labels = np.array(numbers) % 10
            np.testing.assert_array_equal(split.y, labels)
            assert split.x.dtype == np.uint8
            np.testing.assert_array_equal(
                split.x, np.broadcast_to(20 * labels[:, None, None, None], (len(labels), 28, 28, 1))
            )


def test_the_cache_notices_other_labels(folder: Path) -> None:
    write_fashion_mnist(folder, 10, 10)
    data.load(config(folder))
    write(folder / f"{TRAIN_LABELS}.gz", idx(bytes([7]) * 10, 10))
    assert data.load(config(folder)).train.y.tolist() == [7] * 10


def test_where_it_is_looked_for(folder: Path, tmp_path: Path) -> None:
    """In this order: prepared by TensorFlow Datasets, idx files in data.dir, those of the package."""
    with pytest.raises(DataError) as caught:
        location.resolve(config(folder), pytest.fail)
    assert str(caught.value) == (
        f"data (fashion_mnist): not in {folder}, and the download failed: no network; install Debian's package "
        "dataset-fashion-mnist, or give the folder of its idx files as data.dir"
    )
    assert [finding.level for finding in findings.training_data(config(folder))] == ["fail"]
    prepared = folder / "fashion_mnist" / "3.0.1"
    for place, expected, make in (
        (tmp_path / "package", "package", write_fashion_mnist),
        (folder, "data", write_fashion_mnist),
        (prepared, "data", prepare),
    ):
        make(place)
        resolved = location.resolve(config(folder), pytest.fail)
        assert resolved == config(tmp_path / expected)
        found = image_files.find(resolved)
        assert found is not None
        assert found == image_files.find(config(folder))
        assert {file.parent for file in (*found.train, *found.test)} == {place}
        assert set(found.sizes()) == {str(file.relative_to(found.folder)) for file in place.glob("*-*")}
        assert [str(finding.text) for finding in findings.training_data(config(folder))] == [
            f"Fashion-MNIST is in {tmp_path / expected}"
        ]


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True)
    names = [f'{{"name": "{split}", "shardLengths": ["1"]}}' for split in ("train", "test")]
    (folder / "dataset_info.json").write_text(f'{{"splits": [{", ".join(names)}]}}')
    for split in ("train", "test"):
        (folder / f"fashion_mnist-{split}.tfrecord-00000-of-00001").touch()


def test_idx_files_are_not_looked_for_where_data_dir_is_not_given(folder: Path) -> None:
    """Nor are those of another data set, which has the same names."""
    write_fashion_mnist(folder)
    assert image_files.find(config()) is None
    assert image_files.find(replace(config(folder), name="mnist")) is None


def test_three_of_four_files_are_none(folder: Path) -> None:
    for name in NAMES:
        write_fashion_mnist(folder)
        (folder / f"{name}.gz").unlink()
        assert image_files.find(config(folder)) is None


def test_it_has_no_fallback(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        location.resolve(config(folder, offline="fallback"), pytest.fail)
    assert str(caught.value) == "data.offline (fallback): data=fashion_mnist has no fallback; leave it out"


PIXELS = bytes(10 * 28 * 28)
# Of the training images with gzip, plain, and of the training labels.
DAMAGED_GZIP: dict[str, Callable[[bytes], bytes]] = {
    "is damaged: Compressed file ended before the end-of-stream marker was reached": lambda content: content[:-9],
    "cannot be read: CRC check failed": lambda content: content[:-8] + bytes(4) + content[-4:],
    "cannot be read: Not a gzipped file": lambda content: idx(PIXELS, 10, 28, 28),
    "has 0 of at least 16 bytes": lambda content: b"",
}
DAMAGED_PLAIN = {
    "has 7,839 values, and its header says 10 x 28 x 28": idx(PIXELS[:-1], 10, 28, 28),
    "has 7,841 values, and its header says 10 x 28 x 28": idx(PIXELS + b"0", 10, 28, 28),
    "begins with 0x00000801 instead of 0x00000803": idx(PIXELS, len(PIXELS)),
    "begins with 0x1f8b0800 instead of 0x00000803": bytes.fromhex("1f8b0800") + PIXELS,
    "has images of 14 x 56 pixels instead of 28 x 28": idx(PIXELS, 10, 14, 56),
    "has 15 of at least 16 bytes": idx(PIXELS, 10, 28, 28)[:15],
}
DAMAGED_LABELS = {
    "has 9 labels for 10 images": idx(bytes(9), 9),
    "has 9 values, and its header says 10": idx(bytes(9), 10),
    "begins with 0x00000803 instead of 0x00000801": idx(bytes(10), 10, 1, 1),
}


def refusal(folder: Path) -> str:
    """The message of the launching process, or else that of the tasks."""
    with pytest.raises(DataError) as caught:
        data.load(location.resolve(config(folder), pytest.fail))
    return str(caught.value)


@pytest.mark.parametrize("words", DAMAGED_GZIP)
def test_a_damaged_compressed_file(folder: Path, words: str) -> None:
    write_fashion_mnist(folder, 10, 10)
    file = folder / f"{TRAIN_IMAGES}.gz"
    file.write_bytes(DAMAGED_GZIP[words](file.read_bytes()))
    assert refusal(folder).startswith(f"data (fashion_mnist): {file} {words}")
    assert refusal(folder).endswith("; put a whole one there")


@pytest.mark.parametrize(
    ("name", "words", "content"),
    [(TRAIN_IMAGES, *case) for case in DAMAGED_PLAIN.items()]
    + [(TRAIN_LABELS, *case) for case in DAMAGED_LABELS.items()],
)
def test_a_damaged_file(folder: Path, name: str, words: str, content: bytes) -> None:
    write_fashion_mnist(folder, 10, 10, "")
    (folder / name).write_bytes(content)
    assert refusal(folder) == f"data (fashion_mnist): {folder / name} {words}; put a whole one there"


def test_a_class_that_there_is_not(folder: Path) -> None:
    write_fashion_mnist(folder, 10, 10, "")
    (folder / TEST_LABELS).write_bytes(idx(bytes(range(1, 11)), 10))
    assert refusal(folder) == "data (fashion_mnist): test y (1 to 10): must be from 0 to 9"


@pytest.mark.parametrize(("name", "num"), [(TRAIN_LABELS, 60_000), (TEST_LABELS, 10_000)])
def test_files_of_another_data_set(folder: Path, name: str, num: int) -> None:
    """Those of MNIST have the same names and sizes. Only their labels are read before a run begins."""
    write_fashion_mnist(folder, 10, 10, "")
    (folder / name).write_bytes(idx(bytes(num), num))
    (folder / name.replace("labels-idx1", "images-idx3")).write_bytes(idx(b"", num, 28, 28))
    words = "has other labels than Fashion-MNIST, whose files have the same names"
    assert refusal(folder) == f"data (fashion_mnist): {folder / name} {words}; put a whole one there"


def test_the_package() -> None:
    if not (PACKAGE_DIR and PACKAGE_DIR.is_dir()):
        pytest.skip("Debian's package dataset-fashion-mnist is not on this machine")
    splits = data.load(location.resolve(config(PACKAGE_DIR, num_validation=5000), pytest.fail))
    assert [len(split_of(splits, name)) for name in ("train", "validation", "test")] == [55_000, 5_000, 10_000]
    pixels = np.concatenate([split_of(splits, "validation").x, splits.train.x])
    assert pixels.mean() == pytest.approx(72.9404, abs=1e-3)
    assert np.bincount(split_of(splits, "test").y).tolist() == [1000] * 10
