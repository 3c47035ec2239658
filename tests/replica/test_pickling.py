"""Keras objects that are sent to the tasks, in a function or as a compiled model."""

import functools
import operator
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf

from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import FitError
from tf2dist.fitting.pickling import custom_objects, pickled
from tf2dist.fitting.shipping import ship
from tf2dist.model import own_step
from tf2dist.model.source import EpochPlan
from tf2dist.testing import SyncWorker, SyncWorkers

RAW = {"number": np.arange(8, dtype=np.float32), "text": np.array(["u", "v", "w", "u"] * 2)}


def in_a_task(worker: SyncWorker, folder: Path) -> np.ndarray:
    batches = cloudpickle.loads((folder / "f.pickle").read_bytes())()
    return np.concatenate(list(batches.as_numpy_iterator()))


def test_adapted_and_own_layers_work_in_a_task(tmp_path: Path, sync_workers: SyncWorkers) -> None:
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

    (tmp_path / "f.pickle").write_bytes(pickled(batches, "data"))
    expected = np.concatenate(list(batches().as_numpy_iterator()))
    assert np.array_equal(sync_workers(in_a_task, 1, (tmp_path,))[0], expected)


class Counted:
    """A function with a state, as a decorator may make one."""

    calls = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self) -> None:
        self.calls += 1


@Counted
def counted() -> None: ...


@tf.function
def traced() -> None: ...


def test_what_an_importable_module_names_is_sent_by_name() -> None:
    unnamed = Counted(counted)
    unnamed.calls = 3
    for known in (pinball, Focal, Focal.call, counted, traced):
        assert cloudpickle.loads(pickled(known, "data")) is known
    sent = cloudpickle.loads(pickled(unnamed, "data"))
    assert sent is not unnamed
    assert sent.calls == 3


def test_modules_by_value_stay_as_the_program_has_listed_them() -> None:
    module = types.ModuleType("of_no_file")
    exec("def build(): pass", module.__dict__)
    sys.modules["of_no_file"] = module
    for listed in (set(), {"of_no_file"}):
        if listed:
            cloudpickle.register_pickle_by_value(module)
        pickled(module.build, "model")
        assert cloudpickle.list_registry_pickle_by_value() == listed
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["of_no_file"]


def test_a_program_may_send_the_classes_of_a_model_by_value() -> None:
    """What it has changed in their module goes along then."""
    model, module = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), sys.modules[__name__]
    model.compile(loss=Focal())
    by_name = custom_objects(model)[1]["Focal"]
    cloudpickle.register_pickle_by_value(module)
    try:
        by_value = custom_objects(model)[1]["Focal"]
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert [b"gamma" in data for data in (by_name, by_value)] == [False, True]


def test_a_layer_that_keras_cannot_load_again_is_refused() -> None:
    class Forgets(keras.layers.Layer):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def get_config(self) -> dict[str, Any]:
            return {}

    layer = Forgets(2.0)
    with pytest.raises(FitError, match=r"data: cannot be sent to the tasks \(.*by"):
        pickled(lambda: layer, "data")


class Focal(keras.losses.Loss):  # type: ignore[misc]
    def __init__(self, gamma: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.gamma = gamma

    def call(self, y: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y - y_pred) ** self.gamma, -1)


class Between(keras.losses.Loss):  # type: ignore[misc]
    """The mean of a function of the two, or of another loss."""

    def __init__(self, distance: Any = keras.ops.subtract, inner: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.distance, self.inner = distance, inner or keras.losses.MeanSquaredError()

    def call(self, y: Any, y_pred: Any) -> Any:
        return keras.ops.mean(self.distance(y, y_pred) ** 2, -1) + self.inner(y, y_pred)


class Unnamed(Focal):
    """Its configuration leaves out the reduction."""

    def __init__(self, reduction: str = "sum_over_batch_size") -> None:
        super().__init__()
        self.reduction = reduction

    def get_config(self) -> dict[str, Any]:
        return {}


class AtMost(keras.constraints.Constraint):  # type: ignore[misc]
    def __init__(self, limit: Any = 1.0) -> None:
        self.limit = limit

    def __call__(self, weights: Any) -> Any:
        return keras.ops.minimum(weights, self.limit)


class Above(keras.metrics.Mean):  # type: ignore[misc]
    def __init__(self, threshold: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.threshold = threshold

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.cast(y_pred > self.threshold, "float32"), sample_weight)


class Scales(keras.layers.Layer):  # type: ignore[misc]
    """A layer that counts its calls and knows its last shape, which no copy has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale, self.calls, self.texts = 1.0, 0, {"of": [self.name]}
        self.shape: tuple[int, ...] | None = None

    def call(self, inputs: Any) -> Any:
        self.calls, self.shape = self.calls + 1, tuple(inputs.shape)
        return inputs * self.scale


class Bare(keras.layers.Layer):  # type: ignore[misc]
    """Takes none of the arguments that its configuration has."""

    def __init__(self) -> None:
        super().__init__()

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        return config


class Factor(keras.layers.Layer):  # type: ignore[misc]
    """Its configuration lacks the argument that it must be given."""

    def __init__(self, by: float, **options: Any) -> None:
        super().__init__(**options)
        self.by = by

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        return config


class Inner(keras.Model):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scales, self.dense, self.beta = Scales(), keras.layers.Dense(1), np.ones(2)
        self.dropout, self.norm = keras.layers.Dropout(0.1), keras.layers.BatchNormalization(scale=False, center=False)

    def call(self, inputs: Any) -> Any:
        return self.dense(self.norm(self.dropout(self.scales(inputs))))


def pinball(quantile: float) -> Callable[[Any, Any], Any]:
    def loss(y: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.maximum(quantile * (y - y_pred), (quantile - 1) * (y - y_pred)), -1)

    return loss


def sequential(*layers: keras.Layer, loss: Any = "mse", **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])
    model.compile("sgd", loss, **options)
    return model


def inner(**attributes: Any) -> keras.Model:
    model = Inner()
    for _ in range(2):
        model(X)
    for name, value in attributes.items():
        owner = model.dense if name == "trainable" else model
        setattr(owner, name, value)
    model.compile("sgd", "mse")
    return model


def with_setting(owner: str, name: str, value: Any) -> keras.Model:
    """A model of a class that makes its layers by itself, of which one is changed later."""
    model = inner()
    setattr(operator.attrgetter(owner)(model), name, value)
    return model


def rescaled() -> keras.Model:
    model = sequential(Scales())
    model.layers[0].scale = 2.0
    return model


def with_step() -> keras.Model:
    model = sequential()
    model.train_step = types.MethodType(lambda self, data: {}, model)
    return model


def with_lora() -> keras.Model:
    model = sequential(keras.layers.Dense(3))
    model.layers[0].enable_lora(2)
    model.compile("sgd", "mse")
    return model


def under_another_policy() -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return sequential()
    finally:
        keras.config.set_dtype_policy("float32")


def frozen_later() -> keras.Model:
    model = sequential(keras.layers.Dense(3))
    model.compile("adam", "mse")
    model.fit(X, X[:, :1], verbose=0)
    model.layers[0].trainable = False
    return model


def with_unused_optimizer() -> keras.Model:
    model = sequential()
    model.unused = keras.optimizers.SGD()
    return model


class Stepping(keras.Model):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Discriminating(Stepping):
    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(*data, self(data[0], training=True))
        self.d_opt.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def with_optimizer_set_later(kind: type[keras.Model]) -> keras.Model:
    inputs = keras.Input([3])
    model = kind(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    model.d_opt = keras.optimizers.SGD()
    return model


X = np.ones((8, 3), np.float32)
MEDIAN = pinball(0.5)
TWO = "has several functions or classes of the name loss, by which Keras finds one alone"
LOST: list[tuple[str, Callable[[], keras.Model]]] = [
    (TWO, lambda: sequential(loss=pinball(0.9), metrics=[pinball(0.1)])),
    (TWO, lambda: sequential(loss=[pinball(0.9)], weighted_metrics=[MEDIAN])),
    ("does not save gamma of its Focal, .*; give Focal a get_config", lambda: sequential(loss=Focal(5.0))),
    ("does not save reduction of its Unnamed", lambda: sequential(loss=Unnamed("sum"))),
    ("does not save threshold of its Above", lambda: sequential(metrics=[Above(0.7)])),
    ("does not save limit of its AtMost", lambda: sequential(keras.layers.Dense(3, kernel_constraint=AtMost([2.0])))),
    ("does not save scale of its Scales", rescaled),
    ("does not save beta of its Inner", lambda: inner(beta=np.zeros(2))),
    ("does not save gamma of its Inner", lambda: inner(gamma=4.0)),
    ("does not save train_step of its Sequential, .*; make train_step a method of a subclass", with_step),
    ("does not save which layers of it are not to be trained", lambda: inner(trainable=False)),
    ("does not save distance of its Between", lambda: sequential(loss=Between(keras.ops.add))),
    (
        "does not save delta of its Huber, .*; give a function in place",
        lambda: sequential(loss=keras.losses.Huber(0.3)),
    ),
    ("does not save inner of its Between", lambda: sequential(loss=Between(inner=keras.losses.Huber()))),
    ("does not save rate of its Dropout, .*; set rate where .*__init__", lambda: with_setting("dropout", "rate", 0.9)),
    ("does not save which layers of it are not to be trained", lambda: with_setting("norm", "trainable", False)),
    (
        "does not save the regularizer of .*/kernel as it is now; give it to the layer",
        lambda: with_setting("dense.kernel", "regularizer", keras.regularizers.L2()),
    ),
    (
        "does not save the constraint of .*/kernel as it is now; give it to the layer",
        lambda: with_setting("dense.kernel", "constraint", AtMost()),
    ),
    ("does not load .*/lora_kernel_a as it has saved it", with_lora),
    (
        r"its optimizer is a LossScaleOptimizer, and under the dtype policy that is set now \(float32\) Keras gives "
        "an? SGD when it loads the model; set the policy",
        under_another_policy,
    ),
    (
        r"cannot load it again \(\S*Bare.__init__\(\) got an unexpected keyword argument '\w+'\); let the __init__ of "
        r"Bare take \*\*kwargs and pass them to super\(\).__init__",
        lambda: sequential(Bare()),
    ),
    (
        r"cannot load it again \(\S*Factor.__init__\(\) missing .* 'by'\); give its classes a get_config",
        lambda: sequential(Factor(2.0)),
    ),
    ("its optimizer has 10 variables, and 6 when Keras loads .*, which leaves out its state", frozen_later),
    (
        "its d_opt is an SGD, and Keras gives none when it loads the model; make it in the __init__ of the model",
        lambda: with_optimizer_set_later(Discriminating),
    ),
]
KEPT: list[Callable[[], keras.Model]] = [
    with_unused_optimizer,
    lambda: with_optimizer_set_later(Stepping),
    lambda: sequential(Scales(), Scales(), loss=MEDIAN, metrics=[MEDIAN, Above()]),
    lambda: sequential(keras.layers.Dense(3, kernel_constraint=AtMost()), loss=Focal()),
    lambda: sequential(keras.layers.Dense(3, kernel_regularizer="l2"), loss=Between()),
    lambda: sequential(loss=keras.losses.Huber(), metrics=[keras.metrics.AUC(), keras.metrics.CosineSimilarity()]),
    inner,
]


def shipped(folder: Path, model: keras.Model) -> Any:
    return ship(folder, model, "given", Splits(Arrays(X, X[:, :1]), num_classes=None), EpochPlan())


@pytest.mark.parametrize(("says", "make"), LOST)
def test_what_keras_does_not_save_of_a_compiled_model_is_refused(
    says: str, make: Callable[[], keras.Model], tmp_path: Path
) -> None:
    way = "give a function that builds (it|it instead|the model)"
    with pytest.raises(FitError, match=rf"^model \(.*\): .*{says}.*{way}$"):
        shipped(tmp_path, make())


def test_a_given_model_may_have_a_step_of_its_own(tmp_path: Path) -> None:
    """By now the updates of its optimizer are intercepted, of which Keras saves nothing."""
    inputs = keras.Input([3])
    model = Stepping(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    own_step.build(model, Splits(Arrays(X, X[:, :1])).layout, "given", None)
    assert type(shipped(tmp_path, model)) is Stepping


@pytest.mark.parametrize("make", KEPT)
def test_what_no_copy_can_have_is_no_setting(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    model = make()
    model.fit(X, X[:, :1], verbose=0)
    assert type(shipped(tmp_path, model)) is type(model)
