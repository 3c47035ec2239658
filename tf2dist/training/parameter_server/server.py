"""The part of the model that lives on one parameter server: how it is read and how it is updated.

All run as functions *on* the ps: a pull packs all variables into one vector before it crosses the network, a push
carries one vector there and is unpacked and applied there, by a Keras optimizer of the ps's own, and an exchange is a
push and the next pull. Large variables are not packed (see `wire`). Marked as not to be inlined, each is a single
node of the worker's graph however many operations it has, which halves the time of a step and divides that of tracing.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.model.tables import apply_rows, is_one_operation
from tf2dist.tf_internals.keras import (
    count_updates_in,
    follow_learning_rate,
    groups_of,
    inner_optimizers,
    undecayed,
)
from tf2dist.tf_internals.tensorflow import as_one_node
from tf2dist.training.parameter_server.algorithms import Algorithm
from tf2dist.training.parameter_server.counters import ONES, Counters, Counts
from tf2dist.training.parameter_server.storage import (
    Kinds,
    PackedStorage,
    Storage,
    adopt_slots,
    allocate_storage,
    make_atomic,
    state_update,
)
from tf2dist.training.parameter_server.wire import PackedCount, PullLayout, PushLayout, Request, RowsLayout, WireTensors

NEVER = np.iinfo(np.int64).max
NO_UPDATE = np.int64(0)  # the limit of a push that is no update: every number has reached it
REFUSING = NEVER // 2  # far beyond every limit, and no number of updates leads from there to the end


@dataclass(frozen=True)
class PartSpec:
    """The part of a model that one ps gets, and how it is trained.

    Attributes:
        device: of the ps.
        trainable, state: those variables of the model that lie there.
        tables: those of the trainable ones of which rows travel.
        make_optimizer: for the ps.
        num_workers: that push.
        num_metrics: numbers that every update adds to the sums of the metrics; 0 where they are not kept.
        earlier_updates: that the optimizer has applied before this run; they count for its schedule.
        narrow: the type in which large floats travel in training; None for their own.
    """

    device: str
    trainable: list[keras.Variable]
    state: list[keras.Variable]
    make_optimizer: Callable[[], keras.Optimizer]
    num_workers: int
    num_metrics: int
    earlier_updates: int = 0
    narrow: tf.DType | None = None
    tables: Sequence[keras.Variable] = ()

    @property
    def whole(self) -> list[keras.Variable]:
        """The trainable variables that travel as a whole."""
        tables = set(map(id, self.tables))
        return [variable for variable in self.trainable if id(variable) not in tables]

    @property
    def variables(self) -> list[keras.Variable]:
        """All that travel as a whole."""
        return [*self.whole, *self.state]


class ModelPart(abc.ABC):
    """Variables of the model on one ps, with an optimizer of their own.

    Attributes:
        pull_layout: of what a worker pulls.
        exact_layout, pull_exactly: of what an evaluation pulls, without waiting: no value is rounded to a narrow type,
            and there are no rows of tables.
        stored: where the variables lie.
        groups: the optimizers that train something here, with what they train.
        trainable, tables, whole, state, variables: see `PartSpec`.
        loss_scale: by which the worker multiplies the loss, and divides the gradients again.
        on_device: as the function `on_device`, on the device of this ps.
    """

    pull_layout: PullLayout
    exact_layout: PullLayout
    stored: Sequence[Storage]
    _stored_layout: PullLayout
    pull_exactly: Callable[[], WireTensors]

    def __init__(self, spec: PartSpec) -> None:
        self.device, self.earlier_updates = spec.device, spec.earlier_updates
        self.on_device = functools.partial(on_device, spec.device)
        self.trainable, self.tables, self.whole = spec.trainable, spec.tables, spec.whole
        self.state, self.variables = spec.state, spec.variables
        self._exact_rows = RowsLayout(spec.tables)
        with tf.device(spec.device):
            self.optimizer = spec.make_optimizer()
            self.groups = [group for group in groups_of(self.optimizer, spec.trainable) if group[1]]
            # Only a worker sees the loss.
            self.loss_scale, self.optimizer.loss_scale_factor = self.optimizer.loss_scale_factor, None
            self.update_number = UpdateNumber()
            count_updates_in(self.optimizer, self.update_number)
            self.optimizer.build(spec.trainable)
            have_kernels = [make_atomic(inner) for inner, _ in self.groups]
            self._has_kernel = all(have_kernels)
            self.optimizer_of = {id(variable): inner for inner, trained in self.groups for variable in trained}
        if spec.tables:
            self._read_rows = self.on_device(self._pack_rows, *self._exact_rows.request_types)

    @abc.abstractmethod
    def _applied(self) -> PackedCount:
        """In a graph of the ps: the updates applied so far."""

    def _reported(self) -> list[tf.Tensor]:
        """In a graph of the ps: with mode=sync_replicas the fields `made_by` and `open` of `Pulled`."""
        return []

    def pulled(self, *request: tf.Tensor) -> WireTensors:
        """In a graph of the ps: all variables and the updates applied so far; of tables the rows of the request."""
        return self._stored_layout.pack(*self._read_values(*request))

    def _read_values(self, *request: tf.Tensor) -> tuple[Any, ...]:
        """The arguments of `PullLayout.pack`."""
        applied = self._applied()
        with tf.control_dependencies([applied.bits]):  # first: the values hold at least what has been counted
            return [storage.read() for storage in self.stored], applied, self.rows_of(*request), *self._reported()

    def rows_exactly(self, request: Request) -> list[tf.Tensor]:
        """On a worker: the rows of each table that it asks for, in their own type."""
        return self._exact_rows.unpack(self._read_rows(*request), request) if request else []

    def _pack_rows(self, *request: tf.Tensor) -> list[tf.Tensor]:
        return self._exact_rows.pack(self.rows_of(*request))

    def rows_of(self, *request: tf.Tensor) -> list[tf.Tensor]:
        """In a graph of the ps: the rows of each table that a worker asks for; none without a request."""
        pairs = zip(self.tables, self._exact_rows.ids(*request), strict=False)
        return [table.value.sparse_read(ids) for table, ids in pairs]


class ParameterServer(ModelPart):
    """Variables, optimizer and counters of one ps; it can be pulled from and pushed to after `trace_functions`.

    Attributes:
        pull: ``pull(*request)``: all variables and the updates applied so far, in the layout `pull_layout`.
        push: ``push(pushed, indices, limit)``: applies one update, or refuses it; see `_admit`.
        num_sums: how many of the sums of a step it counts.
        stop_at: every update beyond so many is refused, also that of a call with a higher limit.
    """

    pull: Callable[..., WireTensors]

    def __init__(self, spec: PartSpec, algorithm: Algorithm) -> None:
        super().__init__(spec)
        self._algorithm, self._make_optimizer, self._narrow = algorithm, spec.make_optimizer, spec.narrow
        self.pull_layout = PullLayout(self.variables, spec.tables, narrow=spec.narrow)
        self.exact_layout = PullLayout(self.variables)
        for inner, _ in self.groups:
            inner.global_clipnorm = None  # the worker clips, which alone sees all gradients
        with tf.device(spec.device):
            self.numbered = tf.Variable(0, dtype=tf.int64, trainable=False, name="numbered")
            self.stop_at = tf.Variable(NEVER, dtype=tf.int64, trainable=False, name="stop_at")
            self.counters = Counters(spec.num_workers, spec.num_metrics)
            self.num_sums = self.counters.added - len(ONES)
            # Of the updates of rows that of plain SGD alone is one operation.
            rows_alone = any(not is_one_operation(self.optimizer_of[id(table)]) for table in spec.tables)
            runs_alone = rows_alone or algorithm.runs_alone
            self._lock = None if self._has_kernel and not runs_alone else tf.CriticalSection()
            for inner, _ in self.groups:
                algorithm.prepare(inner)
        self.worker_totals = self.on_device(self.counters.of_worker, tf.TensorSpec([], tf.int64))
        self.counts = self.on_device(self._counts)

    def push_layout(self, decays: dict[int, float]) -> PushLayout:
        """The layout of a push; `decays`: see `trace_functions`."""
        pulled = self.whole if self._algorithm.needs_pulled_values else []
        changing = [v for v in self.state if id(v) in decays]
        return PushLayout([*self.whole, *changing], self.counters.added, pulled, self.tables, self._narrow)

    def trace_functions(self, decays: dict[int, float]) -> None:
        """Decides where the variables lie, and makes `pull`, `pull_exactly` and `push`.

        Args:
            decays: see `recurrence`, by id of the variable; what is not there stays as it is.
        """
        with tf.device(self.device):
            self.stored = allocate_storage(self.variables, self._kinds(decays))
        trained = {id(variable) for variable in self.trainable}
        self._trained = [storage for storage in self.stored if id(storage.members[0]) in trained]
        self._updates = list(self._updates_of(self._trained))
        changing = [(storage, decays[first]) for storage in self.stored if (first := id(storage.members[0])) in decays]
        self._state_updates = [(storage, state_update(storage.variable.value, decay)) for storage, decay in changing]
        pulled = self._trained if self._algorithm.needs_pulled_values else []
        changed, added = [*self._trained, *(storage for storage, _ in changing)], self.counters.added
        self._push_layout = PushLayout(changed, added, pulled, self.tables, self._narrow)
        self._signature = self._push_layout.specs, tf.TensorSpec([added, 1], tf.int64), tf.TensorSpec([], tf.int64)
        self.push = self.on_device(self._push, *self._signature)
        self._stored_layout = PullLayout(self.stored, self.tables, narrow=self._narrow)
        self.pull = self.on_device(self.pulled, *self.pull_layout.rows.request_types)
        is_other = self._narrow or self.tables
        self.pull_exactly = self.on_device(self._pull_exactly) if is_other else self.pull

    def _kinds(self, decays: dict[int, float]) -> Kinds:
        """The variables that may lie in vectors, and which of them are updated alike."""
        kinds: dict[int, Hashable] = {id(v): ("state", decays[id(v)]) for v in self.state if id(v) in decays}
        for number, (inner, trained) in enumerate(self.groups):
            # A norm is that of one variable, and a decay may leave some of them out.
            is_by_element = not inner.clipnorm and not undecayed(inner, trained)
            if self._lock is None and is_by_element:
                kinds |= {id(v): ("trained", number) for v in trained if not v.overwrite_with_gradient}
        return kinds

    def _updates_of(self, trained: list[Storage]) -> Iterator[tuple[keras.Optimizer, list[Storage]]]:
        """Each optimizer with what it updates: vectors have one of their own, of whose slots those of the optimizer of
        their members are views."""
        for optimizer, variables in self.groups:
            members = set(map(id, variables))
            stored = [storage for storage in trained if id(storage.members[0]) in members]
            vectors = [storage for storage in stored if isinstance(storage, PackedStorage)]
            if alone := [storage for storage in stored if storage not in vectors]:
                yield optimizer, alone
            if vectors:
                yield self._optimizer_of(vectors, optimizer), [*vectors]

    def _optimizer_of(self, vectors: list[PackedStorage], of_members: keras.Optimizer) -> keras.Optimizer:
        place = inner_optimizers(self.optimizer).index(of_members)
        with tf.device(self.device):
            own = inner_optimizers(self._make_optimizer())[place]
            for setting in ("clipvalue", "clipnorm", "global_clipnorm", "loss_scale_factor"):
                setattr(own, setting, getattr(of_members, setting))
            count_updates_in(own, self.update_number)
            own.build([vector.variable for vector in vectors])
            make_atomic(own)
        follow_learning_rate(own, of_members)
        adopt_slots(vectors, own, of_members)
        return own

    @functools.cached_property
    def exchange(self) -> Callable[..., WireTensors]:
        """``exchange(pushed, indices, limit)``: a push and the next step's pull, in one call.

        What a call costs is much of a small model's step. Traced at its first use, since calls of one step, those of
        deep models, never need it.
        """
        with tf.init_scope():
            return self.on_device(self._exchange, *self._signature)

    def _pull_exactly(self) -> WireTensors:
        """All variables in their own types."""
        return PullLayout(self.stored).pack(*self._read_values())

    def _applied(self) -> PackedCount:
        return PackedCount.of(self.counters.applied())

    def _push(self, pushed: WireTensors, indices: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
        """A push as `_admit` has it; returns what is counted of the worker then."""
        with tf.control_dependencies([self._admit(pushed, indices, limit)]):
            return self.counters.after(indices)

    def _exchange(self, pushed: WireTensors, indices: tf.Tensor, limit: tf.Tensor) -> WireTensors:
        self._admit(pushed, indices, limit)
        return self.pulled(*self._push_layout.next_request(pushed))

    def _admit(self, pushed: WireTensors, indices: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
        """Numbers an update, and applies it if its number is below `limit` and `stop_at`; returns whether it has.

        ResourceCountUpTo hands every update a number of its own in one atomic operation, so any number of workers may
        push at once, and calls that are repeated after a worker's death cannot carry the count beyond the limit. The
        update is counted in another atomic operation, `Counters.add`, when it is applied. The first number is 0: each
        is the count of those before it.

        With a limit of 100, and 98 updates numbered and applied, an update

            that was pulled at 97 gets the number 98: applied, staleness 1, and 99 are applied;
            that was pulled at 98 gets the number 99: applied, staleness 1, and 100 are applied;
            that was pulled at 98, too, gets the number 100: refused, with the step of its worker not counted;
            of a batch that does not exist, with the limit `NO_UPDATE`, gets 101, and gives that back.

        So 101 are numbered in the end, until `number_on_from_applied` sets that to the 100 that are applied.

        Args:
            pushed: of `push_layout`.
            indices: where it is counted.
        """
        number = tf.raw_ops.ResourceCountUpTo(resource=self.numbered.handle, limit=NEVER, T=tf.int64)

        def apply() -> tf.Tensor:
            if self._lock is None:
                return self._apply(pushed, indices, number)
            # Under the lock, one push at a time: no other update may be half done meanwhile.
            return self._lock.execute(lambda: self._apply(pushed, indices, number))

        def refuse() -> tf.Tensor:
            # What is no update gives its number back. In the meantime the count is too high, which refuses an update
            # too many rather than admits one. A branch before the number would cost a tenth of a small model's step.
            returned = self.numbered.assign_sub(tf.cast(limit <= NO_UPDATE, tf.int64), read_value=False)
            with tf.control_dependencies([returned]):
                return tf.constant(False)

        return tf.cond(number < tf.minimum(limit, self.stop_at.read_value()), apply, refuse)

    def _apply(self, pushed: WireTensors, indices: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        changes, pulled, pulled_at, added, rows = self._push_layout.unpack(pushed)
        staleness = number - pulled_at
        gradients, terms = changes[: len(self._trained)], changes[len(self._trained) :]
        self.update_number.set_current(number + self.earlier_updates)
        with operations_made() as made:
            gradients = self._algorithm.gradients(gradients, pulled, [storage.variable for storage in self._trained])
            gradient_of = dict(zip(self._trained, gradients, strict=True))
            with self._algorithm.update(staleness):
                for optimizer, storages in self._updates:
                    optimizer.apply(
                        [storage.pad_update(gradient_of[storage]) for storage in storages],
                        [storage.variable for storage in storages],
                    )
                for table, (ids, gradient) in zip(self.tables, rows, strict=True):
                    apply_rows(self.optimizer_of[id(table)], gradient, table, ids)
            for (storage, update), term in zip(self._state_updates, terms, strict=True):
                update(storage.pad_update(term))
        with tf.control_dependencies(made):  # counted when it has been done
            self.counters.add(indices, staleness, added)
            return tf.constant(True)  # the lock, if there is one, is held until what is returned is known

    def _counts(self) -> tf.Tensor:
        """Everything that the coordinator watches, float64: the updates numbered, and the heads of the counters."""
        numbered = tf.cast(self.numbered.read_value(), tf.float64)
        return tf.concat([[numbered], self.counters.heads()], 0)

    def restore(self, counts: Counts) -> None:
        """Goes on counting from there; to be called before any push."""
        self.numbered.assign(counts.applied)
        self.counters.restore(counts)

    def number_on_from_applied(self) -> None:
        """Gives the next update the number after those that are applied; to be called while nobody pushes.

        Higher numbers were refused, or lost with their workers.
        """
        self.numbered.assign(self.counters.now().applied)

    def refuse_all(self) -> int:
        """Refuses every update from now on, until `number_on_from_applied`; returns how many were numbered."""
        return int(self.numbered.assign_add(REFUSING)) - REFUSING


class UpdateNumber(keras.Variable):
    """An optimizer's iteration counter that reads as the number of the update being applied.

    A Keras counter is read, added to and assigned, which loses counts when workers push at once;
    Adam's bias correction and learning rate schedules would follow the wrong number.
    """

    def __init__(self) -> None:
        super().__init__(0, dtype="int64", trainable=False, name="iteration", aggregation="only_first_replica")
        self._current: list[tf.Tensor] = []

    def set_current(self, number: tf.Tensor) -> None:
        self._current[:] = [number]

    @property
    def value(self) -> Any:
        return self._current[0] if self._current else super().value

    def assign_add(self, value: Any) -> None:
        """Nothing: the ps counts."""


@contextlib.contextmanager
def operations_made() -> Iterator[list[tf.Operation]]:
    """A list that has the operations which the block has added to the graph, once the block is over."""
    made: list[tf.Operation] = []
    graph = tf.compat.v1.get_default_graph()
    earlier = len(graph.get_operations())
    yield made
    made += graph.get_operations()[earlier:]


def on_device(device: str, function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    """Traces a function whose call is one node, placed on the device with all that it does."""
    with tf.device(device):
        concrete = as_one_node(function).get_concrete_function(*signature)

    def call(*args: Any) -> Any:
        with tf.device(device):  # of the node: on the worker it would call back for each operation
            return concrete(*args)

    return call
