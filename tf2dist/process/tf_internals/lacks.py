"""Access to a private name of TensorFlow or Keras, with an error that names it if it has moved."""

import contextlib
import importlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import keras
import tensorflow as tf

from tf2dist.errors import InstallationError
from tf2dist.requirements import tested_versions

# An object of our own, since None is a legitimate value of several of these attributes.
ABSENT = object()


def module_of(name: str) -> Any:
    """A private module by its dotted name.

    Raises:
        InstallationError: there is none.
    """
    with relying_on(keras if name.startswith("keras") else tf, name):
        return importlib.import_module(name)


def attribute(package: Any, owner: Any, name: str, kind: Any) -> Any:
    """An attribute of an object, which must be an instance of `kind`.

    Raises:
        InstallationError: it does not exist, or is of another type.
    """
    value = getattr(owner, name, ABSENT)
    # A name that stays while its meaning changes would do more harm than one that is gone: nothing would fail.
    if value is ABSENT or not isinstance(value, kind):
        raise lack(package, f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return value


@contextlib.contextmanager
def relying_on(package: Any, name: str) -> Iterator[None]:
    """Reports an error of a type that a renamed name or parameter causes as the lack of `name`."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise lack(package, name) from error


def lack(package: Any, name: str) -> InstallationError:
    """The error for a private name that has moved."""
    tested = ""
    # The requirements are those of the installed distribution; a bare copy of the sources has none.
    with contextlib.suppress(metadata.PackageNotFoundError):
        tested = str(tested_versions().get(package.__name__, ""))
    return InstallationError(
        f"{package.__name__} {package.__version__}: has no {name} of the kind that tf2dist uses; install "
        f"{package.__name__}{tested or ' of a version that tf2dist is tested with'}"
    )
