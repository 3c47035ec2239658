"""Python itself: commands and environments of child processes, and modules that are imported when they are used."""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType

from tf2dist.tf_constants import UNUSED_MODULES

SECRETS = ("TF2DIST_TOKEN", "TF2DIST_TOKEN_FILE")  # the token of a job's control connections, or its file

SAME_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"
CALL_MAIN = "import importlib; importlib.import_module(sys.argv.pop(1)).main()"

# For what a process has one of, such as the filters of warnings: held by a thread from its change until it is put back.
# Runs of `fit` may be side by side in threads, and each would put back what another one has changed.
process_wide = threading.RLock()


@contextlib.contextmanager
def without_warnings(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Ignores the warnings of a category whose text begins with a pattern."""
    with process_wide, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category)
        yield


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that calls the `main` of a module, with `arguments` in ``sys.argv[1:]``.

    Unlike ``python -m MODULE`` it does not import from the working directory, where there may be some other keras.py.
    """
    return code_command(CALL_MAIN, module, *arguments)


def code_command(code: str, *arguments: str) -> list[str]:
    """The command that runs a piece of code with the module path of this process, `arguments` in ``sys.argv[1:]``."""
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    return [sys.executable, "-P", "-c", SAME_PATH + code, path, *arguments]


def child_environment() -> dict[str, str]:
    """This process's environment without the job token, since child processes run the user's code."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


class LazyFinder:
    """Finds `UNUSED_MODULES` where Python itself finds them, and has them executed when an attribute is first read."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in UNUSED_MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def import_lazily() -> None:
    """Makes later imports of the parts of Keras that a task does not use lazy; one that does not exist is no error.

    For wrappers that look like scikit-learn's estimators, and for pictures, Keras imports scikit-learn and matplotlib,
    where they are installed. That takes a third of the time in which TensorFlow and Keras are imported, and every run
    waits for it.
    """
    sys.meta_path.insert(0, LazyFinder())
