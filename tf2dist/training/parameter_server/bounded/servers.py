"""The parameter servers of algorithm=bounded: at the first of them workers wait before they pull."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.training.parameter_server.bounded.clocks import Clocks
from tf2dist.training.parameter_server.counters import Counts
from tf2dist.training.parameter_server.server import ParameterServer
from tf2dist.training.parameter_server.wire import PackedCount, Parcel

INDEX = tf.TensorSpec([], tf.int64)
GIVE_UP = np.float64(-1)  # in place of the count of updates, for a worker that has to give up the rest of its call


class UngatedServer(ParameterServer):
    """A ps at which nobody waits. A push with the limit 0 is not even admitted; see `BoundedStep`."""

    def _admit(self, pushed: Parcel, indices: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
        admit = super()._admit
        return tf.cond(limit > 0, lambda: admit(pushed, indices, limit), lambda: tf.constant(False))


class GatedServer(UngatedServer):
    """The ps at which workers wait for the slowest; its pulls have `GIVE_UP` for a worker that must not go on.

    Attributes:
        begin: ``begin(worker)``, the pull before the first step of a call.
        open, close, wake: see `Clocks`.
        retire: ``retire(worker)``; see `Clocks`.
        clock_state: see `Clocks.state`.

    Args:
        bound: see `Clocks`.
        num_workers: that push.
        arguments: those of `ParameterServer`.
    """

    def __init__(self, bound: int, num_workers: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        with tf.device(self.device):
            self._clocks = clocks = Clocks(self.counters, num_workers, bound)
        self.open, self.close = self.on_device(clocks.open), self.on_device(clocks.close)
        self.wake, self.retire = self.on_device(clocks.wake), self.on_device(clocks.retire, INDEX)
        self.clock_state = self.on_device(clocks.state)

    def restore(self, counts: Counts) -> None:
        super().restore(counts)
        self._clocks.restore(counts.steps)

    def _trace(self, *signature: Any) -> None:
        self.begin = self.on_device(self._begin, INDEX)
        self.push = self.on_device(self._push_and_move, *signature, INDEX)
        self.exchange = self.on_device_later(self._exchange_at_gate, *signature, INDEX)

    def _begin(self, worker: tf.Tensor) -> Parcel:
        may_go_on = self._clocks.wait(worker)
        with tf.control_dependencies([may_go_on]):
            applied = self.counters.applied()
            count = PackedCount.of(tf.where(may_go_on, applied, GIVE_UP))
        with tf.control_dependencies([count.bits]):
            values = [cell.read() for cell in self.stored]
        return self.stored_layout.pack(values, count)

    def _push_and_move(self, pushed: Parcel, indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([self._admit_and_move(pushed, indices, limit, worker)]):
            return self.counters.after(indices)

    def _exchange_at_gate(self, pushed: Parcel, indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> Parcel:
        with tf.control_dependencies([self._admit_and_move(pushed, indices, limit, worker)]):
            return self._begin(worker)

    def _admit_and_move(self, pushed: Parcel, indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([self._admit(pushed, indices, limit)]):
            return self._clocks.moved(worker)
