"""The training step of both modes: forward, loss and gradients as a pure function of its inputs."""

from typing import NamedTuple

import keras
import tensorflow as tf


class Batch(NamedTuple):
    """`images`: uint8 [n, ...]; `labels`: int32 [n]; `weights`: float32 [n], 0 for padding.

    The weights of all batches of one step add up to 1, so a weighted sum is the mean.
    """

    images: tf.Tensor
    labels: tf.Tensor
    weights: tf.Tensor


class StepOutput(NamedTuple):
    """What one worker contributes to a step.

    Attributes:
        gradients: of the weighted loss, one for each trainable variable.
        state: the new values of the non-trainable variables, such as moving averages.
        sums: float32 [3], the weighted loss, the correct examples and the examples.
    """

    gradients: list[tf.Tensor]
    state: list[tf.Tensor]
    sums: tf.Tensor


class ModelStep:
    """Calls a built Keras model without side effects, so that its variables may live anywhere.

    Attributes:
        trainable: the variables that receive gradients.
        state: the other variables, without the seeds of random layers: those are derived from
            (seed, worker, step), so dropout needs no shared state and a resumed run repeats it.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.trainable = list(model.trainable_variables)
        self.state = [v for v in model.non_trainable_variables if not _is_seed(v)]

    def values(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """What the trainable variables and the state hold now."""
        trainable, state = (
            [tf.convert_to_tensor(v.value) for v in variables] for variables in (self.trainable, self.state)
        )
        return trainable, state

    def __call__(self, trainable: list[tf.Tensor], state: list[tf.Tensor], batch: Batch, seed: tf.Tensor) -> StepOutput:
        """One forward and backward pass at the given values of the variables; `seed`: int64 [2]."""
        with tf.GradientTape() as tape:
            tape.watch(trainable)
            logits, new_state, penalties = self._forward(trainable, state, batch.images, seed, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, logits)
            loss = tf.reduce_sum(batch.weights * losses)
            if penalties:  # of the whole step; each worker adds its share
                loss += tf.add_n([tf.cast(p, tf.float32) for p in penalties]) * tf.reduce_sum(batch.weights)
        gradients = tape.gradient(loss, trainable, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        real = tf.cast(batch.weights > 0, tf.float32)
        sums = tf.stack([loss, tf.reduce_sum(real * _is_correct(logits, batch.labels)), tf.reduce_sum(real)])
        return StepOutput(gradients, new_state, sums)

    def evaluate(
        self, trainable: list[tf.Tensor], state: list[tf.Tensor], images: tf.Tensor, labels: tf.Tensor
    ) -> tf.Tensor:
        """The sums over some examples, float64 [3]: loss, correct, examples."""
        logits, _, _ = self._forward(trainable, state, images, tf.zeros([2], tf.int64), training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        sums = [tf.reduce_sum(losses), tf.reduce_sum(_is_correct(logits, labels)), tf.cast(tf.size(labels), tf.float32)]
        return tf.cast(tf.stack(sums), tf.float64)

    def _forward(
        self, trainable: list[tf.Tensor], state: list[tf.Tensor], images: tf.Tensor, seed: tf.Tensor, training: bool
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        values = iter(state)
        variables = self._model.non_trainable_variables
        inputs = [
            _derived_seed(seed, number) if _is_seed(variable) else next(values)
            for number, variable in enumerate(variables)
        ]
        logits, outputs, penalties = self._model.stateless_call(
            trainable, inputs, tf.cast(images, tf.float32) / 255.0, training=training, return_losses=True
        )
        new_state = [value for variable, value in zip(variables, outputs, strict=True) if not _is_seed(variable)]
        return tf.cast(logits, tf.float32), new_state, penalties


def _is_seed(variable: keras.Variable) -> bool:
    return bool(variable.path.endswith("seed_generator_state"))


def _derived_seed(seed: tf.Tensor, number: int) -> tf.Tensor:
    """The seed of one random layer for one step of one worker, uint32 [2]."""
    key = seed + tf.constant([number, 0], tf.int64)
    return tf.random.stateless_uniform([2], key, minval=None, maxval=None, dtype=tf.uint32, alg="philox")


def step_seed(seed: int, worker: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """A seed of its own for each worker and step, int64 [2]; room for 4,096 random layers."""
    return tf.stack([tf.cast(worker, tf.int64) * 4096 + (seed << 32), tf.cast(step, tf.int64)])


def _is_correct(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == labels, tf.float32)


class Packing:
    """Many tensors as one float32 vector: a transfer costs a call for each tensor, whatever its size."""

    def __init__(self, variables: list[keras.Variable]) -> None:
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
        self.sizes = [tf.TensorShape(shape).num_elements() for shape in self._shapes]
        self.size = sum(self.sizes)

    def pack(self, tensors: list[tf.Tensor], *more: tf.Tensor) -> tf.Tensor:
        """A vector of `size` elements and those of the vectors `more`."""
        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
        return tf.concat([*flat, *more], axis=0)

    def unpack(self, vector: tf.Tensor, *more: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors in their shapes and types, and the vectors of `more` elements each that follow."""
        parts = tf.split(vector, [*self.sizes, *more])
        own, others = parts[: len(self.sizes)], parts[len(self.sizes) :]
        shaped = zip(own, self._shapes, self._dtypes, strict=True)
        return [_to(dtype, tf.reshape(part, shape)) for part, shape, dtype in shaped], others


def _to(dtype: tf.DType, tensor: tf.Tensor) -> tf.Tensor:
    """A sum of N parts of a whole number is only close to it in float32."""
    return tf.cast(tf.round(tensor) if dtype.is_integer else tensor, dtype)
