"""A model that counts how often it was trained on each example; also a plugin with it and its data."""

from typing import Any

import keras
import numpy as np

from tf2dist import registry
from tf2dist.data import Arrays, Splits

NUM_EXAMPLES = 1000


@keras.saving.register_keras_serializable("tests")
class CountExamples(keras.layers.Layer):
    """Counts the examples, whose only input is their number."""

    def build(self, input_shape: object) -> None:
        self.seen = self.add_weight(name="seen", shape=[NUM_EXAMPLES], initializer="zeros", trainable=False)

    def call(self, numbers: Any, training: bool = False) -> Any:
        if training:
            flat = keras.ops.reshape(numbers, [-1])
            self.seen.assign(self.seen + keras.ops.sum(keras.ops.one_hot(flat, NUM_EXAMPLES), axis=0))
        return keras.ops.cast(numbers, "float32") / NUM_EXAMPLES


def build() -> keras.Model:
    numbers = keras.Input([1], dtype="int32")
    model = keras.Model(numbers, keras.layers.Dense(1)(CountExamples()(numbers)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(NUM_EXAMPLES, dtype=np.int32)[:, None]
    return numbers, 3 * numbers / NUM_EXAMPLES - 1


def seen_by(model: keras.Model) -> np.ndarray:
    """How often the model was trained on each example."""
    return next(np.array(weight) for weight in model.weights if weight.path.endswith("seen"))


registry.register_data("numbers")(lambda config: Splits(Arrays(*data()), None, Arrays(*data()), num_classes=None))
registry.register_model("counting")(lambda input_shape, num_classes: build())
