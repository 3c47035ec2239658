"""How the variables of a model lie on a ps: small ones that are updated alike follow each other in one vector.

Of a model with hundreds of small variables each would take a ps several operations in every step, and every call of a
worker would name them all. A vector is read by one operation and updated by one. The variables of the model, and what
an optimizer keeps for each of them, are views of vectors then, and are read and assigned as before.
"""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tf2dist.model import packing
from tf2dist.process.parts import Part
from tf2dist.process.placement import PACKET
from tf2dist.process.tf_internals import let_lie_in, slots_of, trained_variables

Kinds = Mapping[int, Hashable]  # by id of the variable; those of one kind are updated alike, others lie alone


class Storage:
    """Where a variable lies.

    Attributes:
        members: the variables of the model that lie there: this one.
        variable: in which it lies: itself.
        shape, dtype: of what is read and of changes.
    """

    def __init__(self, members: Sequence[keras.Variable], variable: keras.Variable) -> None:
        self.members, self.variable = list(members), variable
        self.shape, self.dtype = tf.TensorShape(variable.shape), variable.dtype

    def read(self) -> tf.Tensor:
        """In a graph of the ps: the value."""
        return self.variable.value.read_value()

    def pad_update(self, change: tf.Tensor) -> tf.Tensor:
        """In a graph of the ps: a change of the shape `shape` as one of `variable`."""
        return change


class PackedStorage(Storage):
    """Where several variables lie, all of them float32; as `Storage`, of which this has the names.

    The vector ends with zeros, so that its length is a multiple of `PACKET`. TensorFlow's kernels compute packet by
    packet, and what is left at the end one by one, where a square root may be rounded in another way. So an update
    gives the same wherever a variable lies.
    """

    def __init__(self, members: Sequence[keras.Variable]) -> None:
        layout = packing.Packing(members)
        self._size, self._missing = layout.size, -layout.size % PACKET
        value = layout.pack([variable.value.read_value() for variable in members], tf.zeros([self._missing]))
        vector = keras.Variable(lambda shape, dtype: value, value.shape, "float32", name="vector")
        super().__init__(members, vector)
        self.shape = tf.TensorShape([self._size])
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
            storages += [Storage([one], one) for one in run]
        else:
            storages += [PackedStorage(members) for members in _small_runs(run)]
    return [*storages, *(Storage([one], one) for one in variables if packing.is_large(one))]


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
    """What a variable takes of a vector."""
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
