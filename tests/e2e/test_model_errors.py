"""An error in the user's code, on a worker or on a ps, while the other tasks of the call wait for it."""

from collections.abc import Callable

import pytest

from tests.conftest import Command

WATCHDOG_SECS = 600  # longer than the command may take: no error waits for it
FAULTY = """
import keras
import tensorflow as tf
import tf2dist

GOOD_STEPS = 40


def checked(tensor, steps, message):
    with tf.control_dependencies([tf.debugging.Assert(steps < GOOD_STEPS, [message])]):
        return tf.identity(tensor)


class Checking(keras.layers.Layer):
    def build(self, input_shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x, training=False):
        if not training:
            return x
        self.steps.assign(self.steps + 1.0)
        return checked(x, self.steps, "the layer has failed")


@tf2dist.register_model("checking")
def checking(input_shape, num_classes):
    layers = keras.layers
    first = [keras.Input(input_shape), layers.Rescaling(1 / 255), layers.Flatten()]
    return keras.Sequential([*first, Checking(), layers.Dense(num_classes)])


@tf2dist.register_optimizer("checking")
class CheckingSGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        steps = tf.cast(self.iterations, tf.float32)
        super().update_step(checked(gradient, steps, "the optimizer has failed"), variable, learning_rate)
"""


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model=checking", "optimizer=sgd"], "the layer has failed"),  # on the workers
        (["model=softmax", "optimizer=checking"], "the optimizer has failed"),  # on the ps
    ],
)
def test_an_error_of_one_end_reaches_the_user_though_the_other_waits(
    command: Command, options: list[str], message: str
) -> None:
    (command.folder / "faulty.py").write_text(FAULTY)
    job = ["mode=async", "cluster=local2", "cluster.num_ps=2", "data=digits", "train.steps=100000"]
    completed = command(*job, *options, "plugins=[faulty.py]", f"watchdog_secs={WATCHDOG_SECS}")
    assert completed.code == 1, str(completed)
    assert message in completed.stderr, str(completed)
