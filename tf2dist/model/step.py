"""The training step of both modes: forward pass, loss and gradients as a pure function of its inputs."""

import inspect
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf2dist.process.tf_internals import seeds_of


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
        state: the new values of `ModelStep.state`, such as moving averages.
        sums: float32 [3], the weighted loss, the correct examples and the examples.
    """

    gradients: list[tf.Tensor]
    state: list[tf.Tensor]
    sums: tf.Tensor


class Trial(NamedTuple):
    """What a call of the model in training shows when it is traced; it is not run.

    Attributes:
        outputs: symbolic tensors, in whatever structure the model gives them.
        assigned: the trainable variables that the call assigns.
    """

    outputs: Any
    assigned: list[keras.Variable]


class ModelStep:
    """Calls a built Keras model without side effects, so that its variables may live anywhere.

    Attributes:
        model: the model.
        trial: what a call of it shows.
        trainable: the variables that receive gradients.
        state: the variables to which a call gives new values: the non-trainable ones, and those trainable ones
            that the call assigns, as spectral normalization does. The seeds of random layers are left out. They
            are derived from (seed, worker, step), so dropout needs no shared state and a resumed run repeats it.
        loss_scale: what the optimizer wants the loss multiplied by, against underflow; the gradients are divided
            by it again.
    """

    def __init__(self, model: keras.Model, image_shape: tuple[int, ...]) -> None:
        self.model = model
        self.trainable = list(model.trainable_variables)
        self.loss_scale: float | None = None
        self._others = list(model.non_trainable_variables)
        self._seeds = set(map(id, seeds_of(model)))
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self.state = [v for v in self._others if id(v) not in self._seeds]
        self.trial = self._try(image_shape)
        self.state += self.trial.assigned

    @property
    def variables(self) -> list[keras.Variable]:
        """Every variable once; at the end of `state` stand trainable ones again."""
        return [*self.trainable, *self.state[: len(self.state) - len(self.trial.assigned)]]

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
            outputs, scope, penalties = self._forward(trainable, state, batch.images, seed, tape)
            logits = tf.cast(outputs, tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, logits)
            loss = tf.reduce_sum(batch.weights * losses)
            if penalties:  # they belong to the whole step, so each worker adds its share of them
                loss += tf.add_n([tf.reduce_sum(tf.cast(p, tf.float32)) for p in penalties]) * tf.reduce_sum(
                    batch.weights
                )
            scaled = loss * self.loss_scale if self.loss_scale else loss
        gradients = self._gradients(tape, scaled, trainable, scope)
        new_state = [scope.get_current_value(variable) for variable in self.state]
        real = tf.cast(batch.weights > 0, tf.float32)
        sums = tf.stack([loss, tf.reduce_sum(real * _is_correct(logits, batch.labels)), tf.reduce_sum(real)])
        return StepOutput(gradients, new_state, sums)

    def evaluate(
        self, trainable: list[tf.Tensor], state: list[tf.Tensor], images: tf.Tensor, labels: tf.Tensor
    ) -> tf.Tensor:
        """The sums over some examples, float64 [3]: loss, correct, examples."""
        outputs, _, _ = self._forward(trainable, state, images, tf.zeros([2], tf.int64), None)
        logits = tf.cast(outputs, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        sums = [tf.reduce_sum(losses), tf.reduce_sum(_is_correct(logits, labels)), tf.cast(tf.size(labels), tf.float32)]
        return tf.cast(tf.stack(sums), tf.float64)

    def _forward(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        images: tf.Tensor,
        seed: tf.Tensor,
        tape: tf.GradientTape | None,
    ) -> tuple[Any, "_CallScope", list[tf.Tensor]]:
        """Calls the model as Keras's own training does, at the given values of its variables.

        Args:
            tape: None to evaluate.

        Returns:
            The outputs, the scope that knows what was assigned, and the losses that the layers have added.
        """
        values = dict(zip(map(id, self.state), state, strict=True))
        seeds = {id(v): _derived_seed(seed, number) for number, v in enumerate(self._others) if id(v) in self._seeds}
        others = [(variable, (values | seeds)[id(variable)]) for variable in self._others]
        mapping = [*zip(self.trainable, trainable, strict=True), *others]
        arguments = {"training": tape is not None} if self._takes_training else {}
        with _CallScope(mapping, self.trainable, tape) as scope:
            outputs = self.model(tf.cast(images, tf.float32) / 255.0, **arguments)
            return outputs, scope, self.model.losses

    def _gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor, trainable: list[tf.Tensor], scope: "_CallScope"
    ) -> list[tf.Tensor]:
        """The gradients of the loss, each summed over a variable's value before the call and the assigned ones."""
        leaves = [[value, *scope.assigned.get(id(v), [])] for v, value in zip(self.trainable, trainable, strict=True)]
        found = tape.gradient(loss, leaves, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients = [parts[0] if len(parts) == 1 else tf.add_n(parts) for parts in found]
        return [gradient / self.loss_scale for gradient in gradients] if self.loss_scale else gradients

    def _try(self, image_shape: tuple[int, ...]) -> Trial:
        """Traces one call in training, to see what it returns and which trainable variables it assigns."""
        found: list[Trial] = []

        def call(trainable: list[tf.Tensor], state: list[tf.Tensor], images: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                outputs, scope, _ = self._forward(trainable, state, images, tf.zeros([2], tf.int64), tape)
            found.append(Trial(outputs, [v for v in self.trainable if id(v) in scope.assigned]))

        specs = [[tf.TensorSpec(v.shape, v.dtype) for v in variables] for variables in (self.trainable, self.state)]
        images = tf.TensorSpec([None, *image_shape], tf.uint8)
        tf.function(call, autograph=False).get_concrete_function(*specs, images)
        return found[0]


class _CallScope(keras.StatelessScope):  # type: ignore[misc]
    """Catches the values that a call assigns, so that the variables themselves do not change.

    In TensorFlow no gradient flows through an assignment. The gradient of an assigned variable is the sum of
    the gradients by its value before the call and by the assigned values, each taken as independent.

    Attributes:
        assigned: the values that the call assigns to each trainable variable, by the variable's id.
    """

    def __init__(
        self,
        mapping: list[tuple[keras.Variable, tf.Tensor]],
        trainable: list[keras.Variable],
        tape: tf.GradientTape | None,
    ) -> None:
        super().__init__(mapping, collect_losses=True)
        self._trainable, self._tape = set(map(id, trainable)), tape
        self.assigned: dict[int, list[tf.Tensor]] = {}

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        value = tf.stop_gradient(value)
        if self._tape and id(variable) in self._trainable:
            self._tape.watch(value)
            self.assigned.setdefault(id(variable), []).append(value)
        super().add_update((variable, value))


def without_padding(batch: Batch) -> Batch:
    """The batch without its padding, because some layers look at the whole batch; one example if all is padding.

    In Keras, too, the last batch of an epoch is shorter. XLA must not compile this: it needs fixed shapes.
    """
    count = tf.maximum(tf.math.count_nonzero(batch.weights, dtype=tf.int32), 1)
    return Batch(*(part[:count] for part in batch))


def batches_without_padding(element: tuple[tf.Tensor, ...], num_steps: int) -> list[Batch]:
    """The batches of several steps, `[num_steps, batch_size, ...]` each part, as `without_padding` gives them.

    As much as possible is computed for all steps at once: a small model takes 3,000 steps a second, and each
    operation of a step costs about a microsecond.
    """
    counts = tf.maximum(tf.math.count_nonzero(element[2], axis=1, dtype=tf.int32), 1)
    ends = tf.unstack(tf.stack([tf.range(1, num_steps + 1), counts], axis=1), num_steps)

    def part_of_step(part: tf.Tensor, number: int) -> tf.Tensor:
        return tf.strided_slice(part, [number, 0], ends[number], [1, 1], shrink_axis_mask=0b01)

    return [Batch(*(part_of_step(part, number) for part in element)) for number in range(num_steps)]


def _derived_seed(seed: tf.Tensor, number: int) -> tf.Tensor:
    """The seed of one random layer for one step of one worker, uint32 [2]."""
    key = seed + tf.constant([number, 0], tf.int64)
    # The algorithm is fixed, because TensorFlow would choose one by the kind of device.
    return tf.random.stateless_uniform([2], key, minval=None, maxval=None, dtype=tf.uint32, alg="philox")


def step_seed(seed: int, worker: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """A seed of its own for each worker and step, int64 [2]; room for 4,096 random layers."""
    return tf.stack([tf.cast(worker, tf.int64) * 4096 + (seed << 32), tf.cast(step, tf.int64)])


def _is_correct(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == labels, tf.float32)


class Packing:
    """Packs many tensors into one float32 vector: a transfer costs a call for each tensor, whatever its size."""

    def __init__(self, variables: list[keras.Variable]) -> None:
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
        self.sizes = [tf.TensorShape(shape).num_elements() for shape in self._shapes]
        self.size = sum(self.sizes)

    def pack(self, tensors: list[tf.Tensor], *more: tf.Tensor) -> tf.Tensor:
        """One vector: the `size` elements of the tensors, followed by the vectors `more`."""
        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
        return tf.concat([*flat, *more], axis=0)

    def unpack(self, vector: tf.Tensor, *more: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors in their shapes and types, and the vectors of `more` elements each that follow."""
        parts = tf.split(vector, [*self.sizes, *more])
        own, others = parts[: len(self.sizes)], parts[len(self.sizes) :]
        shaped = zip(own, self._shapes, self._dtypes, strict=True)
        return [_to(dtype, tf.reshape(part, shape)) for part, shape, dtype in shaped], others


def _to(dtype: tf.DType, tensor: tf.Tensor) -> tf.Tensor:
    """Casts, and rounds for an integer type: a whole number that was summed up from parts is inexact in float32."""
    return tf.cast(tf.round(tensor) if dtype.is_integer else tensor, dtype)
