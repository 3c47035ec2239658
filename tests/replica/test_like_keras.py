"""Both modes give the results that `keras.Model.fit` gives in one process with the same examples."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.replica import own_steps  # noqa: F401  registers models
from tests.replica.small_runs import run_config, source_and_splits, split_of, sync_loop
from tf2dist import data, registry
from tf2dist.config.schema import RunConfig
from tf2dist.data import pipeline
from tf2dist.data.passes import InputPosition, Sharding
from tf2dist.errors import ConfigError
from tf2dist.model import builtin, packing
from tf2dist.model.source import build_step, built_model
from tf2dist.model.step import Step
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.tf_internals.keras import seeds_of

TIMEOUT_SECS = 360.0  # the workers of one fixture train all models
pytestmark = pytest.mark.timeout(TIMEOUT_SECS + 60)
STEPS = 15  # of 100 examples; the 13th step has the last 57 of the 1,257 training examples
layers = keras.layers
# The "weights", the "metrics" of all steps, the evaluation of the "test" set and the states of "random" generators; of
# our runs also the "raw" weights, before those of the optimizer's moving averages replace them.
Training = dict[str, Any]
# Models that one synchronous worker trains: several ones would draw other numbers, or look at parts of the batch.
ONE_WORKER = ["no_training", "looks_at_the_batch", "random", "own_loss"]
# Models that one asynchronous worker trains.
ASYNCHRONOUS = [*ONE_WORKER, "large", "summed", "own_metrics", "contrastive", "distiller", "autoencoder"]
ASYNCHRONOUS_LATER = ["own_metrics", "contrastive", "autoencoder"]
# What another mode or model shows as well: `make thorough` trains these.
ASYNCHRONOUS_THOROUGH = ["no_training", "looks_at_the_batch", "own_loss", "summed", "large", "distiller"]
ONE_WORKER_THOROUGH = ["no_training", "random", "own_loss"]
THOROUGH = [
    *("contrastive", "distiller", "large", "ignores_a_class", "masked", "one_number"),
    *("synchronized", "gradient_accumulation_steps"),
]
# The models of `own_steps`. Several updates in a step need Keras 3.15.
OWN_STEPS = [
    *("distiller", "autoencoder", "contrastive", "contrastive_step", "own_metrics"),
    *(("gan", "critic") if hasattr(keras.optimizers, "MultiOptimizer") else ()),
]
# Models that two synchronous workers train.
TWO_WORKERS = [
    "large",
    "spectral",
    "synchronized",
    "summed",
    "aggregated",
    "ignores_a_class",
    "masked",
    "one_number",
    *OWN_STEPS,
]
# Of the models and settings for two workers those that are like others; tests/e2e trains a critic.
LATER = ["critic", "autoencoder", "contrastive_step", "own_metrics", "ema_overwrite_frequency"]
# Settings of the optimizer, with which a softmax model is trained.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 4, "weight_decay": 0.01},
    "ema_overwrite_frequency": {"use_ema": True, "ema_overwrite_frequency": 5},
    "moving_averages": {"use_ema": True, "ema_momentum": 0.9, "loss_scale_factor": 1024.0, "global_clipnorm": 0.5},
}


def first_layers(input_shape: tuple[int, ...]) -> list[Any]:
    return [keras.Input(input_shape), layers.Rescaling(1 / 255), layers.Flatten()]


@registry.register_model("large")
def large(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Three kernels exceed `packing.LARGE_BYTES`, so each is sent as a tensor of its own."""
    hidden = [layers.Dense(601, "relu"), layers.Dense(601, "relu"), layers.Dense(600, "relu")]
    return keras.Sequential([*first_layers(input_shape), *hidden, layers.Dense(num_classes)])


@registry.register_model("spectral")
def spectral(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Spectral normalization assigns the trained kernels in each call."""
    hidden = layers.SpectralNormalization(layers.Dense(20, "relu"))
    return keras.Sequential(
        [*first_layers(input_shape), hidden, layers.SpectralNormalization(layers.Dense(num_classes))],
    )


@registry.register_model("synchronized")
def synchronized(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    norm = layers.BatchNormalization(synchronized=True, momentum=0.9)
    return keras.Sequential(
        [*first_layers(input_shape), layers.Dense(20), norm, layers.ReLU(), layers.Dense(num_classes)]
    )


@registry.register_model("no_training")
class NoTraining(keras.Model):  # type: ignore[misc]
    """A model whose `call` has no argument `training`."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.flatten = keras.Sequential(first_layers(input_shape))
        self.logits = layers.Dense(num_classes)

    def call(self, images: Any) -> Any:
        return self.logits(self.flatten(images))


@registry.register_model("looks_at_the_batch")
class LooksAtTheBatch(NoTraining):
    """A model that passes `training` to no layer, and adds losses that depend on the number of examples."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.hidden = layers.Dense(20, "relu", activity_regularizer=keras.regularizers.L2(0.001))

    def call(self, images: Any, training: bool = False) -> Any:
        hidden = self.hidden(self.norm(self.flatten(images)))
        self.add_loss(0.01 * keras.ops.mean(hidden, axis=0))
        return self.logits(hidden)


class Idle(keras.layers.Layer):  # type: ignore[misc]
    """Has weights to which no gradient leads: Keras's optimizers do not even decay them."""

    def build(self, shape: Any) -> None:
        self.unused = self.add_weight(name="unused", shape=(3,), initializer="ones")
        self.stopped = self.add_weight(name="stopped", shape=shape[1:], initializer="ones")

    def call(self, x: Any) -> Any:
        return x * keras.ops.stop_gradient(self.stopped)


@registry.register_model("random")
def random(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Draws random numbers from several generators, twice from one of them; and decays its weights."""
    dropout = layers.Dropout(0.3)
    hidden = [layers.Dense(20, "relu"), dropout, layers.GaussianNoise(0.1), Idle()]
    model = keras.Sequential([*first_layers(input_shape), dropout, *hidden, layers.Dense(num_classes)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, weight_decay=0.01), loss, metrics=["accuracy"])
    return model


@registry.register_model("summed")
def summed(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A model whose loss is the sum over the batch."""
    model = keras.Sequential([*first_layers(input_shape), layers.Dense(num_classes)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(keras.optimizers.SGD(0.001), loss, metrics=["accuracy"])
    return model


class Counts(keras.layers.Layer):  # type: ignore[misc]
    """Has a weight for each way in which replicas put their changes together, and some of what they gather."""

    def build(self, shape: Any) -> None:
        ways = {"seen": "sum", "total": "sum", "steps": "only_first_replica", "mean": "mean", "middle": "none"}
        for name, way in ways.items():
            more = {"initializer": "zeros", "trainable": False, "aggregation": way}
            setattr(self, name, self.add_weight(shape=(), name=name, **more))
        more = {"initializer": "zeros", "trainable": False}
        self.largest = self.add_weight(shape=shape[1:], name="largest", **more)
        self.queue = self.add_weight(shape=(160, *shape[1:]), name="queue", **more)
        self.next_row = self.add_weight(shape=(), name="next_row", dtype="int32", **more)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count(x)
        return x

    def count(self, x: Any) -> None:
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        self.total.assign(0.5 * self.total + keras.ops.sum(x) / 1000)
        self.steps.assign_add(1)
        for variable in (self.mean, self.middle):
            variable.assign(0.5 * variable + keras.ops.mean(x))
        rows = tf2dist.gather(x)
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(rows, axis=0)))
        places = (self.next_row + keras.ops.arange(keras.ops.shape(rows)[0])) % 160
        self.queue.assign(keras.ops.scatter_update(self.queue, places[:, None], rows))
        self.next_row.assign((self.next_row + keras.ops.shape(rows)[0]) % 160)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))


@registry.register_model("aggregated")
def aggregated(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    return keras.Sequential([*first_layers(input_shape), layers.Dense(20), Counts(), layers.Dense(num_classes)])


class OwnLoss(keras.Model):  # type: ignore[misc]
    """A model that overrides `compute_loss`."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred - keras.ops.one_hot(y, 10))) + 0.01 * keras.ops.max(y_pred)


@registry.register_model("own_loss")
def own_loss(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    images = keras.Input(input_shape)
    model = OwnLoss(images, keras.Sequential([*first_layers(input_shape), layers.Dense(num_classes)])(images))
    model.compile(keras.optimizers.SGD(0.1), metrics=["accuracy"])
    return model


def on_classes(loss: Any, *more: keras.Layer, input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A linear model that is compiled with a loss of the logits."""
    model = keras.Sequential([*first_layers(input_shape), layers.Dense(num_classes), *more])
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


@registry.register_model("ignores_a_class")
def ignores_a_class(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """In each step the halves of the batch have other numbers of examples of this class."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
    hidden = layers.Dense(num_classes, kernel_regularizer="l2")
    return on_classes(loss, hidden, input_shape=input_shape, num_classes=num_classes)


class Masked(keras.layers.Layer):  # type: ignore[misc]
    """Masks the examples whose first output is negative."""

    def call(self, logits: Any) -> Any:
        return logits + 0.0

    def compute_mask(self, logits: Any, mask: Any = None) -> Any:
        return logits[:, 0] >= 0


@registry.register_model("masked")
def masked(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return on_classes(loss, Masked(), input_shape=input_shape, num_classes=num_classes)


@registry.register_model("one_number")
def one_number(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """The loss is the mean over the batch, as one number."""

    def loss(y: Any, logits: Any) -> Any:
        return keras.ops.mean(keras.ops.square(logits - keras.ops.one_hot(keras.ops.cast(y, "int32"), num_classes)))

    return on_classes(loss, input_shape=input_shape, num_classes=num_classes)


def optimizer(**more: Any) -> dict[str, Any]:
    return {"name": "sgd", "learning_rate": 0.1, **more}


def config_of(name: str, num_workers: int = 1) -> RunConfig:
    """The configuration for a model of this file, or for a softmax model with one of `OPTIMIZERS`."""
    settings = OPTIMIZERS.get(name)
    config = run_config(name if settings is None else "softmax", batch_size=100 // num_workers, steps_per_execution=5)
    config.optimizer = optimizer(**(settings or {}))
    return config


@functools.cache
def plain_keras(name: str) -> Training:
    """The results of `keras.Model.fit` after `STEPS` batches of 100 examples."""
    config = config_of(name)
    source, splits = source_and_splits(config)
    model = built_model(source, splits, config.seed)
    if not model.compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(builtin.build_optimizer(config.optimizer, STEPS), loss, metrics=["accuracy"])
    model.run_eagerly = True
    sharding = Sharding(len(splits.train), 100, 1, config.seed, whole_batch_loss=True)
    rows = pipeline.batches(lambda index: [index], sharding, 0, InputPosition()).take(STEPS)
    # A weight of 0 marks padding, which Keras does not get.
    taken = (splits.train.take(index[weights > 0]) for index, weights in rows.as_numpy_iterator())
    batches = (keras.utils.pack_x_y_sample_weight(*splits.layout.pack(leaves)) for leaves in taken)
    history = model.fit(batches, steps_per_epoch=STEPS, verbose=0, shuffle=False).history
    test = split_of(splits, "test")
    evaluation = model.evaluate(test.x, test.y, 1000, verbose=0, return_dict=True)
    # Where Keras 3.12 has the compiled metrics of a model with a step of its own.
    evaluation |= evaluation.pop("compile_metrics", {})
    return {
        "weights": weights_of(model),
        "metrics": {name: value for name, (value,) in history.items()},
        "test": {name: float(value) for name, value in evaluation.items()},
        "random": [np.array(state.value) for state in seeds_of(model)],
        "model": model,
    }


def weights_of(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.weights if "seed_generator" not in variable.path]


def train(loop: Any) -> Training:
    loop.train(STEPS)
    raw = loop.freeze()().weights().arrays
    loop.finalize()
    assert loop.progress.global_step == loop.updates_applied() == STEPS
    kept = loop.freeze()().weights().arrays
    assert all(np.array_equal(kept[name], array) for name, array in raw.items()), (
        "a checkpoint must hold the trained weights, not their moving averages"
    )
    return {
        "weights": weights_of(loop.model),
        "raw": list(raw.values()),
        "metrics": loop.metrics.results(loop.progress.metrics),
        "test": loop.evaluate("test").metrics,
        "random": list(loop.random_states().values()),
    }


def train_in_sync(worker: SyncWorker, configs: dict[str, RunConfig]) -> dict[str, Training]:
    """Trains with one configuration after another; returns the results by the names of the configurations."""
    found = {}
    for name, config in configs.items():
        print("configuration", name, flush=True)  # pytest shows it if the training fails
        # All runs share one strategy: a new one would replace state of this worker to which another worker may already
        # be sending, and that worker would fail.
        loop = sync_loop(worker, config)
        found[name] = train(loop)
    return found


# Workers take seconds to connect, so the same ones train many models and settings.
@pytest.fixture(scope="module")
def one_worker(sync_workers: SyncWorkers) -> Callable[[str], Training]:
    """Gives the result of the worker, by the name of a model."""

    @functools.cache
    def trained(is_thorough: bool) -> dict[str, Training]:
        names = [name for name in ONE_WORKER if (name in ONE_WORKER_THOROUGH) == is_thorough]
        found: dict[str, Training]
        (found,) = sync_workers(train_in_sync, 1, ({name: config_of(name) for name in names},), TIMEOUT_SECS)
        return found

    return lambda name: trained(name in ONE_WORKER_THOROUGH)[name]


@pytest.fixture(scope="module")
def two_workers(sync_workers: SyncWorkers) -> Callable[[str], list[Training]]:
    """Gives the results of both workers, by the name of a model or setting."""

    @functools.cache
    def trained(kind: tuple[bool, bool]) -> list[dict[str, Training]]:
        names = [name for name in (*TWO_WORKERS, *OPTIMIZERS) if kind_of(name) == kind]
        configs = {name: config_of(name, 2) for name in names}
        return sync_workers(train_in_sync, 2, (configs,), TIMEOUT_SECS)

    def kind_of(name: str) -> tuple[bool, bool]:
        return name in LATER, name in THOROUGH

    return lambda name: [found[name] for found in trained(kind_of(name))]


def parameters(names: Iterable[str], later: list[str] = LATER, thorough: list[str] = THOROUGH) -> list[Any]:
    of_thorough = [pytest.param(name, marks=pytest.mark.thorough) for name in names if name in thorough]
    of_slow = [pytest.param(name, marks=pytest.mark.slow) for name in names if name in later]
    return [*(name for name in names if name not in (*later, *thorough)), *of_thorough, *of_slow]


def assert_like(found: Training, expected: Training) -> None:
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=0)
    for part in ("metrics", "test"):
        assert found[part] == pytest.approx(expected[part], rel=1e-4), part
    # Only the counts are compared, because the seeds differ from run to run.
    counts = [[count for _, count in each["random"]] for each in (found, expected)]
    assert counts[0] == counts[1], "random generators must have advanced as far as those of Keras"


@pytest.mark.parametrize("name", parameters(TWO_WORKERS))
def test_two_synchronous_workers_equal_keras(two_workers: Callable[[str], list[Training]], name: str) -> None:
    for result in two_workers(name):
        assert_like(result, plain_keras(name))


@pytest.mark.parametrize("name", parameters(OPTIMIZERS))
def test_settings_of_optimizers_equal_keras(two_workers: Callable[[str], list[Training]], name: str) -> None:
    first, second = two_workers(name)
    for result in (first, second):
        assert_like(result, plain_keras(name))
    is_replaced = any(not np.array_equal(*pair) for pair in zip(first["weights"], first["raw"], strict=True))
    assert is_replaced == ("ema_momentum" in OPTIMIZERS[name]), "only moving averages may replace the final weights"


@pytest.mark.parametrize("name", parameters(ONE_WORKER, [], ONE_WORKER_THOROUGH))
def test_one_synchronous_worker_equals_keras(one_worker: Callable[[str], Training], name: str) -> None:
    assert_like(one_worker(name), plain_keras(name))


@pytest.mark.parametrize("name", parameters(ASYNCHRONOUS, ASYNCHRONOUS_LATER, ASYNCHRONOUS_THOROUGH))
def test_one_asynchronous_worker_equals_keras(
    async_loop: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "random":
        monkeypatch.setattr(packing, "LARGE_BYTES", 256)  # its kernels travel alone, as those of a large model do
    assert_like(train(async_loop(config_of(name), num_workers=1)), plain_keras(name))


@pytest.mark.thorough
def test_moving_averages_of_one_asynchronous_worker(async_loop: Callable[..., Any]) -> None:
    """test_optimizers.py compares all other settings."""
    assert_like(train(async_loop(config_of("moving_averages"), num_workers=1)), plain_keras("moving_averages"))


def test_a_model_that_assigns_trained_weights_is_refused_with_async(async_loop: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"spectral.*assigns .*kernel, which is trained.*use mode=sync"):
        async_loop(config_of("spectral"))


def step_of(model: str) -> tuple[Step, data.Splits]:
    config = config_of(model)
    source, splits = source_and_splits(config)
    return build_step(source, splits, config, contextlib.nullcontext())[0], splits


def loss_of(step: Step, leaves: list[tf.Tensor]) -> float:
    """The loss of a step, which is traced again."""
    return traced(step, leaves)(0, 0)


def traced(step: Step, leaves: list[tf.Tensor]) -> Callable[[int, int], float]:
    """Gives the loss of a step, by the worker and the number of its step."""
    function = tf.function(lambda place: step(*step.values(), leaves, place), autograph=False)
    return lambda *place: float(function(tf.constant(place, tf.int64)).sums[0])


def test_losses_added_in_an_earlier_call_are_not_counted_again() -> None:
    """The earlier call may be a trace of the step, a trace that failed, or an eager call of the model."""
    step, splits = step_of("looks_at_the_batch")
    images, labels = splits.train.take(np.arange(8))
    first = loss_of(step, [tf.constant(images), tf.constant(labels)])
    assert loss_of(step, [tf.constant(images), tf.constant(labels)]) == pytest.approx(first)
    step.model(images, training=True)
    with pytest.raises(ValueError, match="shape"):
        loss_of(step, [tf.zeros([8, 2, 2, 1], tf.uint8), tf.constant(labels)])
    assert loss_of(step, [tf.constant(images), tf.constant(labels)]) == pytest.approx(first)


def test_every_worker_and_step_draws_different_numbers() -> None:
    step, splits = step_of("random")
    loss = traced(step, [tf.constant(leaf) for leaf in splits.train.take(np.arange(8))])
    places = [(worker, number) for worker in (0, 1, 2**20) for number in range(4)]
    assert len({loss(*place) for place in places}) == len(places)
    assert loss(1, 3) == loss(1, 3)
