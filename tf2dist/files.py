"""Files in a folder into which other users may be able to write.

Writing follows no link, which could lead to any file of this user. Opening does not wait for a FIFO, which
would block until another process opens its other end.
"""

import contextlib
import errno
import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def open_to_write(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file; can serve `open` as its `opener`.

    Args:
        flags, mode: of `os.open`.

    Raises:
        OSError: it cannot be opened, is a link, or is not a regular file.
    """
    try:
        return _regular(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode), path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, which is not followed", str(path)) from None
        if error.errno == errno.ENXIO:
            raise _no_file(path) from None
        raise


def open_log(path: str | Path) -> int:
    """Opens a log to append to it; only the owner can read one that is created here.

    Raises:
        OSError: see `open_to_write`.
    """
    return open_to_write(path, APPEND, 0o600)


def open_to_read(path: Path) -> io.BufferedReader:
    """Opens a regular file to read it; follows links.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    return os.fdopen(_regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path), "rb")


def _regular(descriptor: int, path: str | Path) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _no_file(path)


def _no_file(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "is not a regular file", str(path))


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all, text as UTF-8; replaces a link instead of following it.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # left by a process that was killed while it wrote
        with open(part, "xb", opener=open_to_write) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def as_json(value: Any, indent: int | None = None) -> str:
    """The JSON of a tree of dicts, lists and plain values; a number that is not finite becomes null.

    A metric may be NaN, as that of a class without examples. JSON has no NaN: Python would write one, and other
    programs could not read the file.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_private(folder: Path) -> None:
    """Creates a directory and its missing parents, accessible by their owner alone.

    An existing directory becomes private too if it is empty; otherwise its mode stays as it is.

    Raises:
        OSError: it cannot be created.
    """
    for path in reversed([folder, *folder.parents]):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            if not path.is_dir():
                raise
        except OSError:  # a read-only file system reports that even for a directory that exists
            if not path.is_dir():
                raise
    if not any(folder.iterdir()):
        with contextlib.suppress(PermissionError):  # it belongs to another user, and may be shared on purpose
            folder.chmod(0o700)
