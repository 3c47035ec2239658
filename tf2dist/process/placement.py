"""Which parameter server holds which variable, or which part of it."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf2dist.config.schema import ClusterConfig
from tf2dist.process.initial_rows import InitialRows
from tf2dist.process.parts import all_parts
from tf2dist.process.tf_internals import PartitionedVariable

TABLE = "embeddings"  # as Keras names the variable of an Embedding
PACKET = 16  # the most elements that a processor's instruction takes at once: 512 bits of float32


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

    Each part but the last has a multiple of `PACKET` elements. TensorFlow's kernels compute an array packet by packet,
    and what is left at its end one by one, where a square root may be rounded in another way. With this each element is
    in a packet if it would be in one of the whole variable.
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
