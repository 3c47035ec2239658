"""The cache of decoded data on disk, with hashes that reveal damage. Never imports TensorFlow."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from tf2dist.errors import DataError
from tf2dist.files import expand

ARRAYS = ("images.npy", "labels.npy")
HASHES = "sha256.json"


def folder_of(source: Path) -> Path | None:
    """The folder for the decoded arrays of a file, which each user has for himself; None without a home directory.

    Raises:
        OSError: the file does not exist, or may not be read.
    """
    root = expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if root is None:
        return None
    # A file that was replaced gets another folder; hashing its content would take longer than the cache saves.
    status = source.stat()
    key = hashlib.sha256(f"{source.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    return root / "tf2dist" / f"{source.name.split('.')[0]}-{key}"


def seal(folder: Path) -> None:
    """Writes the hashes of the arrays in a folder, which completes it: a folder without hashes is not used."""
    (folder / HASHES).write_text(json.dumps({name: _sha256(folder / name) for name in ARRAYS}))


def is_sealed(folder: Path) -> bool:
    return (folder / HASHES).is_file()


def discard_damaged(source: Path) -> bool:
    """Removes the cached arrays of a file if they no longer match their hashes.

    All of them are read, which takes a tenth of a second for 60,000 small images, so this is done once for each
    run, before its tasks start.

    Returns:
        Whether they were damaged.

    Raises:
        DataError: they are damaged and cannot be removed.
    """
    folder = folder_of(source)
    if folder is None or not os.path.exists(folder) or _is_whole(folder):
        return False
    # A task of another run that has mapped the arrays keeps them, and one that finds a part of the files decodes anew.
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):
        raise DataError(f"data: {folder} is damaged and cannot be removed; remove it, or set XDG_CACHE_HOME")
    return True


def _is_whole(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / HASHES).read_bytes())
        return all(hashes[name] == _sha256(folder / name) for name in ARRAYS)
    except (OSError, ValueError, LookupError, TypeError):  # whatever has become of the hashes' own file
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
