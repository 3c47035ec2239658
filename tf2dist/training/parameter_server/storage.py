"""Storage of a model on a ps: small variables that are updated alike lie in one vector, and updates do not mix.

Of a model with hundreds of small variables each would take a ps several operations in every step, and every call of a
worker would name them all. So they follow each other in a vector, which is read by one operation and updated by one.
The variables of the model, and what an optimizer keeps for each of them, are views of vectors then, and are read and
assigned as before.

Keras writes an update as several operations on several variables. When two pushes meet on a ps, one may divide the
momentum that the other has just added to by a velocity that the other has not yet changed: with Adam, one run in ten
made steps that were thousands of times too large. So an update is either one kernel of TensorFlow, which holds the
locks of its variables, or it runs while no other update does. What Keras does beside the kernel are subtractions, each
of them atomic; a weight decay may use a value that another push is just changing. What the model keeps beside its
weights, such as moving averages, is changed by one kernel, too.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.model import packing
from tf2dist.model.shards import Part
from tf2dist.process.placement import PACKET
from tf2dist.tf_internals.keras import momentums, place_of, slots_of, trained_variables, velocities
from tf2dist.tf_internals.variables import let_lie_in

Kinds = Mapping[int, Hashable]  # by id of the variable; those of one kind are updated alike, others lie alone


class Storage:
    """Where a variable lies.

    Attributes:
        members: the variables of the model that lie there: this one.
        variable: in which it lies: itself.
        shape, dtype: of what is read and of changes.
    """

    def __init__(self, variable: keras.Variable) -> None:
        self.members, self.variable = [variable], variable
        self.shape, self.dtype = tf.TensorShape(variable.shape), variable.dtype

    def read(self) -> tf.Tensor:
        """In a graph of the ps: the value."""
        return self.variable.value.read_value()

    def pad_update(self, change: tf.Tensor) -> tf.Tensor:
        """In a graph of the ps: a change of the shape `shape` as one of `variable`."""
        return change


class PackedStorage(Storage):
    """Where several variables lie, all of them float32; as `Storage`, of which this has the names.

    The vector ends with zeros, so that its length is a multiple of `PACKET`, and an update gives the same wherever a
    variable lies.

    A kernel of [3, 2] and a bias of [2] make a vector of `PACKET` = 16: elements 0 to 5 are the kernel, 6 and 7 the
    bias, and 8 to 15 stay 0. Changes and values travel as the first 8, of the shape `shape`. What Adam keeps for the
    vector is laid out alike, and what it keeps for the kernel and for the bias are views of that.
    """

    def __init__(self, members: Sequence[keras.Variable]) -> None:
        layout = packing.Packing(members)
        self._size, self._missing = layout.size, -layout.size % PACKET
        value = layout.pack([variable.value.read_value() for variable in members], tf.zeros([self._missing]))
        vector = keras.Variable(lambda shape, dtype: value, value.shape, "float32", name="vector")
        super().__init__(vector)
        self.members, self.shape = list(members), tf.TensorShape([self._size])
        let_lie_in(vector, members)
        for member in members:
            if isinstance(member, Part):
                member.value_of_whole.parts[member.number] = member.value

    def read(self) -> tf.Tensor:
        whole = super().read()
        return whole[: self._size] if self._missing else whole

    def pad_update(self, change: tf.Tensor) -> tf.Tensor:
        return tf.pad(change, [[0, self._missing]]) if self._missing else change


def allocate_storage(variables: Sequence[keras.Variable], kinds: Kinds) -> list[Storage]:
    """Lays variables down, on the device under which it is called.

    In the result small variables are in the order of `variables`, whether alone or as members, and so are large ones.
    """
    small = [variable for variable in variables if not packing.is_large(variable)]
    storages: list[Storage] = []
    for kind, run in itertools.groupby(small, lambda one: kinds.get(id(one)) if _may_be_member(one) else None):
        if kind is None:
            storages += map(Storage, run)
        else:
            storages += [PackedStorage(members) for members in _small_runs(run)]
    return [*storages, *(Storage(one) for one in variables if packing.is_large(one))]


def adopt_slots(vectors: Sequence[PackedStorage], own: keras.Optimizer, of_members: keras.Optimizer) -> None:
    """Turns what an optimizer keeps for members of vectors into views of what another one keeps for the vectors."""
    place = {id(variable): number for number, variable in enumerate(trained_variables(of_members))}
    slots = slots_of(own)
    for attribute, of_variables in slots_of(of_members).items():
        for vector, of_vector in zip(vectors, slots[attribute], strict=True):
            let_lie_in(of_vector, [of_variables[place[id(member)]] for member in vector.members])


def _may_be_member(variable: keras.Variable) -> bool:
    # Of a large variable that is cut, the parts lie alone as the whole would: what is left at its end, too.
    whole = variable.value_of_whole if isinstance(variable, Part) else variable
    is_small = not packing.is_large(whole) and _num_bytes(variable) < packing.LARGE_BYTES
    return variable.dtype == "float32" and is_small


def _num_bytes(variable: keras.Variable) -> int:
    """The bytes that a variable takes of a vector."""
    return 4 * int(np.prod(variable.shape))


def _small_runs(variables: Iterator[keras.Variable]) -> Iterator[list[keras.Variable]]:
    """The variables in runs that are small themselves, for what is large travels alone."""
    run: list[keras.Variable] = []
    size = 0
    for variable in variables:
        more = _num_bytes(variable)
        if run and size + more >= packing.LARGE_BYTES:
            yield run
            run, size = [], 0
        run.append(variable)
        size += more
    if run:
        yield run


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
