"""What Keras does in one process with the same examples, both modes do: compared with `train_on_batch`."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import run_config, source_and_splits
from tf2dist import data, registry
from tf2dist.config.schema import RunConfig
from tf2dist.data import pipeline
from tf2dist.errors import ConfigError
from tf2dist.model import models
from tf2dist.model.step import Batch
from tf2dist.testing import SyncWorker, SyncWorkers

STEPS = 15  # of 2 * 50 of 1,257 examples: the 13th has 57
layers = keras.layers


@registry.register_model("spectral")
def spectral(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Assigns its kernels, which are trained, whenever it is called."""
    hidden = layers.SpectralNormalization(layers.Dense(20, "relu"))
    return keras.Sequential(
        [keras.Input(input_shape), layers.Flatten(), hidden, layers.SpectralNormalization(layers.Dense(num_classes))]
    )


@registry.register_model("synchronized")
def synchronized(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    norm = layers.BatchNormalization(synchronized=True, momentum=0.9)
    return keras.Sequential(
        [keras.Input(input_shape), layers.Flatten(), layers.Dense(20), norm, layers.ReLU(), layers.Dense(num_classes)]
    )


@registry.register_model("no_training")
class NoTraining(keras.Model):  # type: ignore[misc]
    """Its call takes no `training`."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.flatten, self.logits = layers.Flatten(), layers.Dense(num_classes)

    def call(self, images: Any) -> Any:
        return self.logits(self.flatten(images))


@registry.register_model("looks_at_the_batch")
class LooksAtTheBatch(NoTraining):
    """Passes `training` on to nobody, and adds losses that depend on how many examples there are."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.hidden = layers.Dense(20, "relu", activity_regularizer=keras.regularizers.L2(0.1))

    def call(self, images: Any, training: bool = False) -> Any:
        hidden = self.hidden(self.norm(self.flatten(images)))
        self.add_loss(0.01 * keras.ops.mean(hidden, axis=0))
        return self.logits(hidden)


def optimizer(**more: Any) -> dict[str, Any]:
    return {"name": "sgd", "learning_rate": 0.1, **more}


def case(model: str, num_workers: int = 1, **more: Any) -> RunConfig:
    config = run_config(model, batch_size=100 // num_workers, steps_per_execution=5)
    config.optimizer = optimizer(**more)
    return config


def plain_keras(config: RunConfig) -> list[np.ndarray]:
    """The weights and the state after `STEPS` batches of 100 and the end of `fit`."""
    splits = data.load(config.data)
    model = models.build_model(config.model, splits.image_shape, splits.num_classes, config.seed)
    rule = models.build_optimizer(config.optimizer, STEPS)
    model.compile(rule, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    sharding = pipeline.Sharding(len(splits.train), 100, 1, config.seed, whole_batch_loss=True)
    rows = pipeline.batches(lambda index: (index, index), sharding, 0).take(STEPS)
    for index, _, weights in rows.as_numpy_iterator():
        images, labels = splits.train.take(index[weights > 0])
        model.train_on_batch(images.astype(np.float32) / 255.0, labels)
    rule.finalize_variable_values(model.trainable_variables)
    return weights_of(model)


def weights_of(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.weights if "seed_generator" not in variable.path]


def train(loop: Any) -> dict[str, Any]:
    loop.train(STEPS)
    raw = loop.snapshot().weights().arrays
    loop.finalize()
    assert loop.progress.global_step == loop.updates_applied() == STEPS
    kept = loop.snapshot().weights().arrays
    assert all(np.array_equal(kept[name], array) for name, array in raw.items()), "a run goes on from what was trained"
    return {"weights": weights_of(loop.model), "raw": list(raw.values()), "accuracy": loop.evaluate("test").accuracy}


def train_in_sync(worker: SyncWorker, config: RunConfig) -> dict[str, Any]:
    from tf2dist.training.synchronous.loop import SyncLoop

    return train(
        SyncLoop.build(config, worker.cluster, worker.task, *source_and_splits(config), None, lambda progress: None)
    )


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=0)


OPTIMIZERS: list[dict[str, Any]] = [
    {"gradient_accumulation_steps": 4, "weight_decay": 0.01},
    {"use_ema": True, "ema_overwrite_frequency": 5},
    {"use_ema": True, "ema_momentum": 0.9},
    {"loss_scale_factor": 1024.0, "global_clipnorm": 0.5},
]


@pytest.mark.parametrize("model", ["spectral", "synchronized"])
def test_two_synchronous_workers_do_what_keras_does(sync_workers: SyncWorkers, model: str) -> None:
    results = sync_workers(train_in_sync, 2, (case(model, num_workers=2),))
    expected = plain_keras(case(model))
    for result in results:
        assert_close(result["weights"], expected)


@pytest.mark.parametrize("more", OPTIMIZERS, ids=lambda more: next(iter(more)))
def test_what_keras_optimizers_do_beside_the_update(sync_workers: SyncWorkers, more: dict[str, Any]) -> None:
    results = sync_workers(train_in_sync, 2, (case("softmax", num_workers=2, **more),))
    expected = plain_keras(case("softmax", **more))
    for result in results:
        assert_close(result["weights"], expected)
    moved = any(not np.array_equal(*pair) for pair in zip(results[0]["weights"], results[0]["raw"], strict=True))
    assert moved == ("ema_momentum" in more), "averages that overwrite nothing are the last word"


@pytest.mark.parametrize("model", ["no_training", "looks_at_the_batch"])
def test_models_written_as_classes(sync_workers: SyncWorkers, async_loop: Callable[..., Any], model: str) -> None:
    config = case(model)
    expected = plain_keras(config)
    assert_close(sync_workers(train_in_sync, 1, (config,))[0]["weights"], expected)
    assert_close(train(async_loop(config, num_workers=1))["weights"], expected)


@pytest.mark.parametrize("more", OPTIMIZERS, ids=lambda more: next(iter(more)))
def test_an_asynchronous_worker_does_it_too(async_loop: Callable[..., Any], more: dict[str, Any]) -> None:
    result = train(async_loop(case("softmax", **more), num_workers=1))
    assert_close(result["weights"], plain_keras(case("softmax", **more)))


def test_an_assignment_that_others_would_overwrite_is_refused(async_loop: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"spectral.*assigns .*kernel, which is trained.*use mode=sync"):
        async_loop(case("spectral"))


def test_losses_that_a_model_has_added_before_do_not_count_again() -> None:
    """Whatever has called it: a trace of ours, a trace that failed, or somebody without a graph."""
    splits = data.load(run_config().data)
    step = models.build_step({"name": "looks_at_the_batch"}, splits, 0, contextlib.nullcontext())
    images, labels = splits.train.take(np.arange(8))
    batch = Batch(tf.constant(images), tf.constant(labels), tf.fill([8], 1 / 8))

    def loss() -> float:
        traced = tf.function(lambda: step(*step.values(), batch, tf.zeros([2], tf.int64)), autograph=False)
        return float(traced().sums[0])

    first = loss()
    assert loss() == pytest.approx(first)
    step.model(images.astype(np.float32), training=True)
    too_small = batch._replace(images=tf.zeros([8, 2, 2, 1], tf.uint8))
    with pytest.raises(ValueError, match="shape"):
        tf.function(lambda: step(*step.values(), too_small, tf.zeros([2], tf.int64)), autograph=False)()
    assert loss() == pytest.approx(first)
