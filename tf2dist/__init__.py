"""Keras 3 models on many workers: asynchronously through parameter servers, or by all-reduce."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf2dist.data.stream import Shard
    from tf2dist.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        LeaderLostError,
        NotFiniteError,
        TaskFailure,
        TaskLostError,
        TfDistError,
    )
    from tf2dist.fitting.fit import fit
    from tf2dist.fitting.fit_run import Result
    from tf2dist.fitting.prediction import predict
    from tf2dist.fitting.request import Local
    from tf2dist.launch.warm_process import end_warm_process
    from tf2dist.model.batch_attention import gather
    from tf2dist.registry import register_data, register_model, register_optimizer
    from tf2dist.tools.finished.load_model import load_model

__version__ = "0.2.0"
__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "LeaderLostError",
    "Local",
    "NotFiniteError",
    "Result",
    "Shard",
    "TaskFailure",
    "TaskLostError",
    "TfDistError",
    "end_warm_process",
    "fit",
    "gather",
    "load_model",
    "predict",
    "register_data",
    "register_model",
    "register_optimizer",
]

# Imported with the first use: most of these modules import Keras, and the command handles no signal before this module
# is imported.
LATER = {
    "CheckpointError": "tf2dist.errors",
    "ClusterError": "tf2dist.errors",
    "ConfigError": "tf2dist.errors",
    "DataError": "tf2dist.errors",
    "LeaderLostError": "tf2dist.errors",
    "Local": "tf2dist.fitting.request",
    "NotFiniteError": "tf2dist.errors",
    "Result": "tf2dist.fitting.fit_run",
    "Shard": "tf2dist.data.stream",
    "TaskFailure": "tf2dist.errors",
    "TaskLostError": "tf2dist.errors",
    "TfDistError": "tf2dist.errors",
    "end_warm_process": "tf2dist.launch.warm_process",
    "fit": "tf2dist.fitting.fit",
    "gather": "tf2dist.model.batch_attention",
    "load_model": "tf2dist.tools.finished.load_model",
    "predict": "tf2dist.fitting.prediction",  # `tf2dist/predict.py` is the command, which nobody imports
    "register_data": "tf2dist.registry",
    "register_model": "tf2dist.registry",
    "register_optimizer": "tf2dist.registry",
}


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
