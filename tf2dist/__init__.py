"""Keras 3 models on many workers: asynchronously through parameter servers, or by all-reduce."""

import importlib
from typing import TYPE_CHECKING, Any

from tf2dist.registry import register_data, register_model, register_optimizer

if TYPE_CHECKING:
    from tf2dist.finished.loading import load_model

__version__ = "0.1.0"
__all__ = ["load_model", "register_data", "register_model", "register_optimizer"]

LATER = {"load_model": "tf2dist.finished.loading"}  # these modules import Keras


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
