"""Examples: found or downloaded once, decided for all tasks, cut and shuffled as a pure function.

`Arrays` and `Splits` are what a plugin's data function returns; they are imported when first asked for,
since the launching process has no use for them.
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
