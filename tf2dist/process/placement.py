"""Placement of variables on parameter servers: which ps holds which of them or which part, and a table's first values.

Of a table that is cut over the ps, each ps draws the first values of the rows that it holds, a piece at a time. They
are those that Keras' initializer has for the whole table, which would take up to three times its size on one ps.
TensorFlow's random numbers come from Philox, a function of a key and a counter: four numbers of an array have the same
counter, and the next four the next one. So they can be drawn from any place on.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config.schema import ClusterConfig
from tf2dist.model.shards import PIECE_BYTES, all_parts
from tf2dist.tf_internals.keras import new_variable, seed_of
from tf2dist.tf_internals.variables import PartitionedVariable

PER_COUNTER = 4

# draw(first, number), in a graph: so many numbers of a table, row after row, from the one with the index `first` on.
Draw = Callable[[tf.Tensor, int], tf.Tensor]


class InitialRows:
    """The rows that a table begins with.

    Attributes:
        shape, dtype: of the whole table.
    """

    dtype = tf.float32

    def __init__(self, shape: tf.TensorShape, draw: Draw) -> None:
        self.shape, self._draw = shape, draw

    @classmethod
    def of(cls, initial_value: object, dtype: Any) -> "InitialRows | None":
        """The rows of a new variable, from the value and the type that Keras gives TensorFlow.

        None if it is drawn at once: no matrix of float32, not larger than a piece, or of an unknown initializer.
        """
        found = new_variable(initial_value)
        if found is None or len(found.shape) != 2 or dtype != cls.dtype:
            return None
        shape, draw = tf.TensorShape(found.shape), _draw(found.initializer)
        is_large = shape.num_elements() * cls.dtype.size > PIECE_BYTES
        return cls(shape, draw) if draw and is_large else None

    def assign_to(self, parts: list[tf.Variable]) -> None:
        """Gives every n-th row to each of n parts, on their devices, all at the same time."""
        fills = [functools.partial(self._fill, part, number, len(parts)) for number, part in enumerate(parts)]
        with ThreadPoolExecutor(len(parts)) as threads:
            for future in [threads.submit(fill) for fill in fills]:
                future.result()

    def _fill(self, part: tf.Variable, number: int, num_parts: int) -> None:
        rows, columns = part.shape
        at_once = max(1, PIECE_BYTES // (self.dtype.size * columns * num_parts))  # rows of each part
        of_all = num_parts * columns
        own = slice(number * columns, (number + 1) * columns)

        def assign(first: tf.Tensor) -> list[tf.Tensor]:
            # Beyond the last row, too: numbers that nobody uses.
            drawn = tf.reshape(self._draw(first * of_all, at_once * of_all), [at_once, of_all])[:, own]
            last = tf.minimum(first + at_once, rows)
            value = drawn[: last - first]
            tf.raw_ops.ResourceStridedSliceAssign(ref=part.handle, begin=[first], end=[last], strides=[1], value=value)
            return [last]

        def fill() -> None:
            tf.while_loop(lambda first: first < rows, assign, [tf.constant(0, tf.int64)], parallel_iterations=1)

        with tf.device(part.device):
            tf.function(fill, autograph=False).get_concrete_function()()


def _draw(initializer: keras.Initializer) -> Draw | None:
    """A function that draws as an initializer of Keras does; None for one that is not known."""
    kind, seed = type(initializer), seed_of(initializer)
    if kind in (keras.initializers.Zeros, keras.initializers.Ones):
        return lambda first, number: initializer([number], "float32")
    if seed is None:
        return None
    if kind is keras.initializers.RandomUniform:
        draw, low, high = tf.raw_ops.StatelessRandomUniformV2, initializer.minval, initializer.maxval
        scale, offset = np.float32(high) - np.float32(low), low
    elif kind is keras.initializers.RandomNormal:
        draw, scale, offset = tf.raw_ops.StatelessRandomNormalV2, initializer.stddev, initializer.mean
    else:
        return None

    def numbers(first: tf.Tensor, number: int) -> tf.Tensor:
        start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        counter = start.counter + tf.cast([first // PER_COUNTER, 0], tf.uint64)
        before = first % PER_COUNTER
        drawn = draw(shape=[before + number], key=start.key, counter=counter, alg=tf.random.Algorithm.PHILOX.value)
        return drawn[before:] * scale + offset

    return numbers


TABLE = "embeddings"  # as Keras names the variable of an Embedding
# TensorFlow's kernels compute an array packet by packet, and what is left at its end one by one, where a square root
# may be rounded in another way. A packet is what an instruction of the processor takes at once, at most 512 bits.
PACKET = 16  # elements of float32


@contextlib.contextmanager
def placed(strategy: tf.distribute.ParameterServerStrategy, config: ClusterConfig, num_ps: int) -> Iterator[None]:
    """In the context, variables are created on the parameter servers; their values do not depend on where they lie.

    Args:
        config: its `placement` is "round_robin": on each ps in turn; or "balanced": in the order of their creation each
            on the ps whose variables have the fewest bytes so far, as TensorFlow 1 had it in
            `GreedyLoadBalancingStrategy`; or "partitioned": the same, with large ones cut, as TensorFlow's
            `MinSizePartitioner` cuts them.
    """
    if config.placement == "round_robin":  # the strategy's own
        with strategy.scope():
            yield
        return
    balance = _Balance(num_ps)
    # The strategy's creator calls the outer one on the device that it has chosen; the inner device counts.
    with tf.variable_creator_scope(balance.place), strategy.scope():
        if config.placement == "balanced":
            yield
            return
        # Before the strategy's creator, which takes whatever the outer one returns for a variable of its own kind.
        with tf.variable_creator_scope(_Partitioner(balance, config.min_part_bytes).create):
            yield


class _Balance:
    """Gives variables to the ps that have the fewest bytes so far."""

    def __init__(self, num_ps: int) -> None:
        self._loads = [0] * num_ps
        self._chosen_ps: int | None = None

    def least_loaded(self, number: int) -> list[int]:
        """So many ps, or all of them."""
        return sorted(range(len(self._loads)), key=self._loads.__getitem__)[:number]

    @contextlib.contextmanager
    def choosing(self, ps: int) -> Iterator[None]:
        """In the block, variables go to this ps."""
        self._chosen_ps = ps
        try:
            yield
        finally:
            self._chosen_ps = None

    def place(self, next_creator: Any, **kwargs: Any) -> tf.Variable:
        ps = self.least_loaded(1)[0] if self._chosen_ps is None else self._chosen_ps
        with tf.device(_device_of(ps)):
            variable = next_creator(**kwargs)
        self._loads[ps] += _bytes_of(variable)
        return variable


def _device_of(ps: int) -> str:
    return f"/job:ps/task:{ps}/device:CPU:0"


class _Partitioner:
    """Cuts variables along their first axis, into parts of at least `min_part_bytes` on as many ps.

    Of a table each part has every n-th row: ids are often in the order of how frequent they are, and a part with the
    first rows would have most of the work. Of a batch of 500 ids by Zipf's law, in a table of a million rows on two ps,
    the busier ps has 52 % of the unique ids. It would have 93 % if it held the first half of the rows.
    """

    def __init__(self, balance: _Balance, min_part_bytes: int) -> None:
        self._balance, self._min_part_bytes = balance, min_part_bytes

    def create(self, next_creator: Any, **kwargs: Any) -> tf.Variable | PartitionedVariable:
        # The slots of an optimizer that has trained the model before want to lie beside their variable.
        if isinstance(kwargs.get("colocate_with"), PartitionedVariable):
            del kwargs["colocate_with"]
        initial = kwargs.get("initial_value")
        if initial is None or not tf.executing_eagerly():
            return next_creator(**kwargs)
        table = InitialRows.of(initial, kwargs.get("dtype")) if kwargs.get("name") == TABLE else None
        return self._create_table(table, next_creator, kwargs) if table else self._cut(next_creator, kwargs)

    def _create_table(
        self, table: InitialRows, next_creator: Any, kwargs: dict[str, Any]
    ) -> tf.Variable | PartitionedVariable:
        servers = self._servers_for(table)
        parts = []
        for number, ps in enumerate(servers):
            rows = len(range(number, table.shape[0], len(servers)))
            with tf.device(_device_of(ps)):
                zeros = tf.zeros([rows, table.shape[1]], table.dtype)
            with self._balance.choosing(ps):
                parts.append(next_creator(**kwargs | {"initial_value": zeros, "shape": zeros.shape}))
        del zeros  # or the last part would be copied before its first row is assigned
        table.assign_to(parts)
        return PartitionedVariable(parts, interleaves=True) if len(parts) > 1 else parts[0]

    def _cut(self, next_creator: Any, kwargs: dict[str, Any]) -> tf.Variable | PartitionedVariable:
        initial = kwargs["initial_value"]
        # Once for all parts, since an initializer may draw other numbers the next time. On a ps, since it may be larger
        # than the memory of the coordinator.
        first = _device_of(*self._balance.least_loaded(1))
        with tf.device(first):
            value = tf.convert_to_tensor(initial() if callable(initial) else initial, kwargs.get("dtype"))
        servers = self._servers_for(value)
        # By the name that Keras gives it. Any other variable may be cut either way.
        interleaves = kwargs.get("name") == TABLE and value.shape.rank == 2
        if interleaves:
            rows = [slice(number, None, len(servers)) for number in range(len(servers))]
        else:
            rows = [slice(*pair) for pair in itertools.pairwise([0, *ends_of_parts(value.shape, len(servers))])]
        if len(rows) < 2:
            return next_creator(**kwargs | {"initial_value": value})
        parts = []
        for ps, own in zip(servers, rows, strict=False):
            with tf.device(first):
                part = value[own]
            with self._balance.choosing(ps):
                parts.append(next_creator(**kwargs | {"initial_value": part, "shape": part.shape}))
        return PartitionedVariable(parts, interleaves)

    def _servers_for(self, value: tf.Tensor | InitialRows) -> list[int]:
        rows = value.shape[0] if value.shape.rank else 1
        return self._balance.least_loaded(min(max(1, _bytes_of(value) // self._min_part_bytes), rows))


def ends_of_parts(shape: tf.TensorShape, max_parts: int) -> list[int]:
    """The row after the last one of each part, for as many parts as wanted, or fewer.

    Each part but the last has a multiple of `PACKET` elements, so that each element is in a packet if it would be in
    one of the whole variable.
    """
    if not shape.rank:
        return []
    rows_at_once = PACKET // math.gcd(PACKET, shape[1:].num_elements())
    groups = -(-shape[0] // rows_at_once)
    number = min(max_parts, groups)
    return [min(shape[0], groups * part // number * rows_at_once) for part in range(1, number + 1)]


def print_bytes(variables: list[keras.Variable], optimizers: list[keras.Optimizer], num_ps: int) -> None:
    """Prints a line for each ps, for the log: the bytes of the model's variables that lie there, and all bytes.

    Args:
        variables: those of the model that belong to its state.
        optimizers: one for each ps that has variables.
    """
    of_model = _bytes_of_each(all_parts(variables))
    of_optimizers = _bytes_of_each([slot for optimizer in optimizers for slot in optimizer.variables])
    for ps in range(num_ps):
        model_bytes = of_model.get(ps, 0)
        total = model_bytes + of_optimizers.get(ps, 0)
        print(f"ps-{ps}: {model_bytes:,} bytes of the model, {total:,} with the optimizer's state", flush=True)


def _bytes_of_each(variables: list[keras.Variable]) -> dict[int, int]:
    by_ps: dict[int, int] = {}
    for variable in variables:
        ps = tf.DeviceSpec.from_string(variable.value.device).task
        by_ps[ps] = by_ps.get(ps, 0) + _bytes_of(variable.value)
    return by_ps


def _bytes_of(variable: tf.Variable | tf.Tensor | InitialRows) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)
