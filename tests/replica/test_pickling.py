"""Keras objects in a function that is sent to the tasks."""

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf

from tf2dist.errors import FitError
from tf2dist.fitting.pickling import send_function

RAW = {"number": np.arange(8, dtype=np.float32), "text": np.array(["u", "v", "w", "u"] * 2)}
IN_A_TASK = """
import sys
from pathlib import Path
import numpy as np
from tf2dist.fitting.pickling import load_function
batches = load_function(Path(sys.argv[1]), {"pickle": "f.pickle"})()
np.save(Path(sys.argv[1], "found.npy"), np.concatenate(list(batches.as_numpy_iterator())))
"""


def test_adapted_and_own_layers_work_in_a_task(tmp_path: Path) -> None:
    """They are called first in a graph of tf.data there."""

    class Times(keras.layers.Layer):
        def __init__(self, by: float, **options: Any) -> None:
            super().__init__(**options)
            self.by = by

        def call(self, inputs: Any) -> Any:
            return inputs * self.by

    space = keras.utils.FeatureSpace({"number": "float_normalized", "text": "string_categorical"})
    space.adapt(tf.data.Dataset.from_tensor_slices(RAW).batch(4))
    times, scale = Times(3.0), keras.layers.Normalization()
    scale.adapt(RAW["number"][:, None])

    def batches() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(RAW).batch(4).map(lambda rows: scale(times(space(rows))))

    assert send_function(tmp_path, batches, "f.pickle", "data") == {"pickle": "f.pickle"}
    subprocess.run([sys.executable, "-c", IN_A_TASK, str(tmp_path)], check=True, timeout=120)
    expected = np.concatenate(list(batches().as_numpy_iterator()))
    assert np.array_equal(np.load(tmp_path / "found.npy"), expected)


def test_modules_by_value_stay_as_the_program_has_listed_them(tmp_path: Path) -> None:
    module = types.ModuleType("of_no_file")
    exec("def build(): pass", module.__dict__)
    sys.modules["of_no_file"] = module
    for listed in (set(), {"of_no_file"}):
        if listed:
            cloudpickle.register_pickle_by_value(module)
        send_function(tmp_path, module.build, f"{len(listed)}.pickle", "model")
        assert cloudpickle.list_registry_pickle_by_value() == listed
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["of_no_file"]


def test_a_layer_that_keras_cannot_load_again_is_refused(tmp_path: Path) -> None:
    class Forgets(keras.layers.Layer):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def get_config(self) -> dict[str, Any]:
            return {}

    layer = Forgets(2.0)
    with pytest.raises(FitError, match=r"data: cannot be sent to the tasks \(.*by"):
        send_function(tmp_path, lambda: layer, "f.pickle", "data")
