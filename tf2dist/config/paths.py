"""Paths as a user writes them: with ~ for the home directory, and perhaps invalid."""

import errno
import os
from pathlib import Path
from typing import Any

from tf2dist.tf_constants import KERAS_HOME


def is_path(text: Any) -> bool:
    """Whether a value is a valid path; the file need not exist."""
    if not isinstance(text, str):  # a list in a configuration may hold anything
        return False
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


def settle_home() -> None:
    """Sets KERAS_HOME if there is no home directory."""
    # Otherwise Keras would create a folder named ~ in the working directory, and read its settings from there.
    if expand("~") is None:
        os.environ.setdefault(KERAS_HOME, os.devnull)
