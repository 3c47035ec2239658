"""Models with steps of their own, as users write them; random numbers stand in the data, so that batches can be shared.

Importing this module registers them.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

import tf2dist
from tf2dist import registry

SIZE = 8  # of the noise


def mlp(*units: int) -> keras.Model:
    """A network whose variables are made by its first call."""
    hidden = [layers.Dense(number, "relu") for number in units[:-1]]
    return keras.Sequential([layers.Flatten(), layers.Rescaling(1 / 255), *hidden, layers.Dense(units[-1])])


@registry.register_model("distiller")
class Distiller(keras.Model):  # type: ignore[misc]
    """A student learns from a frozen teacher; the metrics are those given to compile."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.teacher, self.student = mlp(12, num_classes), mlp(6, num_classes)
        self.hard = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.soft = keras.losses.KLDivergence()
        self.compile(keras.optimizers.Adam(0.01), metrics=["accuracy"])

    def call(self, x: Any, training: bool = False) -> Any:
        return self.student(x, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        taught = ops.softmax(self.teacher(x, training=False) / 3)
        with tf.GradientTape() as tape:
            logits = self.student(x, training=True)
            hard, soft = self.hard(y, logits), self.soft(taught, ops.softmax(logits / 3))
            loss = hard + 9 * soft
        weights = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return self.measured(y, logits, loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        logits = self(x, training=False)
        return self.measured(y, logits, self.hard(y, logits))

    def measured(self, y: Any, logits: Any, loss: Any) -> dict[str, Any]:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}


@registry.register_model("gan")
class Gan(keras.Model):  # type: ignore[misc]
    """Two networks with an optimizer each; the second update sees the first one."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        size = int(input_shape[0] * input_shape[1])
        self.discriminator, self.generator = mlp(16, 1), mlp(16, size)
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")
        self.compile(keras.optimizers.Adam(0.002), keras.optimizers.SGD(0.05))

    def compile(self, d_optimizer: keras.Optimizer, g_optimizer: keras.Optimizer) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.d_loss, self.g_loss]

    def losses_on(self, images: Any) -> tuple[Any, Any]:
        noise = ops.cast(images, "float32")[:, 12, 8 : 8 + SIZE, 0]
        fake = self.discriminator(ops.reshape(255 * self.generator(noise), ops.shape(images)))
        real = self.discriminator(images)
        return ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(fake)), ops.mean(ops.softplus(-fake))

    def train_step(self, data: Any) -> dict[str, Any]:
        images, _ = data
        with tf.GradientTape() as tape:
            d_loss, _ = self.losses_on(images)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            _, g_loss = self.losses_on(images)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return self.measured(d_loss, g_loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        return self.measured(*self.losses_on(data[0]))

    def measured(self, d_loss: Any, g_loss: Any) -> dict[str, Any]:
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


@registry.register_model("critic")
class Critic(Gan):
    """The critic is trained twice in a step, with a penalty on the gradient by its input."""

    def train_step(self, data: Any) -> dict[str, Any]:
        images, _ = data
        x = ops.cast(images, "float32")
        for _ in range(2):
            with tf.GradientTape() as tape:
                d_loss, _ = self.losses_on(images)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    values = self.discriminator(x)
                penalty = ops.mean(
                    (ops.norm(ops.reshape(inner.gradient(values, x), [ops.shape(x)[0], -1]), axis=1) - 1) ** 2
                )
                d_loss += penalty
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            _, g_loss = self.losses_on(images)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return self.measured(d_loss, g_loss)


@registry.register_model("autoencoder")
class Autoencoder(keras.Model):  # type: ignore[misc]
    """Adds a loss to that of compile, uses Keras' own `compute_loss`, and a moving average of its code."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 4), keras.Sequential([layers.Dense(16, "relu"), layers.Dense(num_classes)])
        self.average = self.add_weight(shape=(4,), name="average", trainable=False)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.compile(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1), loss, metrics=["accuracy"])

    def call(self, x: Any, training: bool = False) -> Any:
        code = self.encoder(x, training=training)
        self.add_loss(0.01 * ops.mean(code**2))
        return self.decoder(code, training=training)

    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self.average.assign(0.9 * self.average + 0.1 * ops.mean(self.encoder(x), axis=0))
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits, sample_weight)
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(y)[0])
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, logits, sample_weight)


@registry.register_model("contrastive")
class Contrastive(keras.Model):  # type: ignore[misc]
    """Each image is to be nearer to the vector of its class than those of all other images in the step are."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.encoder, self.classes = mlp(16, 8), layers.Embedding(num_classes, 8)
        self.compile(keras.optimizers.SGD(0.1))

    def call(self, x: Any) -> Any:
        return self.encoder(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        images, classes = tf2dist.gather(y_pred), tf2dist.gather(self.classes(y))
        places = ops.arange(ops.shape(images)[0])
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(places, images @ ops.transpose(classes), from_logits=True)
        )


@registry.register_model("contrastive_step")
class ContrastiveStep(Contrastive):
    """The same in a step of its own."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


@registry.register_model("own_metrics")
class OwnMetrics(keras.Sequential):  # type: ignore[misc]
    """Trains as Keras does, and measures by itself."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        hidden = [layers.Flatten(), layers.Rescaling(1 / 255), layers.Dense(num_classes)]
        super().__init__([keras.Input(tuple(input_shape)), *hidden])
        self.distance = keras.metrics.Mean(name="distance")
        self.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        self.distance.update_state(ops.abs(ops.cast(y, "float32") - ops.cast(ops.argmax(y_pred, axis=-1), "float32")))
        return {"far": self.distance.result(), "loss": self._loss_tracker.result()}


class Sums(keras.metrics.Mean):  # type: ignore[misc]
    """Its results are its variables, by name."""

    def result(self) -> Any:
        return {"weight": self.count, "nested": {"sum": self.total}}
