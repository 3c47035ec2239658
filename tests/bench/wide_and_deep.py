"""The wide-and-deep model of `click_log` in Keras; a plugin."""

from typing import Any

import keras

import tf2dist
from tests.bench.click_log import COLUMNS, HIDDEN_UNITS, NUMBERS, ROWS, examples
from tf2dist.data import Arrays, Splits


@tf2dist.register_model("wide_and_deep")
def wide_and_deep(input_shape: Any = None, num_classes: None = None) -> keras.Model:
    layers = keras.layers
    numbers = keras.Input((NUMBERS,), name="numbers")
    ids = keras.Input((len(COLUMNS),), dtype="int32", name="ids")
    deep_rows = [layers.Embedding(ROWS, size, name=f"deep{i}")(ids[:, i]) for i, size in enumerate(COLUMNS)]
    wide_rows = [layers.Embedding(ROWS, 1, name=f"wide{i}")(ids[:, i]) for i in range(len(COLUMNS))]
    deep = layers.Concatenate()([numbers, *deep_rows])
    for units in HIDDEN_UNITS:
        deep = layers.Dense(units, "relu")(deep)
    wide = layers.Add()([layers.Dense(1, use_bias=False)(numbers), *wide_rows])
    model = keras.Model({"numbers": numbers, "ids": ids}, layers.Add()([layers.Dense(1)(deep), wide]))
    model.compile(None, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


@tf2dist.register_data("click_log")
def click_log(config: Any) -> Splits:
    x, y = examples()
    arrays = Arrays(x, y)
    return Splits(arrays, None, arrays[:1_000], num_classes=None)
