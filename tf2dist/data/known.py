"""The data sets of tf2dist itself: what must be known of them before they are loaded, in one row for each.

A further data set of 28x28 images from tensorflow-datasets is a row here, a file in conf/data and a name in
docs/options.md. Others also have a function in `loading`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ImageFiles:
    """Where a data set of images comes from.

    Attributes:
        title: its name in messages.
        host: from where tensorflow-datasets downloads it.
        way_out: what a message advises where it is missing.
        has_fallback: whether a run may train on the digits instead.
        package_dir: where a package of the system has its idx files; None if idx files are not looked for.
        checksums: CRC-32 of its labels by their number. Many data sets have idx files of the same names and sizes.
    """

    title: str
    host: str
    way_out: str
    has_fallback: bool = False
    package_dir: Path | None = None
    checksums: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
        num_train: its examples to train on, those for the validation included; None if an option says it.
        epochs: the default length of a training.
        images: None if it is not read from files of images.
    """

    num_train: int | None = None
    epochs: float | None = None
    images: ImageFiles | None = None


KNOWN = {
    "mnist": DataSet(
        num_train=60_000,
        epochs=5.0,
        images=ImageFiles(
            "MNIST",
            host="storage.googleapis.com",
            way_out="set TFDS_DATA_DIR to where it is, or use data=digits",
            has_fallback=True,
        ),
    ),
    "fashion_mnist": DataSet(
        num_train=60_000,
        epochs=10.0,
        images=ImageFiles(
            "Fashion-MNIST",
            host="fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            way_out="install Debian's package dataset-fashion-mnist, or give the folder of its idx files as data.dir",
            package_dir=Path("/usr/share/datasets/fashion-mnist"),
            checksums={60_000: 0x2ED6E46A, 10_000: 0x242BC73F},
        ),
    ),
    "digits": DataSet(num_train=1_437, epochs=100.0),
    "parabola": DataSet(),
    "clicks": DataSet(),
}
IMAGES = {name: known.images for name, known in KNOWN.items() if known.images}
