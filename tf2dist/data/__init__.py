"""The examples: found or downloaded once for all tasks, then cut and shuffled as a pure function of the seed.

A plugin's data function returns `Arrays` in `Splits`. These are imported on first use, since the launching
process does not need them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf2dist.data.arrays import Arrays, Splits, load

__all__ = ["Arrays", "Splits", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tf2dist.data import arrays

        return getattr(arrays, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
