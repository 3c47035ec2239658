"""Optimizer updates that cannot mix when two pushes meet on a parameter server.

Keras writes an update as several operations on several variables. When two pushes meet on a ps, one may divide the
momentum that the other has just added to by a velocity that the other has not yet changed: with Adam, one run in ten
made steps that were thousands of times too large. So an update is either one kernel of TensorFlow, which holds the
locks of its variables, or it runs while no other update does. What Keras does beside the kernel are subtractions, each
of them atomic; a weight decay may use a value that another push is just changing. What the model keeps beside its
weights, such as moving averages, is changed by one kernel, too.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf2dist.process.tf_internals import momentums, place_of, velocities

UpdateStep = Callable[[tf.Tensor, tf.Variable, tf.Tensor], None]
StateUpdate = Callable[[tf.Tensor], Any]


def state_update(variable: tf.Variable, decay: float) -> StateUpdate:
    """A function of a term, which sets `variable` to ``decay * variable + term`` by one kernel."""
    if decay == 1:
        return lambda term: variable.assign_add(term)
    if decay == 0:
        return lambda term: variable.assign(term)
    # TensorFlow has no kernel for this alone. That of the momentum optimizer does it to the momentum; the weight that
    # it also moves is a dummy, and stays 0 since the learning rate is 0.
    with tf.device(variable.device):
        weight = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
    return lambda term: tf.raw_ops.ResourceApplyMomentum(
        var=weight.handle,
        accum=variable.handle,
        lr=tf.zeros([], variable.dtype),
        grad=term,
        momentum=tf.constant(decay, variable.dtype),
        use_locking=True,
    )


def make_atomic(optimizer: keras.Optimizer) -> bool:
    """Replaces the update of a built optimizer by a kernel that does the same, where there is one.

    Returns:
        Whether updates can run at the same time; if not, the caller must ensure that they do not.
    """
    # Both read and assign other variables beside the update itself, so a kernel for the update would not be enough.
    if optimizer.use_ema or optimizer.gradient_accumulation_steps:
        return False
    if (update_step := _update_step(optimizer)) is None:
        return False
    optimizer.update_step = update_step
    return True


def _update_step(optimizer: keras.Optimizer) -> UpdateStep | None:
    # The exact type: a subclass may have another update.
    kind, optimizers = type(optimizer), keras.optimizers
    if kind is optimizers.SGD:
        return _momentum(optimizer) if optimizer.momentum else _sgd
    # AdamW decays the weights outside of its update. The kernels that are used here know neither amsgrad nor centered.
    if kind in (optimizers.Adam, optimizers.AdamW) and not optimizer.amsgrad:
        return _adam(optimizer)
    if kind is optimizers.RMSprop and not optimizer.centered:
        return _rmsprop(optimizer)
    return None


def _slot(optimizer: keras.Optimizer, slots: list[keras.Variable], variable: tf.Variable) -> Any:
    return slots[place_of(optimizer, variable)].value.handle


def _sgd(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
    """One atomic kernel; Keras would first make a product as large as the variable, on its way to the same."""
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=tf.cast(learning_rate, variable.dtype), delta=gradient, use_locking=True
    )


def _momentum(optimizer: keras.Optimizer) -> UpdateStep:
    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=_slot(optimizer, optimizer.momentums, variable),
            lr=tf.cast(learning_rate, variable.dtype),
            grad=gradient,
            momentum=tf.constant(optimizer.momentum, variable.dtype),
            use_locking=True,
            use_nesterov=optimizer.nesterov,
        )

    return update_step


def _adam(optimizer: keras.Optimizer) -> UpdateStep:
    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        # The number of this very update, which `server.UpdateNumber` gives; the bias correction depends on it.
        number = tf.cast(optimizer.iterations.value + 1, variable.dtype)
        beta1, beta2 = (tf.constant(beta, variable.dtype) for beta in (optimizer.beta_1, optimizer.beta_2))
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=_slot(optimizer, momentums(optimizer), variable),
            v=_slot(optimizer, velocities(optimizer), variable),
            beta1_power=tf.pow(beta1, number),
            beta2_power=tf.pow(beta2, number),
            lr=tf.cast(learning_rate, variable.dtype),
            beta1=beta1,
            beta2=beta2,
            epsilon=tf.constant(optimizer.epsilon, variable.dtype),
            grad=gradient,
            use_locking=True,
        )

    return update_step


def _rmsprop(optimizer: keras.Optimizer) -> UpdateStep:
    def increments(velocity: keras.Variable) -> tf.Variable:
        # The kernel demands a variable for the momentum even if there is none, and then carries nothing over in it.
        with tf.device(velocity.value.device):
            return tf.Variable(tf.zeros(velocity.shape, velocity.dtype), trainable=False)

    moving = [variable.value for variable in momentums(optimizer)] or list(map(increments, velocities(optimizer)))

    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        tf.raw_ops.ResourceApplyRMSProp(
            var=variable.handle,
            ms=_slot(optimizer, velocities(optimizer), variable),
            mom=moving[place_of(optimizer, variable)].handle,
            lr=tf.cast(learning_rate, variable.dtype),
            rho=tf.constant(optimizer.rho, variable.dtype),
            momentum=tf.constant(optimizer.momentum, variable.dtype),
            epsilon=tf.constant(optimizer.epsilon, variable.dtype),
            grad=gradient,
            use_locking=True,
        )

    return update_step
