"""The rules for paths in a configuration, and directories that their owner alone can read."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

from tf2dist.config.rules import Rule

MAX_PLUGIN_BYTES = 1 << 24


def rules(folders: dict[str, str | None], plugins: list[str]) -> list[Rule]:
    """Paths that the system would not even look up, and plugins that are no Python."""
    found: list[Rule] = [
        (name, path, path is None or is_path(path), "is no name of a directory; leave it out for the default")
        for name, path in folders.items()
    ]
    for path in plugins:
        there = is_path(path) and os.path.isfile(os.path.expanduser(path))
        found.append(("plugins", path, there, "there is no such Python file"))
        if there and (problem := _syntax_problem(os.path.expanduser(path))):
            found.append(("plugins", path, False, f"{problem}; correct the file"))
    return found


def is_path(text: Any) -> bool:
    """Whether a text can name a file at all; what can, may still not be there."""
    if not isinstance(text, str):  # a list in a configuration may hold anything
        return False
    try:
        text.encode()  # TensorFlow takes no other names
        os.lstat(os.path.expanduser(text))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
    except ValueError:  # a null byte, or half a character
        return False
    return bool(text) and (not text.startswith("~") or os.path.expanduser(text) != text)


def expand(text: str) -> Path | None:
    """The path, with a home directory for ~; None where this user has none, neither HOME nor an entry in passwd."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return None


def settle_home() -> None:
    """Without a home directory Keras would make a folder that is named ~ here, and read its settings from it."""
    if expand("~") is None:
        os.environ.setdefault("KERAS_HOME", os.devnull)


def is_folder(text: str) -> bool:
    return is_path(text) and os.path.isdir(os.path.expanduser(text))


def _syntax_problem(path: str) -> str:
    """Why a file is no Python, or ""; it is read and not run."""
    try:
        compile(_read_file(path), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f"cannot be read ({error})"
    return ""


def _read_file(path: str) -> bytes:
    """The bytes of a file on a disk.

    Raises:
        OSError: it cannot be read, or is one that the system makes up; to read such a one may take for ever.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        size = os.fstat(file.fileno()).st_size  # 0 of a file that the system makes up
        if size > MAX_PLUGIN_BYTES:
            raise OSError(f"it has {size:,} bytes")
        text = file.read(size + 1)  # None if there is nothing yet
    if text is None or len(text) > size:
        raise OSError("it is a device")
    return text


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
