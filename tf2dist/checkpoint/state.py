"""The state of a run by name: which variables there are, and how a snapshot is restored into them.

The names depend neither on the mode nor on the number of workers or ps: "model/hidden1/kernel",
"optimizer/hidden1/kernel/momentums".
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace

import keras
import numpy as np

from tf2dist.checkpoint.snapshot import (
    EARLIER_ARRAY,
    VARIABLES,
    InputFacts,
    ShardingFacts,
    Snapshot,
    Weights,
    in_file,
    is_finite,
)
from tf2dist.config.schema import KerasConfig, RunConfig
from tf2dist.data.passes import UNKNOWN_STEPS, InputPosition, NumberedSteps, Sharding
from tf2dist.errors import CheckpointError, ConfigError, NotFiniteError
from tf2dist.model.features import finalizes
from tf2dist.model.shards import Part, assign_piece, joined, parts_of, read_piece, row_pieces
from tf2dist.registry import DATA_OF_FIT
from tf2dist.tf_internals.keras import (
    counter_of,
    counters_of,
    inner_optimizers,
    name_of,
    slots_of,
    state_of,
    trained_variables,
)

Named = dict[str, list[keras.Variable]]  # several for what each ps has a copy of, such as Nadam's product of momenta
LOSS_SCALE = "optimizer/loss_scale/"  # how the names of the variables of a LossScaleOptimizer begin
AVERAGE = "/model_variables_moving_average"  # how the names of those of `use_ema` end
MAX_NAMES = 6  # of variables in a message
NUMBER = re.compile(r"_(\d+)$")  # of a layer, as Keras counts those of one process


def named_variables(model: keras.Model, variables: list[keras.Variable], optimizers: list[keras.Optimizer]) -> Named:
    """The variables that a checkpoint holds.

    Args:
        variables: those of the model that belong to its state.
        optimizers: one, or one for each ps.
    """
    named: Named = {}
    for variable in variables:
        # Without the name of the model, which Keras numbers by how many a process has made before.
        name = f"model/{variable.path.removeprefix(f'{model.name}/')}"
        if name in named:
            raise ConfigError(f"model: two variables are called {variable.path}; give their layers different names")
        named[name] = [variable]
    names = {
        id(owner): name.removeprefix("model/")
        for name, (variable,) in named.items()
        for owner in (variable, *parts_of(variable))
    }
    of_parts: dict[str, dict[int, keras.Variable]] = {}  # by the number of the part
    interleaves: dict[str, bool] = {}
    for optimizer in optimizers:
        for name, slot, owner in _slots(optimizer, names):
            if isinstance(owner, Part):
                of_parts.setdefault(f"optimizer/{name}", {})[owner.number] = slot
                interleaves[f"optimizer/{name}"] = owner.value_of_whole.interleaves
            else:
                named.setdefault(f"optimizer/{name}", []).append(slot)
    return named | {
        name: [joined([slots[n] for n in sorted(slots)], interleaves[name])] for name, slots in of_parts.items()
    }


def _slots(
    optimizer: keras.Optimizer, names: dict[int, str]
) -> Iterator[tuple[str, keras.Variable, keras.Variable | None]]:
    """The variables of an optimizer, named after the variable of the model to which each belongs, and that variable.

    A Keras optimizer keeps its slots in lists in the order of the variables that it was built with. Their
    own names may be ambiguous: "a_b/c" and "a/b_c" both give "a_b_c_momentum".
    """
    for place, inner in enumerate(inner_optimizers(optimizer)):
        # Its counter and rate are not saved: the global step gives the one, the configuration the other.
        left = {id(slot): slot for slot in state_of(inner)}
        owners = trained_variables(inner)
        for attribute, slots in slots_of(inner).items():
            for owner, slot in zip(owners, slots, strict=True):
                yield f"{names[id(owner)]}/{attribute.strip('_')}", left.pop(id(slot)), owner
        whole = "" if inner is optimizer else f"{place}/"
        for number, slot in enumerate(left.values()):  # of the optimizer as a whole, such as a product of momenta
            # Nadam gives it no name.
            yield f"{whole}{number}/{name_of(slot)}", slot, None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # It leaves out updates, so the global step does not tell how many there were.
        for variable in (optimizer.dynamic_scale, optimizer.step_counter, *counters_of(optimizer)):
            yield f"{LOSS_SCALE}{name_of(variable)}".removeprefix("optimizer/"), variable, None


def names_by_row(named: Named, tables: Sequence[keras.Variable]) -> set[str]:
    """The names of tables, and of what optimizers hold for each of their rows; see `model.shards.row_pieces`."""
    ids = set(map(id, tables))
    shapes = {name.removeprefix("model/"): tuple(v[0].shape) for name, v in named.items() if id(v[0]) in ids}

    def is_by_row(name: str) -> bool:
        group, _, rest = name.partition("/")
        owner = rest if group == "model" else rest.rpartition("/")[0]
        return owner in shapes and tuple(named[name][0].shape) == shapes[owner]

    return set(filter(is_by_row, named))


def values(
    named: Named,
    by_row: Collection[str] = (),
    folder: str | None = None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """The values of all variables.

    Args:
        by_row: the names of those that are read piece by piece into files, and are mapped; see `names_by_row`.
        folder: for these files, which have no names and end with their arrays; None for that of temporary files.
        progress: called after each piece.
    """
    # Each ps advances its copy once for each step, so the first one stands for all.
    firsts = {name: variables[0] for name, variables in named.items()}
    arrays = savable({name: v.value.numpy() for name, v in firsts.items() if name not in by_row}, infinite_in(named))
    tables = {name: variable for name, variable in firsts.items() if name in by_row}
    return arrays | {name: in_file(_pieces(name, v, progress), tuple(v.shape), folder) for name, v in tables.items()}


def _pieces(name: str, variable: keras.Variable, progress: Callable[[], None]) -> Iterator[np.ndarray]:
    for first, last in row_pieces(variable):
        yield savable({name: read_piece(variable, first, last)})[name]
        progress()


def infinite_in(named: Named) -> set[str]:
    """The names of what may be infinite: state that is not trained, such as a mask or a smallest value so far."""
    return {name for name, (first, *_) in named.items() if name.startswith("model/") and not first.trainable}


def savable(arrays: dict[str, np.ndarray], infinite: Collection[str] = ()) -> dict[str, np.ndarray]:
    """The arrays in types that numpy's files can hold, for checkpoints, callbacks and model.keras.

    Args:
        infinite: the names of arrays of which only NaN shows that a run has diverged.

    Raises:
        NotFiniteError: a variable is not finite, so nothing that leaves the run is.
    """
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":  # bfloat16, which numpy's files cannot hold; float32 holds it exactly
            arrays[name] = array = array.astype(np.float32)
        if not is_finite(array, name in infinite):
            raise NotFiniteError(f"{name} is not finite any more; try a lower learning rate")
    return arrays


def assign(named: Named, arrays: dict[str, np.ndarray], by_row: Collection[str] = ()) -> None:
    """Assigns each array to the variables of its name, those of `by_row` piece by piece."""
    for name, array in arrays.items():
        for variable in named[name]:
            if name in by_row:
                for first, last in row_pieces(variable):
                    assign_piece(variable, first, _as_type_of(variable, array[first:last]))
            else:
                variable.value.assign(_as_type_of(variable, array))


def _as_type_of(variable: keras.Variable, array: np.ndarray) -> np.ndarray:
    # numpy has no bfloat16; TensorFlow converts in that case.
    return array.astype(variable.dtype, copy=False) if variable.dtype != "bfloat16" else array


def differences(shapes: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    """The arrays that a checkpoint lacks, has in excess, or has in another shape, a line for each kind."""
    missing, extra = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    reshaped = [
        f"{name} is {list(shapes[name])} there and {list(wanted[name])} here"
        for name in sorted(shapes.keys() & wanted.keys())
        if shapes[name] != wanted[name]
    ]
    lists = [f"{what} {_some(names)}" for what, names in (("missing:", missing), ("extra:", extra)) if names]
    return [*lists, *([_some(reshaped)] if reshaped else [])]


def way_out_of_numbers(shapes: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> str:
    """The way out if the arrays of a checkpoint have other names by Keras's numbers of layers alone; "" if not so."""
    if _in_order(shapes) != _in_order(wanted):
        return ""
    theirs, mine = ({part for name in names for part in name.split("/")} for names in (shapes, wanted))
    # In a process that has made no other model Keras gives the first layer of each kind no number.
    if any(NUMBER.sub("", part) not in theirs for part in theirs - mine):
        advice = "give the layers the names that they have there"
    else:
        advice = "give fit the function that builds the model, or call keras.utils.clear_session() before you build it"
    return f"only the numbers in the names differ, which Keras counts in each process: {advice}"


def _in_order(shapes: dict[str, tuple[int, ...]]) -> list[tuple[list[str], tuple[int, ...]]]:
    """The names without Keras's numbers and the shapes of arrays, in the order of these numbers."""
    keys = {name: [NUMBER.sub("", part) for part in name.split("/")] for name in shapes}
    numbers = {
        name: [int(number[1]) if (number := NUMBER.search(part)) else 0 for part in name.split("/")] for name in shapes
    }
    return [(keys[name], shapes[name]) for name in sorted(shapes, key=lambda name: (keys[name], numbers[name]))]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def check_keras(before: KerasConfig, settings: KerasConfig, option: str) -> None:
    """Refuses a checkpoint made with other settings of Keras, with which the same weights make another model.

    Args:
        before: the settings in the checkpoint.
        option: the one that names the checkpoint, for the message.
    """
    for name, now in asdict(settings).items():
        then = getattr(before, name)
        if None not in (then, now) and then != now:
            raise CheckpointError(
                f"{option}: was trained with keras.{name}={then}, and it is {now} now; give keras.{name}={then}, or "
                "name another directory"
            )


def check_same(named: Named, snapshot: Snapshot, data: str, settings: KerasConfig) -> None:
    """Refuses the checkpoint of another model, optimizer or data set, or with other settings of Keras."""
    way_out = "name another run_dir" + ("" if data in DATA_OF_FIT else "; init_from takes over weights alone")
    if snapshot.facts.data != data:
        raise CheckpointError(f"run_dir: was trained on {snapshot.facts.data}, and data is {data} now; {way_out}")
    check_keras(snapshot.facts.keras, settings, "run_dir")
    shapes = {name: array.shape for name, array in snapshot.arrays.items()}
    wanted = {name: tuple(variables[0].shape) for name, variables in named.items()}
    # The model first: another model has another optimizer's slots too, and only the cause should be told. Arrays that
    # a mode keeps for itself are in neither group, since the other mode can do without them.
    for group in VARIABLES:
        mine, theirs = (
            {name: shape for name, shape in all_of_them.items() if name.startswith(group)}
            for all_of_them in (wanted, shapes)
        )
        if problems := differences(theirs, mine):
            if data in DATA_OF_FIT:
                way_out = way_out_of_numbers(theirs, mine) or way_out
            raise CheckpointError(
                f"run_dir: its checkpoint at step {snapshot.step} is of another {group.removesuffix('/')}; "
                f"{'; '.join(problems)}; {way_out}"
            )


def chosen(named: Named, source: Weights, layers: str | None) -> dict[str, np.ndarray]:
    """The arrays of the layers whose full name matches the pattern; all arrays for None."""
    arrays = {}
    for name, array in source.arrays.items():
        # A layer may be nested in others; the pattern may name any of them, but not the variable.
        *parents, _ = name.removeprefix("model/").split("/")
        if layers is None or any(re.fullmatch(layers, parent) for parent in parents):
            arrays[name] = array
    wanted = {name: tuple(variables[0].shape) for name, variables in named.items() if name in arrays}
    problems = differences({name: array.shape for name, array in arrays.items()}, wanted)
    if not arrays:
        known = sorted({name.split("/")[-2] for name in source.arrays})
        raise CheckpointError(f"init_layers ({layers}): matches no layer there; it has {', '.join(known)}")
    if problems:
        raise CheckpointError(
            f"init_from: the layers differ; {'; '.join(problems)}; choose those that agree with init_layers"
        )
    return arrays


def restore(named: Named, start: Snapshot | Weights | None, config: RunConfig, by_row: Collection[str] = ()) -> str:
    """Restores a snapshot, or the weights of the chosen layers, into the variables; returns a line for the user.

    Args:
        by_row: see `names_by_row`.
    """
    if start is None:
        return ""
    if isinstance(start, Snapshot):
        check_same(named, start, config.data.name, config.keras)
        # A variable that is not the model's own may be new, or have another shape, since the snapshot was made.
        known = {name: array for name, array in start.arrays.items() if name in named}
        fitting = {name: array for name, array in known.items() if array.shape == tuple(named[name][0].shape)}
        assign(named, fitting, by_row)
        return f"going on at step {start.step}"
    arrays = chosen(named, start, config.init_layers)
    assign(named, arrays, by_row)
    layers = dict.fromkeys(name.removeprefix("model/").rpartition("/")[0] for name in arrays)
    return f"weights of {', '.join(layers)} from {config.init_from}"


def earlier_updates(earlier: keras.Optimizer | None, start: Snapshot | None) -> int:
    """How many updates the optimizer of a compiled model had applied before the run began; 0 for a new one."""
    # The snapshot decides: a script that is started again compiles a new optimizer, which has counted nothing.
    if start:
        return int(start.arrays.get(EARLIER_ARRAY, 0))
    return int(counter_of(earlier).numpy()) if earlier is not None and earlier.built else 0


def take_over(
    named: Named,
    model: keras.Model,
    variables: list[keras.Variable],
    earlier: keras.Optimizer,
    by_row: Collection[str] = (),
) -> None:
    """Gives the optimizers of a run the state of one that has trained the same variables before.

    Args:
        named: the variables of the run.
        variables: those of the model that belong to its state.
        by_row: see `names_by_row`.
    """
    # By name, since in mode async each ps has an optimizer of its own, with a part of the variables.
    of_earlier = named_variables(model, variables, [earlier])
    # The run may leave out variables that get no gradient in it.
    names = [name for name in of_earlier if name.startswith("optimizer/") and name in named]
    state = values({name: of_earlier[name] for name in names})
    assign(named, state, by_row)


def finalize(named: Named, optimizers: list[tuple[keras.Optimizer, list[keras.Variable]]]) -> dict[str, np.ndarray]:
    """Gives the model its final weights, as `Model.fit` does at its end: with `use_ema`, the moving averages.

    Returns:
        The arrays from which a run continues, where they differ from what the model holds now.
    """
    if not any(finalizes(optimizer) for optimizer, _ in optimizers):
        return {}
    # Before they are overwritten: a run that continues from the averages would be another one.
    trained = values({name: variables for name, variables in named.items() if name.startswith("model/")})
    for optimizer, variables in optimizers:
        optimizer.finalize_variable_values(variables)
    return trained


def averages_left_out(names: Collection[str], given: Collection[str]) -> dict[str, str]:
    """The names of moving averages that a run does not have, each with the name of the variable that it is equal to.

    A run gives its optimizers no variable to which no gradient leads. With `use_ema` Keras averages it all the same,
    and the average of a value that does not change is this value.

    Args:
        names: of the variables of a model and its optimizer.
        given: those of the run.
    """
    left_out = (name for name in names if name.endswith(AVERAGE) and name not in given)
    return {name: f"model/{name.removeprefix('optimizer/').removesuffix(AVERAGE)}" for name in left_out}


def input_facts(sharding: Sharding, position: InputPosition | None = None, positions: Sequence[int] = ()) -> InputFacts:
    """The position of the input, for the facts of a snapshot; see `InputFacts`."""
    facts = InputFacts(ShardingFacts(**asdict(sharding)), positions=tuple(positions))
    return replace(facts, position=position.next, unseen=position.unseen) if position else facts


def has_sharding(snapshot: Snapshot, sharding: Sharding) -> bool:
    """Whether the snapshot's run divided the training set in this way."""
    return snapshot.facts.input.sharding == ShardingFacts(**asdict(sharding))


def input_position(snapshot: Snapshot | None, sharding: Sharding) -> InputPosition:
    """Where the input of arrays continues: at the same example, or of other data at the same fraction of a pass."""
    if snapshot is None:
        return InputPosition()
    facts, num_examples = snapshot.facts.input, snapshot.facts.input.sharding.num_examples
    if facts.position is None:
        position = InputPosition(_counted_position(facts))
    else:
        position = InputPosition(facts.position, facts.unseen)
    if num_examples == sharding.num_examples:
        return position
    return InputPosition(round(position.next / num_examples * sharding.num_examples))


def _counted_position(facts: InputFacts) -> int:
    """The position in a checkpoint that has only the steps of each worker, who cut the data among themselves."""
    before, positions = facts.sharding, facts.positions
    sharding = Sharding(before.num_examples, before.batch_size, before.num_shards, 0, before.whole_batch_loss)
    steps = positions[0] if sharding.whole_batch_loss else sum(positions)
    return NumberedSteps(sharding, InputPosition()).position(steps).next


def stream_positions(snapshot: Snapshot | None, sharding: Sharding) -> list[int]:
    """The number of every worker's next batch in its stream.

    With the same division of the data it continues exactly; with another, at the same fraction of the same epoch: with
    another number of workers each of them reads another stream. Of an epoch without a known number of steps the workers
    then leave out as many batches together as were taken.
    """
    if snapshot is None:
        return [0] * sharding.num_shards
    before = snapshot.facts.input
    if sharding.ends_with_data and before.sharding.num_examples < UNKNOWN_STEPS:
        return [0] * sharding.num_shards  # those of before are not counted within the epoch, which begins again
    # A stream is the same however many of its examples make an epoch.
    now = replace(ShardingFacts(**asdict(sharding)), num_examples=before.sharding.num_examples)
    if before.positions and before.sharding == now:
        return list(before.positions)
    if sharding.ends_with_data:
        return [round(sum(before.positions) / sharding.num_shards)] * sharding.num_shards
    passes = snapshot.facts.epochs
    if before.positions:  # batches of a stream may have any size, so the examples seen do not tell
        passes = sum(before.positions) * before.sharding.batch_size / before.sharding.num_examples
    return [round(passes * steps) for steps in sharding.worker_steps()]
