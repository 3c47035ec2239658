"""What callbacks may not change in the model that they see, and what it shares with the one that is sent."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tf2dist.checkpoint.snapshot import EARLIER_ARRAY
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import FitError
from tf2dist.fitting import shipping
from tf2dist.fitting.callbacks import Callbacks
from tf2dist.fitting.mirror import Mirror
from tf2dist.model.optimizer_checks import has_trained
from tf2dist.model.source import EpochPlan
from tf2dist.tf_internals.keras import inner_optimizers, learning_rate_of
from tf2dist.training.finished_model import fill, saved_variables


def test_a_change_of_what_a_schedule_reads_is_refused() -> None:
    """The optimizers of the tasks have schedules of their own."""
    rate = keras.Variable(0.5, trainable=False, name="rate")
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(lambda: rate * 1.0), "mse")
    mirror = Mirror(model)
    mirror.put({}, (0.5,), 10)
    assert mirror.changes() == ({}, ())
    rate.assign(0.25)
    with pytest.raises(FitError, match=r"callbacks: rate was changed, which the schedule of the learning rate reads"):
        mirror.changes()


def test_the_count_of_updates_is_that_of_the_run() -> None:
    """The model that is given when a run goes on may have been trained for longer than the one that it began with."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(np.ones([20, 2]), np.ones(20), batch_size=1, verbose=0)
    mirror = Mirror(model)
    mirror.put({}, (0.5,), 30)
    assert int(model.optimizer.iterations) == 30
    mirror.put({EARLIER_ARRAY: np.array(7)}, (0.5,), 30)
    assert int(model.optimizer.iterations) == 37
    assert mirror.changes() == ({}, ())


class PartlyUsed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="partly_used")
        self.used = keras.layers.Dense(1, name="used")
        self.unused = keras.layers.Dense(2, name="unused", bias_initializer="ones")

    def build(self, shape: Any) -> None:
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, x: Any) -> Any:
        return self.used(x)


def partly_used() -> keras.Model:
    model = PartlyUsed()
    model.build((None, 2))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_variable_without_a_gradient_has_the_moving_average_of_keras() -> None:
    """The tasks have none of it: they leave such variables out of their optimizers."""
    trained, names = partly_used(), list(saved_variables(partly_used()))
    begun = Mirror(trained)
    trained.fit(np.ones([20, 2]), np.ones(20), batch_size=5, verbose=0)
    values = {name: np.array(variable) for name, variable in begun._named.items()}
    arrays = {name: value for name, value in values.items() if not name.startswith("optimizer/unused")}
    seen, finished, new = (partly_used() for _ in range(3))
    mirror = Mirror(seen)
    mirror.put(arrays, (0.1,), 4)
    assert mirror.changes() == ({}, ())
    fill(finished, names, arrays, 4)
    for model in (seen, finished):
        for mine, theirs in zip(model.optimizer.variables, trained.optimizer.variables, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, err_msg=theirs.path)
    Mirror(new).put({name: array for name, array in arrays.items() if name.startswith("model/")}, (0.1,), 0)
    assert not any(np.any(variable) for variable in new.optimizer.variables if "average" in variable.name)


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
SETTINGS: dict[str, tuple[Callable[[], Any], str, Any]] = {
    "momentum": (lambda: keras.optimizers.SGD(0.5, momentum=0.9), "momentum", 0.5),
    "nesterov": (lambda: keras.optimizers.SGD(0.5, momentum=0.9), "nesterov", True),
    "beta": (keras.optimizers.Adam, "beta_1", 0.5),
    "rho": (keras.optimizers.RMSprop, "rho", 0.5),
    "epsilon": (keras.optimizers.Adagrad, "epsilon", 0.5),
    "weight decay": (keras.optimizers.AdamW, "weight_decay", None),
    "clipping": (keras.optimizers.SGD, "clipnorm", 1.0),
    "moving averages": (keras.optimizers.SGD, "use_ema", True),
    "a variable": (lambda: keras.optimizers.SGD(momentum=0.9), "momentum", keras.Variable),
    "a schedule": (keras.optimizers.SGD, "learning_rate", SCHEDULE),
    "another schedule": (lambda: keras.optimizers.SGD(SCHEDULE), "learning_rate", copy.copy(SCHEDULE)),
    "an inner one": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "beta_2", 0.5),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_change_of_a_setting_of_the_optimizer_is_refused(name: str) -> None:
    """`keras.Model.fit` takes those that are set before its first step is traced, and ignores all later ones."""
    make, setting, value = SETTINGS[name]
    value = keras.Variable(0.9) if value is keras.Variable else value
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(make(), "mse")
    mirror = Mirror(model)
    mirror.put({}, (0.5,), 10)
    changed = inner_optimizers(model.optimizer)[0]
    if not callable(learning_rate_of(changed)):
        changed.learning_rate = 0.25  # a variable
    changed.counted_by_a_callback = 1
    assert mirror.changes()[0] == {}
    setattr(changed, setting, value)
    with pytest.raises(FitError, match=rf"callbacks: \w+\.{setting} was .* and is .* now.*; set it before fit"):
        mirror.changes()


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin"])
def test_a_change_of_a_layer_before_the_first_step_is_refused(hook: str) -> None:
    """`keras.Model.fit` takes it, since it traces its first step later, and ignores all later ones."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dropout(0.1, name="left_out"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = keras.callbacks.Callback()

    def change(*arguments: Any) -> None:
        model.layers[0].rate += 0.25

    setattr(callback, hook, change)
    callbacks = Callbacks([callback], Mirror(model), EpochPlan(epochs=2), 0, 10)
    with pytest.raises(FitError, match=r"callbacks: rate of left_out was 0.1 and is 0.35 now.*; set it before fit"):
        callbacks.begin(0, {}, (0.01,), 0, {})
    assert callbacks.after_epoch(0, {"loss": 1.0}, {}, (0.01,), 10).arrays == {}


def test_a_metric_that_reads_the_rate_of_a_schedule_is_refused() -> None:
    """The tasks count the steps in optimizers of their own."""
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5))
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=[lambda y, y_pred: optimizer.learning_rate])
    layout = Arrays(np.ones([20, 2], np.float32), np.ones([20, 1], np.float32)).layout
    with pytest.raises(FitError, match=r"its steps read \S*iteration of its optimizer.*; log the rate in"):
        Mirror(model, None, layout).put({"outside/0": np.array(0)}, (0.1,), 0)


def test_another_optimizer_is_refused() -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    mirror = Mirror(model)
    mirror.put({}, (0.01,), 10)
    model.compile("adam", "mse")
    with pytest.raises(
        FitError, match=r"callbacks: model.optimizer was an SGD and is an Adam now.*; set it before fit"
    ):
        mirror.changes()


def test_a_class_that_is_sent_still_refers_to_the_objects_of_this_process(tmp_path: Path) -> None:
    """cloudpickle would set what it unpickles into the class that was pickled: copies, which no callback changes."""
    held = [1]

    class Holder(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs

        def held(self) -> Any:
            return held

    model = keras.Sequential([keras.Input([2]), Holder(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = Arrays(np.zeros((4, 2), np.float32), np.zeros(4, np.float32))
    copy = shipping.ship(tmp_path, model, "it", Splits(data, num_classes=None), EpochPlan())
    assert copy is not None
    assert all(each.layers[0].held() is held for each in (model, copy))


@pytest.mark.parametrize("before", [True, False])
def test_a_change_of_what_is_trained_is_refused(before: bool) -> None:
    """`keras.Model.fit` follows it until its first step, and then no more."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="first"), keras.layers.Dense(1)])
    model.layers[0].trainable = before
    model.compile("sgd", "mse")
    mirror = Mirror(model)
    mirror.put({}, (0.01,), 10)
    assert mirror.changes() == ({}, ())
    model.layers[0].trainable = not before
    with pytest.raises(FitError, match=r"callbacks: whether .*first/kernel is trained was changed.*call fit once for"):
        mirror.changes()


def test_tasks_make_no_slots_for_the_optimizer_of_a_model_that_they_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a ps those of large tables would take as much memory as the tables."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adagrad(0.25), "mse", metrics=["mae"])
        return model

    splits = Splits(Arrays(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)), num_classes=None)
    shipping.ship(tmp_path, build, "it", splits, EpochPlan())
    monkeypatch.setattr(shipping, "is_task", False)
    model = shipping.ShippedSource(tmp_path).build(splits)
    assert not model.optimizer.built
    assert model.metrics[1].variables, "the metrics are built"
    assert float(model.optimizer.learning_rate) == 0.25


def test_an_optimizer_goes_on_from_the_updates_that_the_function_of_the_model_has_set() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(), "mse")
        model.optimizer.iterations.assign(5000)
        return model

    arrays = Arrays(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
    model = shipping.call_builder(build, "it", Splits(arrays, num_classes=None).layout, with_optimizer=False)
    assert has_trained(model.optimizer)
