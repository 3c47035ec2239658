"""Decoded data, kept for the runs to come, and whether it still is what was written. Never imports TensorFlow."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from tf2dist.config import paths
from tf2dist.errors import DataError

ARRAYS = ("images.npy", "labels.npy")
HASHES = "sha256.json"


def folder_of(source: Path) -> Path | None:
    """Where the decoded arrays of a file are kept for this user; None if this user has no place for it.

    Raises:
        OSError: there is no such file, or none that may be looked at.
    """
    root = paths.expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if root is None:
        return None
    status = source.stat()
    key = hashlib.sha256(f"{source.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    return root / "tf2dist" / f"{source.name.split('.')[0]}-{key}"


def seal(folder: Path) -> None:
    """Adds the hashes of the arrays in a folder; one without them is not used."""
    (folder / HASHES).write_text(json.dumps({name: _sha256(folder / name) for name in ARRAYS}))


def is_sealed(folder: Path) -> bool:
    return (folder / HASHES).is_file()


def discard_damaged(source: Path) -> bool:
    """Removes what is kept of a file if its bytes have changed since they were written.

    This reads all of it, a tenth of a second for 60,000 small images: once for each run, before its tasks.

    Returns:
        Whether it was damaged.

    Raises:
        DataError: it is damaged and cannot be removed.
    """
    folder = folder_of(source)
    if folder is None or not os.path.exists(folder) or _is_whole(folder):
        return False
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            folder.rename(Path(temporary, "damaged"))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):
        raise DataError(f"data: {folder} is damaged and cannot be removed; remove it, or set XDG_CACHE_HOME")
    return True


def _is_whole(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / HASHES).read_bytes())
        return all(hashes[name] == _sha256(folder / name) for name in ARRAYS)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
