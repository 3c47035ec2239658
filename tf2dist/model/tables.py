"""Large tables of `keras.layers.Embedding`: lookups of the rows that a step needs, and updates of these rows.

A step needs only the rows that its batch looks up, and in it such a table has no value as a whole. The ids that the
batch looks up follow from the batch alone, by a graph of their own. With them the rows are fetched from wherever the
table lies, and the calls of the layers take their rows from these. So the gradient of a table is that of the fetched
rows.

An optimizer of Keras then updates some rows of a variable; what that takes does not grow with the variable.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf2dist.data.arrays import Layout
from tf2dist.errors import ConfigError
from tf2dist.model.packing import is_large
from tf2dist.model.recurrence import origins_of, reached_from
from tf2dist.model.scopes import CallScope, current_scope
from tf2dist.model.shards import by_id
from tf2dist.tf_internals.keras import clip_gradient, layers_of, place_of, slots_of, table_of, undecayed
from tf2dist.tf_internals.variables import AtomicRows, Rows, rows_in_place_of

MAX_ROWS = 2**31 - 1  # of a table: ids travel as int32
# Operations of `tf.random` with a state. Those of Keras's layers draw by seeds, which are variables.
RANDOM = re.compile("Random|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|Rng|Stateful[RSTU]")


class Lookups(NamedTuple):
    """The look-ups of a batch, one tensor for each table.

    Attributes:
        ids: of the rows, int32 [n], each once, in the order in which they are first looked up.
        positions: where in `ids` each look-up finds its row, int32 [lookups], in the order of the calls.
    """

    ids: list[tf.Tensor]
    positions: list[tf.Tensor]


Read = Callable[[keras.Variable, tf.Tensor], tf.Tensor]  # of a table and int32 ids of any shape, the rows


def tables_of(model: keras.Model) -> dict[int, list[keras.layers.Embedding]]:
    """The layers of each large table of a model, by the id of its variable, that only look its rows up."""
    found: dict[int, list[keras.layers.Embedding]] = {}
    for layer in layers_of(model):
        table = table_of(layer)
        if table is None or table.constraint is not None or table.dtype != "float32":  # the type in which rows travel
            continue
        # With 256 look-ups in a batch rows were faster from 2,000 rows of 16 floats on; with 6,400 not yet at 4,000.
        if is_large(table) and table.shape[0] <= MAX_ROWS:
            found.setdefault(id(table), []).append(layer)
    return found


@contextlib.contextmanager
def reading(layers: Sequence[keras.layers.Embedding], read: Read) -> Iterator[None]:
    """In the block these layers take their rows from `read`, but for those in loops and branches."""
    graph = tf.compat.v1.get_default_graph()

    def calling(layer: keras.layers.Embedding, table: keras.Variable) -> Callable[[Any], Any]:

        def call(inputs: Any) -> Any:
            # Keras looks up in ragged and sparse ones in other ways.
            if not isinstance(inputs, tf.Tensor) or _is_within_loop(inputs, graph) or _is_differentiated():
                return type(layer).call(layer, inputs)
            ids = tf.cast(inputs, inputs.dtype if inputs.dtype in (tf.int32, tf.int64) else tf.int32)
            ids = tf.where(ids < 0, ids + table.shape[0], ids)  # as in Keras, from the end
            return keras.ops.cast(read(table, ids), layer.compute_dtype)

        return call

    for layer in layers:
        layer.call = calling(layer, table_of(layer))  # Python finds it before the method of the class
    try:
        yield
    finally:
        for layer in layers:
            del layer.call


def _is_within_loop(tensor: tf.Tensor, graph: tf.Graph) -> bool:
    """Whether a tensor is known only in the graph of a loop or a branch, and not in this graph."""
    # The body of a `tf.vectorized_map` stands in the same graph, with a number that it makes a vector of later on.
    return tf.compat.v1.get_default_graph() is not graph or any(
        operation.type == "PlaceholderWithDefault" for operation in origins_of(tensor)
    )


def _is_differentiated() -> bool:
    """Whether a function with a custom gradient is called, which gives gradients to variables and not to rows."""
    scope = current_scope()
    return scope is not None and scope.is_recording_reads


def checked(ids: tf.Tensor, rows: int) -> tf.Tensor:
    """Ids of rows, of which `reading` has made the negative ones count from the end, if a table has them all.

    Otherwise it is an error of the graph, in the layer. Where the rows lie an id is another number.
    """
    wrong = tf.boolean_mask(ids, (ids < 0) | (ids >= rows))[:1]
    wrong = tf.where(wrong < 0, wrong - rows, wrong)
    text = tf.strings.join(["id ", tf.strings.as_string(wrong), f" is not in [0, {rows})"])
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [text])]):
        return tf.identity(ids)


class _StopTracing(BaseException):
    """Ends a call of the model; no `Exception`, which Keras would wrap in others."""


class _TakesGradients(BaseException):
    """Ends a call of the model that takes gradients, for which a table would have to be there."""


class LookupScope(CallScope):
    """The scope of a call whose look-ups are to be found."""

    def begin(self, tape: tf.GradientTape) -> None:
        raise _TakesGradients


Call = Callable[[list[tf.Tensor], list[tf.Tensor]], Any]  # of the model, with values for its variables and a batch


class LookupTrace:
    """The look-ups of a call of the model in tables, found by tracing it.

    Attributes:
        read_whole: the ids of those tables that the call does not only look up, or whose rows depend on other values
            of the model.
        num_calls: how often the call looks up in each table, by id.
        num_lookups: of a batch in each table, by id; None if that is not known before the batch.

    Args:
        call: calls the model.
        variables: those for which it is given values.
        layers: those of the tables, see `tables_of`.
        signature: the types of the leaves.
        num_calls: after so many the call may end; None for all.
    """

    def __init__(
        self,
        call: Call,
        variables: Sequence[keras.Variable],
        layers: dict[int, list[keras.layers.Embedding]],
        signature: list[tf.TensorSpec],
        num_calls: int | None = None,
    ) -> None:
        self.read_whole: set[int] = set()
        self.num_calls: dict[int, int] = {}
        self.num_lookups: dict[int, int | None] = {}
        self._call, self._variables, self._layers, self._num_calls = call, variables, layers, num_calls
        self._trace = tf.function(self._looked_up, autograph=False).get_concrete_function(*signature)

    def __call__(self, leaves: list[tf.Tensor]) -> Lookups:
        """In a graph on a CPU: the look-ups of a batch."""
        unique = [tf.unique(ids) for ids in self._trace(*leaves)]
        return Lookups([ids for ids, _ in unique], [positions for _, positions in unique])

    def _looked_up(self, *leaves: tf.Tensor) -> list[tf.Tensor]:
        ids: dict[int, list[tf.Tensor]] = {table: [] for table in self._layers}
        # Nothing that is computed from these is ever run.
        values = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in self._variables]
        unknown = list(values)

        def read(table: keras.Variable, wanted: tf.Tensor) -> tf.Tensor:
            ids[id(table)].append(tf.reshape(tf.cast(checked(wanted, table.shape[0]), tf.int32), [-1]))
            if sum(map(len, ids.values())) == self._num_calls:
                raise _StopTracing
            unknown.append(tf.compat.v1.placeholder(table.dtype, [*wanted.shape, table.shape[1]]))
            return unknown[-1]

        takes_gradients = False
        with reading([layer for shared in self._layers.values() for layer in shared], read):
            try:
                self._call(values, list(leaves))
            except _StopTracing:
                pass
            except _TakesGradients:
                takes_gradients = True
        dependent = reached_from(*unknown)
        for variable, value in zip(self._variables, values, strict=True):
            own = ids.get(id(variable), [])
            is_read = takes_gradients or not own or value.consumers() or any(i.name in dependent for i in own)
            # The step would draw other ids than those whose rows it gets.
            is_read = is_read or any(RANDOM.match(operation.type) for i in own for operation in origins_of(i))
            if id(variable) in ids and is_read:
                self.read_whole.add(id(variable))
        self.num_calls = {table: len(own) for table, own in ids.items()}
        found = {table: tf.concat(own, 0) for table, own in ids.items() if own}
        self.num_lookups = {table: own.shape[0] for table, own in found.items()}
        return list(found.values())


class TableLookups:
    """The look-ups of the calls of a model in its large tables.

    Attributes:
        tables: those trainable variables of which a step takes rows in the place of their values.

    Args:
        layout: of the training data.
        variables: returns all variables of the model and its metrics.
        call: ``call(values, leaves, training, layout)``: calls the model, with values for these; None for one whose
            tables travel as a whole.
    """

    def __init__(
        self,
        model: keras.Model,
        layout: Layout,
        variables: Callable[[], list[keras.Variable]] = list,
        call: Callable[[list[tf.Tensor], list[tf.Tensor], bool, Layout], None] | None = None,
    ) -> None:
        self.tables: list[keras.Variable] = []
        self._model, self._layout, self._variables, self._call = model, layout, variables, call
        self._layers: dict[int, list[keras.layers.Embedding]] = {}  # of `tables`, in their order
        self._num_calls: dict[bool, dict[int, int]] = {}  # by whether the call is in training
        self._traces: dict[tuple[bool, int], LookupTrace] = {}

    def find(self, trainable: list[keras.Variable]) -> list[keras.Variable]:
        """The trainable variables that may become `tables`: all calls only look rows up in them."""
        trained = set(map(id, trainable)) if self._call else set()
        layers = {table: layers for table, layers in tables_of(self._model).items() if table in trained}
        for training in (True, False) if layers else ():
            trace = self._trace(layers, training, self._layout)
            layers = {table: layers for table, layers in layers.items() if table not in trace.read_whole}
            self._num_calls[training] = trace.num_calls
        return [variable for variable in trainable if id(variable) in layers]

    def choose(self, tables: list[keras.Variable]) -> None:
        """Makes some of those that `find` returns the `tables`."""
        self.tables, layers = tables, tables_of(self._model)
        self._layers = {id(table): layers[id(table)] for table in tables}

    def is_table(self, variable: keras.Variable) -> bool:
        return id(variable) in self._layers

    def look_up(self, leaves: list[tf.Tensor], training: bool = True, layout: Layout | None = None) -> Lookups:
        """In a graph on a CPU: which rows of `tables` a batch looks up.

        Args:
            layout: of the batch; None for that of the training data.
        """
        if not self.tables:
            return Lookups([], [])
        layout = layout or self._layout
        key = training, id(layout)
        if key not in self._traces:
            with tf.init_scope():
                self._traces[key] = self._trace(self._layers, training, layout)
        return self._traces[key](leaves)

    def num_lookups(self, batch_size: int) -> list[int]:
        """How many rows of each of `tables` a training batch looks up."""
        if not self.tables:
            return []
        numbers = self._trace(self._layers, True, self._layout, batch_size).num_lookups
        known = [number for table in self.tables if (number := numbers[id(table)]) is not None]
        if len(known) < len(self.tables):
            path = next(table.path for table in self.tables if numbers[id(table)] is None)
            raise ConfigError(f"model: how many rows of {path} a batch looks up depends on its values; use mode=async")
        return known

    def reading(
        self, rows: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """The block in which the layers take what they look up from what was fetched for a batch.

        Args:
            rows: float [n, columns] of each of `tables`, those of `Lookups.ids`.
            positions: see `Lookups`.
        """
        if not self.tables:
            return contextlib.nullcontext()
        rows_of, positions_of = by_id(self.tables, rows), by_id(self.tables, positions)

        def read(table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
            left = positions_of[id(table)]
            own, positions_of[id(table)] = left[: tf.size(ids)], left[tf.size(ids) :]
            found = tf.gather(rows_of[id(table)], tf.reshape(own, tf.shape(ids)))
            return tf.ensure_shape(found, [*ids.shape, table.shape[1]])

        return reading([layer for layers in self._layers.values() for layer in layers], read)

    def _trace(
        self,
        layers: dict[int, list[keras.layers.Embedding]],
        training: bool,
        layout: Layout,
        batch_size: int | None = None,
    ) -> LookupTrace:
        def call(values: list[tf.Tensor], leaves: list[tf.Tensor]) -> None:
            assert self._call
            self._call(values, leaves, training, layout)

        calls = self._num_calls.get(training)
        num_calls = sum(calls[table] for table in layers) if calls else None
        return LookupTrace(call, self._variables(), layers, layout.batched(batch_size), num_calls)


def sum_by_row(ids: tf.Tensor, gradients: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The ids of rows, each once, and the sums of the gradients of each row."""
    unique, places = tf.unique(ids)
    return unique, tf.math.unsorted_segment_sum(gradients, places, tf.size(unique))


# Each has slots of the form of the variable, and its update of an element depends on nothing else but that element and
# the number of the update. Not so Nadam, which multiplies its momenta of all steps into one number, and
# ScheduleFreeAdamW, which weighs an element by how often it was updated.
BY_ROW = (
    *(keras.optimizers.SGD, keras.optimizers.Adagrad, keras.optimizers.RMSprop, keras.optimizers.Adam),
    *(keras.optimizers.AdamW, keras.optimizers.Adamax, keras.optimizers.Ftrl, keras.optimizers.Adadelta),
    keras.optimizers.Lion,
)


def can_be_lazy(optimizer: keras.Optimizer) -> bool:
    """Whether an optimizer can update rows alone, though Keras' own update may move the other rows as well."""
    # The exact type: a subclass may have another update.
    return type(optimizer) in BY_ROW and not optimizer.use_ema and not optimizer.gradient_accumulation_steps


def is_exact_by_row(optimizer: keras.Optimizer) -> bool:
    """Whether the update of Keras changes nothing in a row whose gradient is zero."""
    if not can_be_lazy(optimizer) or optimizer.weight_decay:
        return False
    kind = type(optimizer)
    return kind is keras.optimizers.Adagrad or (kind is keras.optimizers.SGD and not optimizer.momentum)


def is_one_operation(optimizer: keras.Optimizer) -> bool:
    """Whether `apply_rows` is one atomic operation, so that several may run at the same time."""
    return is_exact_by_row(optimizer) and type(optimizer) is keras.optimizers.SGD


def apply_rows(
    optimizer: keras.Optimizer,
    gradient: tf.Tensor,
    variable: keras.Variable,
    ids: tf.Tensor,
    runs_alone: bool = False,
) -> None:
    """Does for some rows of a variable what `Optimizer.apply` does for it all, but does not count the update.

    Args:
        optimizer: one that `can_be_lazy`, built with the variable.
        gradient: float [U, ...], of these rows.
        variable: it has a `tf.Variable` of its own.
        ids: integers [U], each of them once.
        runs_alone: whether no two updates of the variable run at the same time, which takes less time; the caller also
            ensures that with an optimizer that is not one operation.
    """
    kind = Rows if runs_alone or not is_one_operation(optimizer) else AtomicRows
    gradient = clip_gradient(optimizer, gradient)  # other rows add nothing to a norm
    decays = optimizer.weight_decay is not None and not undecayed(optimizer, [variable])
    place = place_of(optimizer, variable.value)
    with rows_in_place_of([variable, *(slots[place] for slots in slots_of(optimizer).values())], ids, kind):
        rows: Any = variable.value
        if decays:
            rate, decay = (tf.cast(value, rows.dtype) for value in (optimizer.learning_rate, optimizer.weight_decay))
            rows.assign_sub(rows * decay * rate)
        # That of the class: in the object a kernel for whole variables may stand in its place; see `make_atomic`.
        type(optimizer).update_step(optimizer, gradient, rows, optimizer.learning_rate)
