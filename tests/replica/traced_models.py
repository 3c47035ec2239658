"""Models with functions that TensorFlow traces once, differentiates in ways of their own, or calls in loops."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
X = np.random.default_rng(0).normal(size=(80, 4)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5], [0.0]]).astype("float32")
ROWS, COLUMNS = 20_000, 16  # of a table that is large enough to travel by rows
IDS = np.random.default_rng(1).integers(0, ROWS, [80, 3]).astype("int32")
Function = Callable[[Any], Any]


def dense(units: int, activation: str | None = None, seed: int = 1) -> keras.layers.Layer:
    return layers.Dense(units, activation, kernel_initializer=keras.initializers.GlorotUniform(seed))


def compiled(model: keras.Model, loss: str | None = "mse", **more: Any) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.1), loss, **more)
    return model


class Linear(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by a weight in a function that `make` makes of it."""

    def __init__(self, make: Callable[[Any], Function] | None = None) -> None:
        super().__init__()
        self.make = make

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], 1), initializer="ones", name="w")
        self.b = self.add_weight(shape=(1,), initializer="zeros", name="b")
        if self.make:
            self.function = self.make(self)

    def product(self, x: Any) -> Any:
        return x @ self.w + self.b

    def call(self, x: Any) -> Any:
        return self.function(x)


class TracedCall(Linear):
    @tf.function  # type: ignore[untyped-decorator]
    def call(self, x: Any, training: bool = False) -> Any:
        return self.product(x)


class TracedHelper(Linear):
    call = TracedCall.call.python_function

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def product(self, x: Any) -> Any:
        return x @ self.w + self.b


class Outer(keras.layers.Layer):  # type: ignore[misc]
    """A traced layer of traced layers, with state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalization(momentum=0.5, synchronized=True)
        self.inner = TracedCall()

    @tf.function  # type: ignore[untyped-decorator]
    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(self.norm(x, training=training))


def branching(layer: Linear) -> Function:
    def function(x: Any) -> Any:
        y = layer.product(x)
        if tf.reduce_sum(layer.w) > 2:  # by AutoGraph in the graph
            y = 0.9 * y
        for _ in tf.range(2):
            y = y + 0.1 * layer.product(x)
        return y

    traced: Function = tf.function(function)
    return traced


def scaled(layer: Linear) -> Function:
    """The gradients of the function are not those of its value."""

    def function(x: Any) -> Any:
        w = tf.convert_to_tensor(layer.w)

        def backward(upstream: Any, variables: Any) -> Any:
            assert [list(variable.shape) for variable in variables] == [[1], [4, 1]]  # in the order of their names
            return upstream @ tf.transpose(w), [tf.reduce_sum(upstream)[None], 0.5 * tf.transpose(x) @ upstream]

        return layer.product(x), backward

    differentiated: Function = tf.custom_gradient(function)
    return differentiated


def scaled_argument(layer: Linear) -> Function:
    @keras.ops.custom_gradient  # type: ignore[untyped-decorator]
    def function(x: Any, w: Any) -> Any:
        def backward(upstream: Any) -> Any:
            return upstream @ tf.transpose(w), 0.5 * tf.transpose(x) @ upstream

        return x @ w, backward

    return lambda x: function(x, layer.w) + layer.b


class Recomputed(keras.Model):  # type: ignore[misc]
    """Layers that are computed again for their gradients, one within another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = dense(6, "tanh"), dense(6, "tanh", 2), dense(1, seed=3)

    def call(self, x: Any) -> Any:
        return self.third(keras.remat(lambda y: self.second(tf.recompute_grad(self.first)(y)))(x))


class RecomputedNorm(keras.Model):  # type: ignore[misc]
    """State that is assigned again when its layer is computed again, as in Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = layers.BatchNormalization(momentum=0.5, synchronized=True), dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(keras.remat(lambda y: self.norm(y, training=training))(x))


class Error(keras.metrics.Mean):  # type: ignore[misc]
    @tf.function  # type: ignore[untyped-decorator]
    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        super().update_state(keras.ops.abs(y - y_pred))


class Smooth(keras.Model):  # type: ignore[misc]
    """Its loss takes gradients by its variables."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dense(3, "tanh"), dense(1, seed=2)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        with tf.GradientTape() as tape:
            output = tf.reduce_mean(self(tf.ones([2, 4])))  # of no batch, of which each worker has another
        gradients = tape.gradient(output, self.trainable_variables)
        return tf.reduce_mean(tf.square(y_pred - y)) + 0.1 * tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients])


class TracedStep(keras.Model):  # type: ignore[misc]
    """A traced train_step, and a traced method that applies the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dense(3, "tanh"), dense(1, seed=2)
        self.recomputed = keras.remat(self.first)

    def call(self, x: Any) -> Any:
        return self.second(self.recomputed(x))

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.apply(tape.gradient(loss, self.trainable_variables))
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}

    @tf.function  # type: ignore[untyped-decorator]
    def apply(self, gradients: Any) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))


class Cell(keras.layers.Layer):  # type: ignore[misc]
    """A recurrent cell that looks up in a table."""

    def __init__(self, table: keras.layers.Embedding) -> None:
        super().__init__()
        self.table, self.state_size = table, COLUMNS

    def call(self, ids: Any, states: Any) -> Any:
        new = 0.5 * states[0] + self.table(ids[:, 0])
        return new, [new]


class Lookup(keras.Model):  # type: ignore[misc]
    """Looks up in a large table where ids are not in the graph of the step."""

    def __init__(self, look_up: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.table = layers.Embedding(ROWS, COLUMNS, embeddings_initializer=keras.initializers.RandomUniform(seed=1))
        self.sum, self.look_up = layers.Dense(1, kernel_initializer="ones"), look_up
        self.table.build()

    def call(self, ids: Any) -> Any:
        return self.sum(keras.ops.reshape(self.look_up(self.table, ids), [-1, 3 * COLUMNS]))


class Penalized(Lookup):
    """Its loss takes the gradient of its output by all its variables."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        with tf.GradientTape() as tape:
            output = tf.reduce_mean(self(tf.constant([[1, 2, 3]])))  # of no batch, of which each worker has another
        gradients = tape.gradient(output, self.trainable_variables)
        penalty = tf.add_n([tf.reduce_sum(tf.square(tf.convert_to_tensor(gradient))) for gradient in gradients])
        return tf.reduce_mean(tf.square(y_pred - y)) + 0.01 * penalty


def with_a_cell() -> keras.Model:
    ids = keras.Input([3, 1], dtype="int32")
    table = layers.Embedding(ROWS, COLUMNS, embeddings_initializer=keras.initializers.RandomUniform(seed=1))
    table.build()
    return keras.Model(ids, layers.Dense(1, kernel_initializer="ones")(layers.RNN(Cell(table))(ids)))


def scanned(table: Any, ids: Any) -> Any:
    start = keras.ops.zeros([keras.ops.shape(ids)[0], COLUMNS])
    _, rows = keras.ops.scan(lambda last, one: (table(one), 0.5 * last + table(one)), start, keras.ops.transpose(ids))
    return keras.ops.transpose(rows, [1, 0, 2])


def counted(table: Any, ids: Any) -> Any:
    start = (0, keras.ops.zeros([keras.ops.shape(ids)[0], COLUMNS]))
    _, total = keras.ops.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, total + table(ids[:, i])), start)
    return keras.ops.concatenate([total] * 3, 1)


def in_a_function(table: Any, ids: Any) -> Any:
    return tf.function(lambda ids: table(ids))(ids)


ops = keras.ops
TABLES: dict[str, Callable[[Any, Any], Any]] = {
    "vectorized map": lambda table, ids: ops.vectorized_map(lambda one: table(one), ids),
    "map": lambda table, ids: ops.map(lambda one: table(one), ids),
    "scan": scanned,
    "while": counted,
    "cond": lambda table, ids: ops.cond(ops.sum(ids) >= 0, lambda: table(ids), lambda: 2 * table(ids)),
    "function": in_a_function,
    "recomputed": lambda table, ids: keras.remat(lambda ids: table(ids))(ids),
    "recomputed and outside": lambda table, ids: keras.remat(lambda ids: table(ids))(ids) + table(ids),
}


def linear(make: Callable[[Any], Function] | None, kind: type[Linear] = Linear) -> Callable[[], keras.Model]:
    return lambda: compiled(keras.Sequential([keras.Input([4]), kind(make)]))


def lookup(name: str) -> Callable[[], keras.Model]:
    return lambda: compiled(keras.Model(ids := keras.Input([3], dtype="int32"), Lookup(TABLES[name])(ids)))


SIGNATURE = [tf.TensorSpec([None, 4])]
# The function that builds the model, x and y.
MODELS: dict[str, tuple[Callable[[], keras.Model], Any, Any]] = {
    "traced call": (linear(None, TracedCall), X, Y),
    "traced helper": (linear(None, TracedHelper), X, Y),
    "traced in build": (linear(lambda layer: tf.function(layer.product, input_signature=SIGNATURE)), X, Y),
    "traced layers": (lambda: compiled(keras.Sequential([keras.Input([4]), Outer()])), X, Y),
    "branching": (linear(branching), X, Y),
    "recomputed function": (linear(lambda layer: tf.recompute_grad(lambda x: tf.tanh(layer.product(x)))), X, Y),
    "recomputed layers": (lambda: compiled(Recomputed()), X, Y),
    "recomputed norm": (lambda: compiled(RecomputedNorm()), X, Y),
    "traced metric": (lambda: compiled(keras.Sequential([keras.Input([4]), dense(1)]), metrics=[Error()]), X, Y),
    "scaled": (linear(scaled), X, Y),
    "scaled argument": (linear(scaled_argument), X, Y),
    "smooth": (lambda: compiled(Smooth(), None), X, Y),
    "traced step": (lambda: compiled(TracedStep()), X, Y),
    "cell": (lambda: compiled(with_a_cell()), IDS[:, :, None], Y),
    "penalized table": (lambda: compiled(Penalized(lambda table, ids: table(ids)), None), IDS, Y),
    **{f"table in {name}": (lookup(name), IDS, Y) for name in TABLES},
}
# Of each kind one, for tests that always run.
IN_ASYNC = [
    "traced call",
    "traced metric",
    "branching",
    "recomputed function",
    "recomputed norm",
    "traced step",
    "cell",
    "table in cond",
]
IN_SYNC = ["traced layers", "recomputed layers", "scaled", "smooth", "table in vectorized map"]
