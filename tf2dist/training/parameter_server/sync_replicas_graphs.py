"""The graphs of mode=sync_replicas; see `sync_replicas_servers`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tf2dist.data.passes import NumberedSteps
from tf2dist.model.shards import cut, parts_of
from tf2dist.model.step import step_place
from tf2dist.training.parameter_server.batches import Input, SharedArrayInput, own_number
from tf2dist.training.parameter_server.graphs import Call, GraphsSpec, PsGraphs
from tf2dist.training.parameter_server.rows import Request, Routed
from tf2dist.training.parameter_server.server import PartSpec
from tf2dist.training.parameter_server.sync_replicas_counters import SyncReplicasOrigin
from tf2dist.training.parameter_server.sync_replicas_servers import DecidingServer, FollowingServer
from tf2dist.training.parameter_server.wire import Parcel

if TYPE_CHECKING:  # it names these graphs
    from tf2dist.training.parameter_server.sync_replicas import SyncReplicasRule


class SyncReplicasGraphs(PsGraphs):
    """See `PsGraphs`.

    Attributes:
        deciding, following: the servers.
        replicas: the gradients that make a step.
        steps: of the input, by their numbers.
    """

    servers: Sequence[DecidingServer | FollowingServer]

    def __init__(self, spec: GraphsSpec, rule: "SyncReplicasRule") -> None:
        self.replicas = rule.replicas
        super().__init__(spec)

    def restore(self, origin: SyncReplicasOrigin) -> None:
        self.deciding.restore(origin.step, origin.aggregated, origin.dropped)
        for server in self.following:
            server.restore(origin.step)

    def read_counters(self) -> None:
        self.deciding.close()
        self.deciding.counts()

    def _make_servers(self, parts: list[PartSpec]) -> None:
        numbers = self.step.lookups.num_lookups(self.config.train.batch_size_per_worker)
        pairs = zip(self.step.tables, numbers, strict=True)
        of_parts = {id(part): number for table, number in pairs for part in parts_of(table)}
        (first, own), *others = [(part, [of_parts[id(table)] for table in part.tables]) for part in parts]
        self.deciding = DecidingServer(first, self.replicas, own)
        self.following = [FollowingServer(*other) for other in others]
        self.servers = [self.deciding, *self.following]

    def _make_input(self, spec: GraphsSpec) -> Input:
        self.steps, self._offsets = NumberedSteps(spec.sharding, spec.origin.begin), spec.origin.offsets
        return SharedArrayInput(spec.step.layout, spec.sharding, self.steps)

    def batch_types(self) -> list[tf.TensorSpec]:
        return [*super().batch_types(), tf.TensorSpec([], tf.float32)]

    def _compute_step(
        self, pulled: list[Parcel], leaves: list[tf.Tensor], worker: tf.Tensor, routed: Routed
    ) -> tuple[list[Parcel], tf.Tensor]:
        *leaves, share = leaves
        unpacked, rows = self.unpack(pulled, routed.requests)
        step = unpacked[0].applied
        trainable, state = self.inputs(self.values_of(unpacked), rows)
        output = self.step(trainable, state, leaves, step_place(worker, step.value()), share, routed.positions)
        gradients, of_rows = self.divide(output.gradients, routed.requests)
        # Changes rather than values, as with mode=sync: their weighted sum over the replicas becomes the mean.
        changes = cut(
            self.step.state,
            [tf.cast(new - old, tf.float32) * share for new, old in zip(output.state, state, strict=True)],
        )
        pushes: list[Parcel] = []
        for server, request, rows in zip(self.servers, routed.requests, of_rows, strict=True):
            of_whole = [gradients[id(v)] for v in server.whole]
            of_state = [changes[id(v)] for v in server.state]
            parcel = server.push_layout.pack([*of_whole, *of_state], share, output.sums, step)
            pushes.append(server.rows.pack_gradients(parcel, request, rows))
        return pushes, tf.math.divide_no_nan(output.sums[0], share)

    def _begin(self, num_steps: int, worker: tf.Tensor, *limit: tf.Tensor) -> Call:
        local_steps = self.deciding.pushed_by(worker)[0]
        first = own_number(self._offsets, worker, local_steps)
        return Call(worker, local_steps, first + tf.range(num_steps, dtype=tf.int64))

    def _pull(self, call: Call, requests: list[Request]) -> list[Parcel]:
        return self._follow(self.deciding.begin(call.worker, *self.deciding.rows.asked(requests[0])), requests)

    def _exchange(self, call: Call, pushes: list[Parcel], number: int, requests: list[Request]) -> list[Parcel]:
        asked = self.deciding.rows.asked(requests[0])
        with tf.control_dependencies(self._keep(call, pushes)):
            return self._follow(self.deciding.exchange(pushes[0], call.worker, *asked), requests)

    def _push(self, call: Call, pushes: list[Parcel], number: int) -> tf.Tensor:
        with tf.control_dependencies(self._keep(call, pushes)):
            return self.deciding.push(pushes[0], call.worker)

    def _keep(self, call: Call, pushes: list[Parcel]) -> list[tf.Tensor]:
        # The deciding ps must not take a gradient of which another ps has no part.
        return [server.keep(push, call.worker) for server, push in zip(self.following, pushes[1:], strict=True)]

    def _follow(self, pulled: Parcel, requests: list[Request]) -> list[Parcel]:
        """What all ps send, from that of the deciding one."""
        own, _ = self.deciding.rows.split(pulled, self.deciding.pull_layout.specs)
        _, step, made_by = self.deciding.pull_layout.unpack(own)
        parts = zip(self.following, requests[1:], strict=True)
        return [pulled, *(server.follow(step.bits, made_by, *server.rows.asked(request)) for server, request in parts)]

    def _position(self, counted: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pushed, step = tf.unstack(counted)
        return pushed, step
