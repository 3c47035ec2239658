"""The files of data sets of images: found, and checked as far as that is possible without reading all of them."""

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import NamedTuple

from tf2dist.config.schema import DataConfig
from tf2dist.data import idx
from tf2dist.data.known import IMAGES
from tf2dist.errors import DataError
from tf2dist.files import expand

Files = tuple[Path, ...]  # of one split: a TFRecord file, or the idx files of its images and of its labels


class Found(NamedTuple):
    """A data set on this host."""

    folder: Path
    train: Files
    test: Files

    def sizes(self) -> dict[str, int]:
        """The files' sizes in bytes, by their names in the folder."""
        return {str(file.relative_to(self.folder)): file.stat().st_size for file in (*self.train, *self.test)}


def tfds_dir(config: DataConfig) -> Path:
    """The folder in which tensorflow-datasets keeps its data sets. Raises DataError if there can be none."""
    asked = config.dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    if folder := expand(asked):
        return folder
    raise DataError(f"data ({config.name}): this user has no home directory for {asked}; set TFDS_DATA_DIR or data.dir")


def find(config: DataConfig) -> Found | None:
    """What tensorflow-datasets has prepared, or else idx files in `data.dir`, or else those of a package."""
    package_dir = IMAGES[config.name].package_dir
    with contextlib.suppress(DataError):  # a user without a home directory may have the package
        folder = tfds_dir(config).resolve()
        if found := _find_records(config.name, folder) or (_find_idx(folder) if package_dir and config.dir else None):
            return found
    return _find_idx(package_dir) if package_dir else None


def _find_records(name: str, folder: Path) -> Found | None:
    """The TFRecord files of the newest whole version."""
    if not os.path.isdir(folder):  # false, too, for a folder that this user may not enter, where `glob` would fail
        return None
    for info in sorted(folder.glob(f"{name}/3.*/dataset_info.json"), reverse=True):
        train, test = (next(info.parent.glob(f"{name}-{split}.tfrecord*"), None) for split in ("train", "test"))
        if train and test:
            return Found(folder, (train,), (test,))
    return None


def _find_idx(folder: Path) -> Found | None:
    """The four idx files, each of them plain or compressed."""
    stems = [f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    places = [[folder / f"{stem}{suffix}" for suffix in ("", ".gz")] for stem in stems]
    found = tuple(file for place in places for file in list(filter(os.path.isfile, place))[:1])
    return Found(folder, found[:2], found[2:]) if len(found) == len(stems) else None


def check(name: str, files: Files) -> None:
    """Checks the files of a split: TFRecords by their size, idx files by the head of the images and all labels."""
    if len(files) == 1:
        _check_records(*files)
    else:
        _check_idx(name, *files)


def _check_idx(name: str, images: Path, labels: Path) -> None:
    num_images, height, width = idx.read_sizes(name, images, 3)
    (num_labels,), values = idx.read(name, labels, 1)
    if (height, width) != (28, 28):
        raise idx.damaged(name, images, f"has images of {height} x {width} pixels instead of 28 x 28")
    if num_labels != num_images:
        raise idx.damaged(name, labels, f"has {num_labels:,} labels for {num_images:,} images")
    known, checksum = IMAGES[name], zlib.crc32(values)
    if known.checksums.get(num_labels, checksum) != checksum:
        raise idx.damaged(name, labels, f"has other labels than {known.title}, whose files have the same names")


def _check_records(file: Path) -> None:
    _, num_bytes = _split_info(file)
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise damaged(file, f"cannot be read: {error.strerror}") from None
    # The recorded size leaves out the headers of the records, so a whole file is larger.
    if size < num_bytes:
        raise damaged(file, f"has {size:,} bytes of at least {num_bytes:,}")


def num_examples(file: Path) -> int:
    """How many examples a TFRecord file holds, as recorded by tensorflow-datasets beside it."""
    return _split_info(file)[0]


def damaged(file: Path, why: str) -> DataError:
    """The error of a file of tensorflow-datasets."""
    folder = file.parents[1]
    return DataError(
        f"data ({folder.name}): {file} {why}; put a whole one there, or remove {folder} to have it downloaded again"
    )


def _split_info(file: Path) -> tuple[int, int]:
    """The number of examples in a file, and of their bytes without the record headers; 0 if that is not known."""
    about, name = file.parent / "dataset_info.json", file.name.split(".")[0].partition("-")[2]
    try:
        # JSON of protocol buffers has numbers of 64 bits as strings; a size of 0, which means unknown, is left out.
        (split,) = (each for each in json.loads(about.read_bytes())["splits"] if each["name"] == name)
        return sum(map(int, split["shardLengths"])), int(split.get("numBytes", 0))
    except OSError as error:
        raise damaged(about, f"cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise damaged(about, f"does not say how many examples the split {name} has") from None
