"""Parts of Keras that are imported when something of them is first used.

Keras imports scikit-learn and matplotlib, where they are installed, for parts that a task does not use: wrappers that
look like scikit-learn's estimators, and pictures. That takes a third of the time in which TensorFlow and Keras are
imported, and every run waits for it.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

# Keras's public packages, the second pair of them which TensorFlow uses, and one that another part of Keras imports.
OF_KERAS = (
    "keras.wrappers",
    "keras.visualization",
    "keras._tf_keras.keras.wrappers",
    "keras._tf_keras.keras.visualization",
    "keras.src.visualization",
)


class LazyFinder:
    """Finds these modules where Python itself finds them, and has them executed when an attribute is first read."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in OF_KERAS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def import_lazily() -> None:
    """Makes later imports of these modules lazy; a name that does not exist is no error."""
    sys.meta_path.insert(0, LazyFinder())
