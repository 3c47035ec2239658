"""What Keras has saved of a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import keras

CONFIG, WEIGHTS = "config.json", "model.weights.h5"  # files of a model that is saved as a folder
# Methods of a model that could use its optimizer although it does not train.
METHODS = (
    *("compile", "compile_from_config", "compute_loss", "compute_metrics", "get_metrics_result", "metrics"),
    *("test_step", "predict_step", "make_test_function", "make_predict_function", "evaluate", "predict", "export"),
)


def without_optimizer(config: dict[str, Any], custom_objects: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a compiled model with an optimizer that has no slots, for a model that is not trained.

    Returns:
        None for a model that may use its optimizer without training, by methods of its own; or that has none.
    """
    kind = keras.saving.get_registered_object(config.get("registered_name"), dict(custom_objects))
    if kind is None and str(config.get("module")).partition(".")[0] != "keras":
        return None
    if kind and any(getattr(kind, name, None) is not getattr(keras.Model, name) for name in METHODS):
        return None
    compiled = config.get("compile_config")
    if not isinstance(compiled, dict) or "optimizer" not in compiled:
        return None
    optimizer = keras.saving.serialize_keras_object(keras.optimizers.SGD())
    return config | {"compile_config": compiled | {"optimizer": optimizer}}


def leave_out_optimizer(folder: Path, custom_objects: Mapping[str, Any]) -> None:
    """Removes the optimizer and its state from a model that is saved in a folder, if it does without; see above."""
    config = without_optimizer(json.loads((folder / CONFIG).read_bytes()), custom_objects)
    if config:
        (folder / CONFIG).write_text(json.dumps(config))
        with h5py.File(folder / WEIGHTS, "r+") as file:
            file.pop("optimizer", None)
