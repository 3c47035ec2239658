"""The examples: found or downloaded once for all tasks, then cut and shuffled as a pure function of the seed.

A plugin's data function returns `Arrays` in `Splits`. These names are imported on first use, since the launching
process does not need them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf2dist.data.arrays import Arrays
    from tf2dist.data.loading import load
    from tf2dist.data.splits import Splits

__all__ = ["Arrays", "Splits", "load"]

# Importing any of these modules imports TensorFlow, which takes seconds.
MODULES = {
    "Arrays": "tf2dist.data.arrays",
    "Splits": "tf2dist.data.splits",
    "load": "tf2dist.data.loading",
}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
