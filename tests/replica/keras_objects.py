"""Keras objects for the tests of `tf_internals`, whose functions use private names of TensorFlow and Keras."""

import functools
from collections.abc import Callable

import keras

from tf2dist.tf_internals.keras import build_metrics

# The private base classes in which Keras defines these methods for all optimizers and for all models.
BASE_OPTIMIZER = next(kind for kind in keras.optimizers.Optimizer.__mro__ if "_get_variable_index" in vars(kind))
TRAINER = next(kind for kind in keras.Model.__mro__ if "_symbolic_build" in vars(kind))


def built_optimizer(kind: Callable[..., keras.Optimizer] = keras.optimizers.Adam) -> keras.Optimizer:
    optimizer = kind(learning_rate=0.5)
    optimizer.build([keras.Variable([1.0, 2.0])])
    return optimizer


def several_optimizers(*built_for: keras.Variable) -> keras.Optimizer:
    adam = keras.optimizers.Adam()
    optimizer = keras.optimizers.MultiOptimizer(lambda _: adam)
    if built_for:
        optimizer.build([*built_for])
    return optimizer


def random_model() -> keras.Model:
    inner = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    return keras.Sequential([keras.Input([3]), inner, keras.layers.GaussianNoise(0.1)])


def compiled_model() -> keras.Model:
    """A model with two outputs, a loss for each, and a metric."""
    inputs = keras.Input([3])
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(2)(inputs)])
    model.compile("sgd", ["mse", keras.losses.MeanSquaredError(reduction="sum")], metrics=[["mae"], []])
    return model


# The symbolic input and the two symbolic targets of `compiled_model`.
BATCH = tuple(keras.KerasTensor((None, size)) for size in (3, 1, 2))


def model_with_metrics() -> keras.Model:
    model = compiled_model()
    build_metrics(model, (BATCH[0], list(BATCH[1:]), None))
    return model


# Built once: a test builds it before a name is removed from `keras.Layer`, and uses the same model afterwards.
shared_random_model = functools.cache(random_model)
