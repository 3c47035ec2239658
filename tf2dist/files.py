"""Files in a folder that others may have had their hands in.

A link there is not followed when it is written to: it could lead to any file of ours. A FIFO is not
waited for: opened in the usual way, it stands still until somebody opens the other end.
"""

import contextlib
import errno
import io
import os
import stat
from pathlib import Path

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def open_to_write(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file; also an `opener` for `open`.

    Args:
        flags, mode: of `os.open`.

    Raises:
        OSError: it cannot be opened; also because it is a link or no regular file.
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
    """Opens a log, which its owner alone can read.

    Raises:
        OSError: see `open_to_write`.
    """
    return open_to_write(path, APPEND, 0o600)


def open_to_read(path: Path) -> io.BufferedReader:
    """Opens a regular file, or the one that a link leads to.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    return os.fdopen(_regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path), "rb")


def _regular(descriptor: int, path: str | Path) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _no_file(path)


def _no_file(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "is no regular file", str(path))


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all, text as UTF-8; takes the place of a link instead of following it.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # of a process that was killed here
        with open(part, "xb", opener=open_to_write) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def make_private(folder: Path) -> None:
    """Makes a directory, and those on the way to it, readable by their owner alone.

    An empty directory that is there already becomes private as well; one that holds something is
    left as it is.

    Raises:
        OSError: it cannot be made.
    """
    for path in reversed([folder, *folder.parents]):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            if not path.is_dir():
                raise
        except OSError:  # a file system that is read-only says so of what is there, too
            if not path.is_dir():
                raise
    if not any(folder.iterdir()):
        with contextlib.suppress(PermissionError):  # it is another user's, and may be meant for many
            folder.chmod(0o700)
