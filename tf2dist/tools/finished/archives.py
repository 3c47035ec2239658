"""A model.keras as a folder: Keras loads it from there without first reading the whole file into memory."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py

from tf2dist.model.saved import WEIGHTS, leave_out_optimizer
from tf2dist.process.tables_in_files import LARGE_BYTES


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
    datasets: list[h5py.Dataset] = []
    with h5py.File(folder / WEIGHTS) as file:
        file.visititems(lambda _, item: datasets.append(item) if isinstance(item, h5py.Dataset) else None)
        # Keras saves no names of variables. A Dense without a bias is taken for a table, too.
        large = {each for each in datasets if each.ndim == 2 and each.dtype == "float32" and each.nbytes >= LARGE_BYTES}
        tables = {each for each in large if len(each.parent) == 1}
        shapes = {each.shape for each in tables}
        in_files = tables | {each for each in large if each.shape in shapes and each.name.startswith("/optimizer/")}
        return [each.nbytes for each in in_files], [each.nbytes for each in datasets if each not in in_files]
