"""Models of public bug reports: one asynchronous worker and two synchronous ones give what `keras.Model.fit` gives."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config, sync_loop
from tests.replica.traced_models import IN_ASYNC as TRACED_IN_ASYNC
from tests.replica.traced_models import IN_SYNC as TRACED_IN_SYNC
from tests.replica.traced_models import MODELS as TRACED_MODELS
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.model.source import EpochPlan
from tf2dist.testing import SyncWorker, SyncWorkers

layers = keras.layers
BATCH, EPOCHS = 20, 2
PLAN = EpochPlan(epochs=EPOCHS, shuffle=False)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4 * BATCH, 4)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5], [0.0]]).astype("float32")
LETTERS = RNG.choice([b"a", b"b", b"c"], [len(X), 1])
WHOLE = RNG.integers(10, 14, [len(X), 1])
WORDS = np.array([[b" ".join(RNG.choice([b"red", b"green", b"blue", b"dog"], 3))] for _ in X])
WAVE = np.sin(np.arange(len(X) + 20) / 5).astype("float32")
WINDOWS = np.lib.stride_tricks.sliding_window_view(WAVE, 10)[: len(X), :, None].copy()
Training = tuple[dict[str, float], list[np.ndarray]]  # the means of the metrics over all steps, and the weights


def dense(units: int, activation: str | None = None, seed: int = 1) -> keras.layers.Layer:
    return layers.Dense(units, activation, kernel_initializer=keras.initializers.GlorotUniform(seed))


def perceptron() -> keras.Model:
    return keras.Sequential([keras.Input([4]), dense(8, "tanh"), dense(1, seed=2)])


def compiled(model: keras.Model, optimizer: Any = "sgd", loss: Any = "mse", **more: Any) -> keras.Model:
    model.compile(optimizer, loss, **more)
    return model


class Softened(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A user's own optimizer, with a slot and a setting."""

    def __init__(self, learning_rate: float = 0.05, beta: float = 0.9, **more: Any) -> None:
        super().__init__(learning_rate=learning_rate, **more)
        self.beta = beta

    def build(self, variables: list[keras.Variable]) -> None:
        if not self.built:
            super().build(variables)
            self.means = [self.add_variable_from_reference(variable, "mean") for variable in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        mean = self.means[self._get_variable_index(variable)]
        self.assign(mean, mean * self.beta + gradient * (1 - self.beta))
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * mean / (1 + keras.ops.abs(mean)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "beta": self.beta}


def triplet(_: Any, towers: Any) -> Any:
    anchor, right, wrong = (towers[:, number] for number in range(3))
    distances = [keras.ops.sum(keras.ops.square(anchor - other), -1) for other in (right, wrong)]
    return keras.ops.relu(distances[0] - distances[1] + 1.0)


def towers() -> keras.Model:
    inputs = [keras.Input([4]) for _ in range(3)]
    tower = keras.Sequential([keras.Input([4]), dense(8, "relu"), dense(3, seed=2), layers.Reshape([1, 3])])
    stacked = layers.Concatenate(1)([tower(one) for one in inputs])
    return compiled(keras.Model(inputs, stacked), keras.optimizers.Adagrad(0.05), triplet)


def lookups() -> keras.Model:
    inputs = {"s": keras.Input([1], dtype="string"), "i": keras.Input([1], dtype="int64"), "f": keras.Input([4])}
    normalized = layers.Normalization()
    normalized.adapt(X)
    found = [
        layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(inputs["s"]),
        layers.IntegerLookup(vocabulary=[10, 11, 12], output_mode="one_hot")(inputs["i"]),
        layers.Discretization([-1.0, 0.0, 1.0], output_mode="multi_hot")(inputs["f"]),
        normalized(inputs["f"]),
    ]
    return compiled(keras.Model(inputs, dense(1)(layers.Concatenate()(found))), keras.optimizers.Adam(0.02))


def text(mode: str) -> keras.Model:
    words = layers.TextVectorization(
        max_tokens=8, output_mode=mode, output_sequence_length=3 if mode == "int" else None
    )
    words.adapt(WORDS[:, 0])
    line = keras.Input([1], dtype="string")
    found = words(line)
    if mode == "int":
        table = layers.Embedding(8, 4, embeddings_initializer=keras.initializers.RandomUniform(seed=1))
        found = layers.Flatten()(table(found))
    return compiled(keras.Model(line, dense(1)(found)))


def transferred(frozen: bool) -> keras.Model:
    base = keras.Sequential([keras.Input([4]), dense(8, "relu"), layers.BatchNormalization(), dense(8, "relu", 2)])
    base.trainable = not frozen
    # Of normalization that looks at the batch two workers would have two kinds.
    base.layers[0].trainable = base.layers[1].trainable = False
    x = keras.Input([4])
    return compiled(keras.Model(x, dense(1)(base(x))), keras.optimizers.AdamW(0.01))


def series() -> keras.Model:
    recurrent = keras.initializers.Orthogonal(seed=2)
    lstm = layers.LSTM(6, kernel_initializer=keras.initializers.GlorotUniform(1), recurrent_initializer=recurrent)
    return compiled(keras.Sequential([keras.Input([10, 1]), lstm, dense(1)]), keras.optimizers.Adam(0.01))


def nested() -> keras.Model:
    """A layer that stands in two places, and a model that is called twice."""
    x, other = keras.Input([4]), keras.Input([4])
    shared = dense(6, "tanh")
    inner = keras.Model(x, dense(3, "relu", 2)(shared(x)))
    pair = [inner(x), inner(other)]
    outputs = {
        "sum": dense(1, seed=4)(layers.Concatenate()([*pair, shared(x)])),
        "gap": dense(1, seed=5)(layers.Subtract()(pair)),
    }
    losses = {"sum": "mse", "gap": "mae"}
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return compiled(keras.Model([x, other], outputs), optimizer, losses, loss_weights={"sum": 1.0, "gap": 0.5})


def features() -> keras.Model:
    import tensorflow as tf

    kinds = keras.utils.FeatureSpace
    space = kinds({
        "s": kinds.string_categorical(num_oov_indices=0),
        "f": kinds.float_normalized(),
        "i": kinds.integer_categorical(num_oov_indices=0),
    })  # fmt: skip
    rows = {"s": LETTERS[:, 0], "f": X[:, 0], "i": WHOLE[:, 0]}
    space.adapt(tf.data.Dataset.from_tensor_slices(rows).batch(BATCH))
    return compiled(keras.Model(space.get_inputs(), dense(1)(space.get_encoded_features())))


def squared_gaps(y: Any, y_pred: Any) -> Any:
    gaps = keras.tree.map_structure(lambda one, other: keras.ops.mean(keras.ops.square(one - other)), y, y_pred)
    return sum(keras.tree.flatten(gaps))


class NeverCompiled(keras.Model):  # type: ignore[misc]
    """Computes its loss without the losses that it was compiled with."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        return squared_gaps(y, y_pred)


class WithoutTraining(keras.Model):  # type: ignore[misc]
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return 3 * squared_gaps(y, y_pred)


class TrainsByCompiled(keras.Model):  # type: ignore[misc]
    """Computes the losses that it was compiled with in training alone."""

    wanted = True

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, *, training: bool) -> Any:
        if training == self.wanted:
            return super().compute_loss(x, y, y_pred, sample_weight)
        return squared_gaps(y, y_pred)


class EvaluatesByCompiled(TrainsByCompiled):
    wanted = False


def one_output(kind: type[keras.Model], loss: Any, **more: Any) -> keras.Model:
    x = keras.Input([4])
    return compiled(kind(x, dense(1, seed=2)(dense(8, "tanh")(x))), keras.optimizers.SGD(0.05), loss, **more)


def two_outputs(kind: type[keras.Model], loss: Any, **more: Any) -> keras.Model:
    x = keras.Input([4])
    hidden = dense(8, "tanh")(x)
    outputs = {"sum": dense(1, seed=2)(hidden), "gap": dense(1, seed=3)(hidden)}
    return compiled(kind(x, outputs), keras.optimizers.SGD(0.05), loss, **more)


SUM = keras.losses.MeanSquaredError(reduction="sum")
EACH = {"sum": "mae", "gap": "mse"}
Y_OF_TWO = {"sum": Y, "gap": Y / 2}
# The function that builds the model, x and y.
MODELS: dict[str, tuple[Callable[[], keras.Model], Any, Any]] = {
    "accumulation": (lambda: compiled(perceptron(), keras.optimizers.Adam(0.02, gradient_accumulation_steps=2)), X, Y),
    "custom optimizer": (lambda: compiled(perceptron(), Softened()), X, Y),
    "towers": (towers, [X, X + 0.1, X[::-1].copy()], Y),
    "lookups": (lookups, {"s": LETTERS, "i": WHOLE, "f": X}, Y),
    "words": (lambda: text("int"), WORDS, Y),
    "weighted words": (lambda: text("tf_idf"), WORDS, Y),
    "frozen": (lambda: transferred(True), X, Y),
    "transferred": (lambda: transferred(False), X, Y),
    "series": (series, WINDOWS, WAVE[10 : 10 + len(X), None]),
    "nested": (nested, [X, X[::-1].copy()], Y_OF_TWO),
    "own loss": (lambda: one_output(NeverCompiled, "mse", metrics=["mae"]), X, Y),
    "own loss for a list": (lambda: one_output(WithoutTraining, ["mae"], weighted_metrics=["mae"]), X, Y),
    "own loss for a sum": (lambda: one_output(NeverCompiled, SUM), X, Y),
    "own loss for none": (lambda: one_output(WithoutTraining, None, metrics=["mae"]), X, Y),
    "own losses": (lambda: two_outputs(NeverCompiled, EACH, metrics={"sum": ["mae"], "gap": "mse"}), X, Y_OF_TWO),
    "own losses for one": (lambda: two_outputs(WithoutTraining, "mae"), X, Y_OF_TWO),
    "compiled in training": (lambda: two_outputs(TrainsByCompiled, EACH, metrics={"sum": ["mae"]}), X, Y_OF_TWO),
    "compiled in evaluations": (lambda: two_outputs(EvaluatesByCompiled, EACH), X, Y_OF_TWO),
    "sum in evaluations": (lambda: one_output(EvaluatesByCompiled, SUM), X, Y),
    "features": (features, {"s": LETTERS, "i": WHOLE, "f": X[:, :1]}, Y),
    **TRACED_MODELS,
}
# What is trained whenever tests run, and by `make thorough`; the others are like them.
THOROUGH_IN_ASYNC = [
    *("accumulation", "towers", "nested", "own losses"),
    *("traced call", "recomputed function", "traced metric", "cell"),
]
IN_ASYNC = ["lookups", *(name for name in TRACED_IN_ASYNC if name not in THOROUGH_IN_ASYNC)]
THOROUGH_IN_SYNC = [
    *("accumulation", "towers", "words", "frozen", "series", "features", "own loss"),
    *("nested", "own losses", "sum in evaluations", "lookups", "scaled"),
]
IN_SYNC = [
    *("custom optimizer", "compiled in training"),
    *(name for name in TRACED_IN_SYNC if name not in THOROUGH_IN_SYNC),
]


@functools.cache
def plain_keras(name: str) -> Training:
    import tensorflow as tf

    make, x, y = MODELS[name]
    model = make()
    # As tensors, since Keras does not take arrays of bytes.
    given = keras.tree.map_structure(tf.constant, x)
    history = model.fit(given, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    return {name: float(np.mean(values)) for name, values in history.items()}, weights_of(model)


def weights_of(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.weights]


def source_of(name: str) -> InMemorySource:
    make, x, y = MODELS[name]
    return InMemorySource(make, Splits(Arrays(x, y), num_classes=None), PLAN)


def train(loop: Any) -> Training:
    loop.train(EPOCHS * len(X) // BATCH)
    return loop.metrics.results(loop.progress.metrics), weights_of(loop.model)


def train_in_sync(worker: SyncWorker, names: list[str]) -> dict[str, Training]:
    found = {}
    for name in names:
        print("model", name, flush=True)  # pytest shows it if the training fails
        source, config = source_of(name), run_config(batch_size=BATCH // 2, steps_per_execution=4)
        loop = sync_loop(worker, config, source)
        found[name] = train(loop)
    return found


@pytest.fixture(scope="module")
def in_sync(sync_workers: SyncWorkers) -> Callable[[str], Training]:
    """Many models at once, since workers take seconds to connect."""

    @functools.cache
    def trained(kind: tuple[bool, bool]) -> dict[str, Training]:
        names = [name for name in MODELS if kind_of(name) == kind]
        found: list[dict[str, Training]] = sync_workers(train_in_sync, 2, (names,), 240.0)
        return found[1]

    def kind_of(name: str) -> tuple[bool, bool]:
        return name in IN_SYNC, name in THOROUGH_IN_SYNC

    return lambda name: trained(kind_of(name))[name]


def marked(fast: list[str], thorough: list[str]) -> list[Any]:
    mark_of = {name: pytest.mark.thorough if name in thorough else pytest.mark.slow for name in MODELS}
    return [name if name in fast else pytest.param(name, marks=mark_of[name]) for name in MODELS]


def assert_like_keras(name: str, found: Training) -> None:
    (metrics, weights), (wanted, others) = found, plain_keras(name)
    assert metrics == pytest.approx(wanted, rel=1e-5)
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", marked(IN_SYNC, THOROUGH_IN_SYNC))
def test_two_synchronous_workers(name: str, in_sync: Callable[[str], Training]) -> None:
    assert_like_keras(name, in_sync(name))


@pytest.mark.parametrize("name", marked(IN_ASYNC, THOROUGH_IN_ASYNC))
def test_one_asynchronous_worker(
    name: str, async_loop: Callable[..., Any], publishing: Callable[[Splits], None]
) -> None:
    config, source = run_config(batch_size=BATCH, steps_per_execution=4), source_of(name)
    publishing(source.load())
    assert_like_keras(name, train(async_loop(config, num_workers=1, num_ps=1, source=source)))
