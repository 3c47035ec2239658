"""Files of a run: read without waiting, written whole or not at all, in folders of their owner; paths of users."""

import contextlib
import errno
import io
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tf2dist.errors import ConfigError, TfDistError, brief_reason
from tf2dist.tf_constants import KERAS_HOME


@contextlib.contextmanager
def raising(
    problem: str, way_out: str = "", kind: type[TfDistError] = ConfigError, also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raises an error by name in the place of an OSError: "PROBLEM (REASON); WAY OUT".

    Args:
        also: errors of other types that mean the same.
    """
    others: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except TfDistError:
        raise
    except others as error:
        more = f"; {way_out}" if way_out else ""
        raise kind(f"{problem} ({brief_reason(error)}){more}") from None


@contextlib.contextmanager
def warning(warn: Callable[[str], None], problem: str, consequence: str) -> Iterator[None]:
    """Warns in the place of an OSError, and goes on after the block: "PROBLEM (REASON); CONSEQUENCE"."""
    try:
        yield
    except OSError as error:
        warn(f"{problem} ({brief_reason(error)}); {consequence}")


def open_to_read(path: Path) -> io.BufferedReader:
    """Opens a regular file to read it. Does not wait for a FIFO, which would block until another process opens it too.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def open_log(path: str | Path) -> int:
    """Opens a log to append to it, and returns its descriptor; only the owner can read one that is created here."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all, text as UTF-8; of several processes that write one, the last wins.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
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
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
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
        except OSError:  # it exists; a read-only file system reports another error even then
            if not path.is_dir():
                raise
    if not any(folder.iterdir()):
        with contextlib.suppress(PermissionError):  # it belongs to another user, and may be shared on purpose
            folder.chmod(0o700)


def is_path(text: Any) -> bool:
    """Whether a value is a valid path, perhaps with ~ for the home directory; the file need not exist.

    Raises:
        ConfigError: Python and TensorFlow would take it for different names, because of the locale.
    """
    if not isinstance(text, str):  # a list in a configuration may hold anything
        return False
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not text.isascii():
        shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        raise ConfigError(
            f"{shown}: has letters that Python takes for {encoding} in this locale, and TensorFlow for UTF-8; set "
            "PYTHONUTF8=1"
        )
    try:
        text.encode()  # TensorFlow accepts names in UTF-8 only
        os.lstat(os.path.expanduser(text))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
    except ValueError:  # a null byte, or half of a surrogate pair
        return False
    return bool(text) and (not text.startswith("~") or os.path.expanduser(text) != text)


def is_folder(text: str) -> bool:
    return is_path(text) and os.path.isdir(os.path.expanduser(text))


def expand(text: str) -> Path | None:
    """The path, with a home directory for ~; None where this user has none, neither HOME nor an entry in passwd."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return None


def path_of(name: str, text: str | os.PathLike[str]) -> Path:
    """`expand`, of a path that the user gives as an argument of this name.

    Raises:
        ConfigError: there is no such home directory.
    """
    if path := expand(os.fspath(text)):
        return path
    raise ConfigError(f"{name} ({text}): there is no such home directory; give the path without ~")


def set_keras_home() -> None:
    """Sets KERAS_HOME if there is no home directory."""
    # Otherwise Keras would create a folder named ~ in the working directory, and read its settings from there.
    if expand("~") is None:
        os.environ.setdefault(KERAS_HOME, os.devnull)
