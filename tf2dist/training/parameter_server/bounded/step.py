"""The graphs of algorithm=bounded: as those of plain training, with a gate before each pull."""

from typing import Any

import tensorflow as tf

from tf2dist.training.parameter_server.bounded.servers import GatedServer, UngatedServer
from tf2dist.training.parameter_server.server import ParameterServer
from tf2dist.training.parameter_server.step import AsyncStep
from tf2dist.training.parameter_server.wire import Parcel


class BoundedStep(AsyncStep):
    """See `AsyncStep`.

    The first ps hears of a step last and lets a worker begin the next one first: what the clocks count is on all ps.

    Attributes:
        gated: the first ps.
        bound: how many steps a worker may be ahead of the slowest.
    """

    gated: GatedServer
    bound: int

    def _new_server(self, number: int, *arguments: Any) -> ParameterServer:
        if number > 0:
            return UngatedServer(*arguments)
        self.bound = self.config.algorithm.bound
        self.gated = GatedServer(self.bound, self.sharding.num_shards, *arguments)
        return self.gated

    def _pull(self, worker: tf.Tensor) -> list[Parcel]:
        return self._after_first(self.gated.begin(worker))

    def _limit(self, limit: tf.Tensor, pulled: list[Parcel]) -> tf.Tensor:
        """0 from the step on that the worker must not take.

        All ps leave out the same steps with it, and all steps to the end of the call: a later one would be counted in
        the place of the first, whose batch is still to be trained on.
        """
        _, count = self.gated.pull_layout.unpack(pulled[0])
        with tf.device("CPU:0"):
            return tf.where(count.value() < 0, tf.zeros_like(limit), limit)

    def _exchange(
        self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor, number: int
    ) -> list[Parcel]:
        with tf.control_dependencies(self._push_to_others(pushes, indices, limit)):
            return self._after_first(self.gated.exchange(pushes[0], indices, limit, worker))

    def _push(self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(self._push_to_others(pushes, indices, limit)):
            return self.gated.push(pushes[0], indices, limit, worker)

    def _push_to_others(self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor) -> list[tf.Tensor]:
        return [server.push(push, indices, limit) for server, push in zip(self.servers[1:], pushes[1:], strict=True)]

    def _after_first(self, first: Parcel) -> list[Parcel]:
        """What all ps give, after that of the first one has come."""
        with tf.control_dependencies(first):
            return [first, *(server.pull() for server in self.servers[1:])]

    def facts(self) -> dict[str, Any]:
        """The largest lead that a worker had over the slowest since the run was started, in steps."""
        *_, lead = self.gated.clock_state().numpy()
        return {"bound": self.bound, "lead": {"max": int(lead)}}
