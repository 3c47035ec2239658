"""Matches the variables of a Keras model with the names that another model of the same kind has for them."""

import re
from collections.abc import Collection

import keras
import numpy as np

from tf2dist.checkpoint.state import Named, assign, differences, named_variables
from tf2dist.errors import CheckpointError
from tf2dist.linux import free_memory
from tf2dist.process.tables_in_files import LARGE_BYTES, large_table_of, put
from tf2dist.tf_internals import counters_of, layers_of, seeds_of

MODEL, OPTIMIZER = "model/", "optimizer/"


def saved_variables(model: keras.Model) -> Named:
    """The variables of a model that a checkpoint holds: all but the seeds of random layers."""
    seeds = set(map(id, seeds_of(model)))
    others = [variable for variable in model.non_trainable_variables if id(variable) not in seeds]
    return named_variables(model, [*model.trainable_variables, *others], [])


def fill(model: keras.Model, names: list[str], arrays: dict[str, np.ndarray], step: int) -> None:
    """Puts the arrays of a run into a model and its built optimizer, and sets the optimizer's count of updates.

    Keras numbers unnamed layers separately in each process, and may put the name of the model in front:
    "sequential_1/dense_3/kernel" there can be "dense/kernel" here. So variables are matched by their order.

    Args:
        names: of the model's variables in the run, in the order of `saved_variables`.
        arrays: by their names in the run. Those of the optimizer are left out if this one has no such variable.

    Raises:
        CheckpointError: the arrays are those of another model.
    """
    here = saved_variables(model)
    run_shapes = {name: array.shape for name, array in arrays.items() if name.startswith(MODEL)}
    if len(here) != len(names):
        raise CheckpointError(f"the model is another one: it has {len(names)} variables there and {len(here)} here")
    # Equal numbers are not enough: shapes tell a model whose layers have other sizes, or stand in another order.
    shapes = {name: tuple(copies[0].shape) for name, copies in zip(names, here.values(), strict=True)}
    if problems := differences(run_shapes, shapes):
        raise CheckpointError(f"the model is another one: {'; '.join(problems)}")
    variables = [copies[0] for copies in here.values()]
    renamed = dict(zip(here, names, strict=True))
    by_name = named_variables(model, variables, [model.optimizer])
    by_name = {_renamed(name, renamed): copies for name, copies in by_name.items()}
    arrays = {name: array for name, array in arrays.items() if name in by_name}
    assign(by_name, {name: array for name, array in arrays.items() if not put(by_name[name][0], array)})
    # A LossScaleOptimizer leaves out updates; how many it has applied is among the arrays.
    has_count = any(name.startswith(f"{OPTIMIZER}loss_scale/") for name in arrays)
    for counter in counters_of(model.optimizer) if not has_count else []:
        counter.assign(step)


def names_in_files(model: keras.Model, arrays: dict[str, np.ndarray]) -> set[str]:
    """The names of the arrays of a run that lie in files where `Tables` are in use; `model`: that of the run."""
    tables = {id(table) for table in map(large_table_of, layers_of(model)) if table is not None}
    owners = {name.removeprefix(MODEL) for name, (table,) in saved_variables(model).items() if id(table) in tables}
    return {
        name
        for name in arrays
        if name.removeprefix(MODEL) in owners or name.removeprefix(OPTIMIZER).rpartition("/")[0] in owners
    }


def may_be_in_file(name: str, array: np.ndarray) -> bool:
    """Whether an array of a run lies in a file where `Tables` are in use, as far as its name tells."""
    return bool(re.search("/embeddings(/[^/]+)?$", name)) and array.nbytes >= LARGE_BYTES


def lack_of_memory(sizes: Collection[int]) -> str:
    """What a model needs in memory, if this machine has less; otherwise empty.

    Args:
        sizes: the bytes of its arrays and of those of its optimizer.
    """
    # While the largest is assigned or written, there are two more copies of it.
    needed, free = sum(sizes) + 2 * max(sizes, default=0), free_memory()
    if needed <= free:
        return ""
    return f"needs {needed / 1e9:.1f} GB of memory, and this machine has {free / 1e9:.1f} GB free"


def _renamed(name: str, renamed: dict[str, str]) -> str:
    """The name of a variable in the run, where those of the optimizer are named after those of the model."""
    if name in renamed:
        return renamed[name]
    # A variable of the optimizer as a whole belongs to none of the model's; its name is the same everywhere.
    owner, _, attribute = name.removeprefix(OPTIMIZER).rpartition("/")
    run_name = renamed.get(f"{MODEL}{owner}")
    return f"{OPTIMIZER}{run_name.removeprefix(MODEL)}/{attribute}" if run_name else name


def copy_names(model: keras.Model, named: keras.Model) -> None:
    """Gives a model and its layers the names of another model that was built in the same way.

    Raises:
        ValueError: the models have different numbers of layers.
    """
    for layer, named_layer in zip(layers_of(model), layers_of(named), strict=True):
        layer.name = named_layer.name
