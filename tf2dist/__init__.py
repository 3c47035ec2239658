"""Keras 3 models on many workers: asynchronously through parameter servers, or by all-reduce."""

from tf2dist.registry import register_data, register_model, register_optimizer

__version__ = "0.1.0"
__all__ = ["register_data", "register_model", "register_optimizer"]
