"""Unsupported models, optimizers and data sets are reported in one line before training begins."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import Command
from tests.replica.small_runs import run_config, source_and_splits, split_of
from tf2dist import data, registry
from tf2dist.data.loading import load_digits
from tf2dist.errors import ConfigError, DataError
from tf2dist.model import builtin, model_checks, support
from tf2dist.model.compiled_step import CompiledStep
from tf2dist.model.source import build_step
from tf2dist.model.step import Step
from tf2dist.training.synchronous.sync_setup import _check

layers = keras.layers
ARRAYS = "tf2dist.data.Arrays of x and y"


def dense(outputs: int = 10, activation: str | None = None, inputs: tuple[int, ...] = (28, 28, 1)) -> keras.Model:
    logits = layers.Dense(outputs, activation)
    return keras.Sequential([keras.Input(inputs), layers.Flatten(), logits])


def model_with(num_inputs: int, num_outputs: int) -> keras.Model:
    inputs = [keras.Input((28, 28, 1)) for _ in range(num_inputs)]
    flat = layers.Flatten()(layers.Add()(inputs) if num_inputs > 1 else inputs[0])
    return keras.Model(inputs, [layers.Dense(10)(flat) for _ in range(num_outputs)])


# By a part of the message: what the builder returns.
REFUSED: dict[str, Callable[[], Any]] = {
    "gives None, and must give a keras.Model": lambda: None,
    "gives a Dense, and must": lambda: layers.Dense(10),
    r"gives \[batch, 12\], and must give \[batch, 10\]": lambda: dense(12),
    r"gives \[batch, 28, 28, 10\], and must": lambda: keras.Sequential([keras.Input((28, 28, 1)), layers.Dense(10)]),
    "has 2 inputs": lambda: model_with(2, 1),
    "gives a list, and must give one tensor": lambda: model_with(1, 2),
    r"takes inputs of \[32, 32, 1\], and the data has \[28, 28, 1\]": lambda: dense(inputs=(32, 32, 1)),
}


@pytest.fixture
def register() -> Iterator[Callable[[registry.Registry, Any], None]]:
    """Yields a function that registers another function as "mine" until the test ends."""
    with contextlib.ExitStack() as stack:

        def register_as_mine(functions: registry.Registry, function: Any) -> None:
            functions["mine"] = function
            stack.callback(functions.pop, "mine", None)

        yield register_as_mine


def build_mine() -> Step:
    """Builds the model that is registered as "mine" for the digits, with its checks."""
    source, splits = source_and_splits(run_config("mine"))
    return build_step(source, splits, run_config("mine"), contextlib.nullcontext())[0]


@pytest.mark.parametrize("says", REFUSED, ids=lambda says: says.replace("\\", ""))
def test_a_model_that_cannot_be_trained_is_refused(register: Callable[..., None], says: str) -> None:
    register(registry.MODELS, lambda input_shape, num_classes: REFUSED[says]())
    with pytest.raises(ConfigError, match=says) as raised:
        build_mine()
    assert str(raised.value).startswith("model (mine): ")
    assert "\n" not in str(raised.value)


def test_inputs_with_or_without_a_channel_dimension_are_accepted(register: Callable[..., None]) -> None:
    """Keras itself adds or removes a last dimension of 1."""

    def flat(shape: tuple[int | None, ...]) -> keras.Model:
        return keras.Sequential([keras.Input(shape), layers.Reshape([784]), layers.Dense(10)])

    for shape in ((28, 28), (28, 28, 1), (28, 28, 1, 1), (None, None, 1)):
        register(registry.MODELS, lambda input_shape, num_classes, shape=shape: flat(shape))
        build_mine()


def test_a_builder_with_other_arguments_is_refused(register: Callable[..., None]) -> None:
    register(registry.MODELS, dense)
    with pytest.raises(ConfigError, match=r"model \(mine\): its function must take input_shape and num_classes"):
        build_mine()


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", None])
def test_probabilities_instead_of_logits_cause_a_warning(register: Callable[..., None], activation: str | None) -> None:
    register(registry.MODELS, lambda input_shape, num_classes: dense(10, activation))
    advice = model_checks.advice_on_outputs(build_mine())
    assert f"leave the {activation} out" in advice if activation else not advice


def test_random_numbers_from_a_generator_that_no_layer_owns_are_refused(register: Callable[..., None]) -> None:
    class Noise(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, seed: Any = None) -> None:
            super().__init__()
            self.seed = seed

        def call(self, inputs: Any) -> Any:
            return inputs + keras.random.normal((10,), seed=self.seed)

    def noisy(seed: Any) -> Callable[..., keras.Model]:
        return lambda input_shape, num_classes: keras.Sequential([dense(), Noise(seed)])

    # Without a seed Keras draws from its global generator, which belongs to no layer.
    register(registry.MODELS, noisy(None))
    message = r"^model \(mine\): its call changes .*; make it a weight of a layer .*; a recurrent layer needs"
    with pytest.raises(ConfigError, match=message):
        build_mine()
    register(registry.MODELS, noisy(keras.random.SeedGenerator(1)))
    build_mine()


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: None, "gives None, and must give a keras.optimizers.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(register: Callable[..., None], build: Any, says: str) -> None:
    register(registry.OPTIMIZERS, build)
    with pytest.raises(ConfigError, match=rf"optimizer \(mine\): .*{says}"):
        builtin.build_optimizer({"name": "mine"}, 10)


@pytest.mark.parametrize(
    ("dtype", "is_refused"), [("bool", True), ("uint8", True), ("int32", False), ("float32", False)]
)
def test_state_that_cannot_be_averaged_is_refused(dtype: str, is_refused: bool) -> None:
    state = [keras.Variable(np.ones(2, dtype), trainable=False, dtype=dtype, name="seen")]
    step: Any = SimpleNamespace(state=state, model=None)
    with pytest.raises(ConfigError, match=f"seen is of type {dtype}") if is_refused else contextlib.nullcontext():
        support.check_step(support.SYNC, "mine", step)


def check_synchronously(examples: int, *, xla: bool, num_workers: int = 3) -> None:
    """What mode=sync checks of a model with a synchronized layer, for so many examples."""
    norm = layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), norm, layers.Dense(10)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    config = run_config()
    config.devices.xla = xla
    step = CompiledStep(model, source_and_splits(config)[1].layout)
    sharding: Any = SimpleNamespace(num_examples=examples, step_size=60)
    _check("mine", config, step, sharding, num_workers)


def test_synchronized_layers_are_refused_with_xla() -> None:
    check_synchronously(600, xla=False)
    check_synchronously(600, xla=True, num_workers=1)
    with pytest.raises(ConfigError, match=r"is synchronized, which devices.xla=true cannot compile"):
        check_synchronously(600, xla=True)


def test_data_of_another_type_is_refused(register: Callable[..., None]) -> None:
    digits = load_digits(run_config().data)
    test = split_of(digits, "test")
    config = run_config().data
    config.name = "mine"
    empty = data.Arrays(test.x[:0], test.y[:0])
    for returned, says in (
        (None, "gives None, and must give tf2dist.data.Splits"),
        ((digits.train, digits.test), "gives a tuple, and must give"),
        (tf.data.Dataset.range(3), "gives a _RangeDataset, and must give"),
        (data.Splits((test.x, test.y), digits.validation, test), f"tuple.*{ARRAYS}"),  # type: ignore[arg-type]
        (data.Splits(digits.train, digits.validation, empty), "test has no examples"),
    ):
        register(registry.DATA, lambda config, returned=returned: returned)
        with pytest.raises(DataError, match=rf"data \(mine\): .*{says}"):
            data.load(config)


def test_synchronized_layers_need_an_example_for_each_worker_in_the_last_step() -> None:
    """A worker without one computes an example of padding, which the layer would count like the others."""
    for last_batch in (0, 3, 57):  # 0: the last step is as large as the others
        check_synchronously(600 + last_batch, xla=False)
    with pytest.raises(ConfigError, match=r"model \(mine\): batch_norm.* 2 examples for 3 workers"):
        check_synchronously(602, xla=False)


PLUGIN = """
import keras
import tensorflow as tf
from tf2dist import data, registry

class NotForXla(keras.layers.Layer):
    def call(self, inputs):
        return inputs + 0.0 * tf.strings.to_number(tf.as_string(inputs))

@registry.register_model("twelve")
def twelve(input_shape, num_classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(12)])

@registry.register_model("not_for_xla")
def not_for_xla(input_shape, num_classes):
    layers = keras.layers
    return keras.Sequential([keras.Input(input_shape), layers.Flatten(), NotForXla(), layers.Dense(num_classes)])

@registry.register_model("synchronized")
def synchronized(input_shape, num_classes):
    layers = keras.layers
    norm = layers.BatchNormalization(synchronized=True)
    return keras.Sequential([keras.Input(input_shape), layers.Flatten(), norm, layers.Dense(num_classes)])

class Seen(keras.layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False, name="seen")

    def call(self, inputs):
        self.seen.assign(True)
        return inputs

@registry.register_model("state_without_a_mean")
def state_without_a_mean(input_shape, num_classes):
    layers = keras.layers
    return keras.Sequential([keras.Input(input_shape), layers.Flatten(), Seen(), layers.Dense(num_classes)])
"""


NOT_FOR_XLA = "devices.xla (true): XLA cannot compile the model: AsString (No registered"


@pytest.mark.parametrize(
    ("mode", "model", "says"),
    [
        ("sync", "twelve", "model (twelve): gives [batch, 12], and must give [batch, 10]"),
        pytest.param("async", "not_for_xla", NOT_FOR_XLA, marks=pytest.mark.slow),
        *(
            pytest.param("sync", model, says, marks=pytest.mark.slow)
            for model, says in (
                ("synchronized", "is synchronized, which devices.xla=true cannot compile"),
                ("state_without_a_mean", "seen is of type bool"),
                ("not_for_xla", NOT_FOR_XLA),
            )
        ),
    ],
)
def test_the_command_reports_a_refused_model_in_one_line(command: Command, mode: str, model: str, says: str) -> None:
    (command.folder / "plugin.py").write_text(PLUGIN)
    options = ["data=digits", "cluster=local2", "plugins=[plugin.py]", "devices.xla=true", "train.steps=5"]
    finished = command(f"mode={mode}", f"model={model}", *options)
    assert finished.code == 2, finished
    output = finished.stderr.partition("tf2dist: error: ")[2].strip()
    assert says in output, finished
    assert len(output.splitlines()) == 1, finished
