"""Models that Keras has saved."""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import keras

CONFIG, WEIGHTS = "config.json", "model.weights.h5"  # files of a model that is saved as a folder
# Methods of a model that could use its optimizer although it does not train.
METHODS = (
    *("compile", "compile_from_config", "compute_loss", "compute_metrics", "get_metrics_result", "metrics"),
    *("test_step", "predict_step", "make_test_function", "make_predict_function", "evaluate", "predict", "export"),
)
# By the keys in a configuration under which lambdas stand, what they are there; others are called by the key itself.
ROLES = {"function": "Lambda layer", "loss": "loss", "metrics": "metric", "weighted_metrics": "metric"}


class Lambda(NamedTuple):
    """A lambda in the configuration of a model.

    Attributes:
        role: such as "Lambda layer", "loss", "metric", "activation".
        config: as Keras has saved it.
    """

    role: str
    config: dict[str, Any]

    @property
    def is_loadable(self) -> bool:
        """Whether Keras can load it again, which it cannot as an activation, an initializer or a regularizer."""
        return self.is_of_layer or self.role in ROLES.values()

    @property
    def is_of_layer(self) -> bool:
        """Whether it is one of those that a Lambda layer has, its mask or output_shape among them."""
        return "code" in self.config.get("config", {})


def lambdas_in(config: Any, key: str = "") -> list[Lambda]:
    """The lambdas in a configuration, or in a part of it that stands under a key."""
    if isinstance(config, list):
        return [found for part in config for found in lambdas_in(part, key)]
    if not isinstance(config, dict):
        return []
    # Keras leaves out the class of an activation.
    is_code = config.keys() == {"value"} and isinstance(config["value"], list)
    if config.get("class_name") == "__lambda__" or is_code:
        return [Lambda(ROLES.get(key, key), config)]
    # Losses and metrics may be given by the names of the outputs.
    return [
        found for name, part in config.items() for found in lambdas_in(part, key if key in list(ROLES)[1:] else name)
    ]


def texts_in(config: Any) -> Iterator[str]:
    """The strings among the values in a configuration."""
    parts = config.values() if isinstance(config, dict) else config if isinstance(config, list) else ()
    for part in parts:
        yield from (part,) if isinstance(part, str) else texts_in(part)


def config_in(path: Path) -> Any:
    """The configuration in a model.keras, in the description of a run's model, or in a folder of a saved model."""
    if path.is_dir():
        return json.loads((path / CONFIG).read_bytes())
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return json.loads(archive.read(CONFIG))
    return json.loads(path.read_bytes())


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
