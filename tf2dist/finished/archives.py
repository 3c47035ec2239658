"""A model.keras as a folder: Keras loads it from there without first reading the whole file into memory."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py

from tf2dist.model.saved import WEIGHTS, leave_out_optimizer
from tf2dist.process.file_tables import LARGE_BYTES


def unpack(path: Path, folder: Path, custom_objects: Mapping[str, Any]) -> bool:
    """Unpacks a model.keras, without the state of the optimizer if the model does not need it to evaluate or predict.

    Returns:
        False, and nothing is unpacked, if it is compressed, and so was not written by a run.
    """
    with zipfile.ZipFile(path) as archive:
        # One that comes from somebody else could fill the disk.
        if sum(part.file_size for part in archive.infolist()) > path.stat().st_size:
            return False
        archive.extractall(folder)
    leave_out_optimizer(folder, custom_objects)
    return True


def sizes(folder: Path) -> tuple[list[int], list[int]]:
    """The bytes of each array that lies in a file when the model is loaded into `Tables`, and of each other array."""
    tables: list[int] = []
    others: list[int] = []

    def add(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            # Keras saves no names of variables. A Dense without a bias is taken for a table, too.
            is_alone = len(item.parent) == 1 or item.name.startswith("/optimizer/")
            is_table = item.ndim == 2 and item.dtype == "float32" and is_alone
            (tables if is_table and item.nbytes >= LARGE_BYTES else others).append(item.nbytes)

    with h5py.File(folder / WEIGHTS) as file:
        file.visititems(add)
    return tables, others
