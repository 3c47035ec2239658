"""The finished model, which the leader writes in a form that any Keras program loads without this package.

model.keras    the compiled model at the end of a run: the weights that were evaluated and the optimizer's state
model.json     its description without weights, from the start of a run; those of any checkpoint fit into it

A model that is made in another process has other names of variables, with which those of the run are matched.
"""

import gc
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import flush
from tf2dist.checkpoint.state import LOSS_SCALE, Named, assign, averages_left_out, differences, named_variables
from tf2dist.errors import CheckpointError, reason_of
from tf2dist.files import write_whole
from tf2dist.linux import free_memory
from tf2dist.model import own_step
from tf2dist.model.optimizer_checks import prepare_choice
from tf2dist.model.own_step import Group, OwnStep, optimizers_of
from tf2dist.model.saved import WEIGHTS
from tf2dist.model.step import Step
from tf2dist.process import heartbeat
from tf2dist.process.tables_in_files import LARGE_BYTES, Tables, large_table_of, put
from tf2dist.tf_internals.keras import (
    counters_of,
    inner_optimizers,
    layers_of,
    learning_rate_of,
    seeds_of,
    set_learning_rates,
)

MODEL, OPTIMIZER = "model/", "optimizer/"  # how the names of variables begin
MODEL_FILE, DESCRIPTION = "model.keras", "model.json"
TEMPORARY = ".part-model"  # a folder in the run directory
COPIED_BYTES = 1 << 20  # at a time
Warn = Callable[[str], None]
# The attributes that are an optimizer, and the names of the variables that an update of it trains.
NamedGroup = tuple[list[str], list[str]]


def describe(
    run_dir: Path,
    model: keras.Model,
    new_optimizer: Callable[[], keras.Optimizer],
    warn: Warn,
    groups: Sequence[NamedGroup] = (),
) -> None:
    """Writes model.json at the start of a run, and removes the finished model of an earlier run.

    Args:
        model: compiled, with any optimizer.
        new_optimizer: makes an optimizer like that of the run.
        warn: called if the file cannot be written, which does not end the run.
        groups: see `named_groups`.
    """
    try:
        # Until this run ends, its newest checkpoint is the model; a file from before would be taken for it.
        (run_dir / MODEL_FILE).unlink(missing_ok=True)
        config = keras.saving.serialize_keras_object(model)
        if not groups:
            # The model of the loop is compiled for its losses and metrics; its optimizer need not be that of the run.
            config["compile_config"]["optimizer"] = keras.saving.serialize_keras_object(new_optimizer())
        content = {"variables": list(saved_variables(model)), "updates": groups, "model": config}
        text = json.dumps(content, indent=1)
        write_whole(run_dir / DESCRIPTION, text + "\n")
    except Exception as error:  # get_config of the user's layers may raise anything
        warn(f"{DESCRIPTION} could not be written ({_reason(error)}); load_model will need the end of the run")


def write_model(
    run_dir: Path,
    trained: keras.Model,
    optimizer: keras.Optimizer,
    read_arrays: Callable[[], dict[str, np.ndarray]],
    num_updates: int,
    build: Callable[[], keras.Model],
    warn: Warn,
    groups: Sequence[NamedGroup] = (),
    *,
    is_saved: bool = True,
) -> None:
    """Writes model.keras at the end of a run, whole or not at all.

    Args:
        trained: the model of the run, whose variables may lie on parameter servers, with its final weights.
        optimizer: any optimizer of the run, for its learning rate.
        read_arrays: reads all variables of the run by name; tables may be mapped from a file.
        num_updates: how many steps the optimizer has counted.
        build: makes a new compiled model like `trained`, with plain variables in this process.
        warn: called if the file cannot be written, which does not end the run.
        groups: see `named_groups`.
        is_saved: whether a checkpoint has the same weights.
    """
    folder, elsewhere = run_dir / TEMPORARY, "; the checkpoints have the model, for load_model" if is_saved else ""
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed while it wrote
        folder.mkdir(mode=0o700)
        arrays, names = read_arrays(), list(saved_variables(trained))
        arrays = {name: array for name, array in arrays.items() if name in names or name.startswith(OPTIMIZER)}
        in_files = names_in_files(trained, arrays)
        if lack := lack_of_memory([array.nbytes for name, array in arrays.items() if name not in in_files]):
            warn(f"{MODEL_FILE} was not written: it {lack}{elsewhere}")
            return
        heartbeat.progress(heartbeat.START_SECS)  # Keras writes all weights in one call
        # On the CPU: beside the model of the run a second one with its optimizer may not fit on a GPU.
        tables = Tables(folder / "tables")
        with tf.device("CPU:0"), tables.in_use():
            model = build()
            if filled := fill(model, names, arrays, num_updates, groups):
                _set_rates(filled, optimizer)
            del filled  # which refers to the variables
            del arrays  # with the files from which tables are mapped
            copy_names(model, trained)
            if model.optimizer:  # a MultiOptimizer has to find the variables by their new names
                named = trained.trainable_variables
                prepare_choice(model.name, model.optimizer, model.trainable_variables, named)
            # Not zipped by Keras, which would first hold all weights in memory once more.
            keras.saving.save_model(model, folder / "unzipped", zipped=False)
        places = tables.make_room_in(folder / "unzipped" / WEIGHTS)
        # A model refers to itself, and would keep the files of its tables mapped when they are removed.
        del model, tables
        gc.collect()
        for unfilled in set((folder / "tables").glob("*")) - {table for _, table in places}:
            unfilled.unlink()  # the first values of a model that was loaded with its tables
        _zip(folder / "unzipped", run_dir, places)
    except Exception as error:  # builders and get_config of the user's layers may raise anything
        warn(f"{MODEL_FILE} could not be written ({_reason(error)}){elsewhere}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _set_rates(optimizer: keras.Optimizer, source: keras.Optimizer) -> None:
    """Gives an optimizer the present learning rates of another one, unless it has schedules."""
    rates = [learning_rate_of(inner) for inner in inner_optimizers(source)]
    set_learning_rates(optimizer, [0.0 if callable(rate) else float(rate) for rate in rates])


def _reason(error: Exception) -> str:
    of_hdf5 = re.search("errno = [0-9]+, error message = '(.*?)'", str(error))  # among addresses and times
    return of_hdf5[1] if of_hdf5 else str(getattr(error, "strerror", None) or reason_of(error))


def _zip(saved: Path, run_dir: Path, places: Sequence[tuple[int, Path]]) -> None:
    """Makes model.keras of a saved model, whole or not at all, without following links.

    Args:
        places: of the tables in its file of weights; see `Tables.make_room_in`.
    """
    # In the new folder and then moved: a link that has this name would be followed.
    path, weights = saved.with_name(MODEL_FILE), saved / WEIGHTS
    with zipfile.ZipFile(path, "w") as archive:
        for part in sorted(saved.rglob("*")):
            if part.is_dir():
                archive.write(part, part.relative_to(saved))
                continue
            entry = zipfile.ZipInfo.from_file(part, part.relative_to(saved))
            # `archive.write` would copy 8 KB at a time, which takes twice the processor time.
            with archive.open(entry, "w") as target:
                for piece in _pieces(part, places if part == weights else []):
                    target.write(piece)
                    heartbeat.progress(heartbeat.START_SECS)  # the next call may be the one that waits for the disk
            # What the kernel has not written of them yet does not go to the disk.
            for copied in {part, *(table for _, table in places if part == weights)}:
                copied.unlink()
    # On disk before it gets its name: after a power failure the name must not lead to an empty file.
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    path.replace(run_dir / MODEL_FILE)
    flush(run_dir)


def _pieces(path: Path, places: Sequence[tuple[int, Path]]) -> Iterator[bytes]:
    """The bytes of a file, with those of other files at their places."""
    with open(path, "rb") as file:
        for first, table in [*places, (path.stat().st_size, None)]:
            for begin in range(file.tell(), first, COPIED_BYTES):
                yield file.read(min(COPIED_BYTES, first - begin))
            if table:
                file.seek(table.stat().st_size, os.SEEK_CUR)
                yield from _pieces(table, [])


def saved_variables(model: keras.Model) -> Named:
    """The variables of a model that a checkpoint holds: all but the seeds of random layers."""
    seeds = set(map(id, seeds_of(model)))
    others = [variable for variable in model.non_trainable_variables if id(variable) not in seeds]
    return named_variables(model, [*model.trainable_variables, *others], [])


def named_groups(step: Step) -> list[NamedGroup]:
    """What each update of a model's own step trains, for model.json; empty if the step is that of Keras."""
    if not isinstance(step, OwnStep):
        return []
    attributes: dict[int, list[str]] = {}
    for name, optimizer in sorted(optimizers_of(step.model).items(), key=lambda item: item[0] != "optimizer"):
        attributes.setdefault(id(optimizer), []).append(name)
    names = {id(variable): name for name, (variable,) in saved_variables(step.model).items()}
    return [(attributes[id(group.optimizer)], [names[id(v)] for v in group.variables]) for group in step.groups]


def _built_optimizer(
    model: keras.Model, variables: dict[str, keras.Variable], groups: Sequence[NamedGroup]
) -> tuple[keras.Optimizer | None, list[int]]:
    """The optimizer of a run's model, built, and how much a step moves its counters; None if it lacks one of the run.

    Args:
        variables: of the model, by their names in the run.
    """
    if not groups:
        # To build it again would give a LossScaleOptimizer its variables twice.
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return model.optimizer, [1] * len(counters_of(model.optimizer))
    optimizers = optimizers_of(model)
    found = [next((optimizers[owner] for owner in owners if owner in optimizers), None) for owners, _ in groups]
    if None in found:  # its class gives a loaded model none
        return None, []
    trained = [Group(one, [variables[name] for name in names]) for one, (_, names) in zip(found, groups, strict=True)]
    for one, (owners, _) in zip(found, groups, strict=True):  # Keras loads what was one optimizer as several
        for owner in owners:
            if "/" not in owner:  # that of a list or dict
                setattr(model, owner, one)
    optimizer = own_step.optimizer_of(model.name, trained)
    # Keras builds `model.optimizer` for all variables when it loads a model.
    if not optimizer.built:
        optimizer.build(model.trainable_variables if optimizer is model.optimizer else own_step.trained_by(trained))
    return optimizer, own_step.updates_per_step(optimizer, trained)


def fill(
    model: keras.Model,
    names: list[str],
    arrays: dict[str, np.ndarray],
    step: int,
    groups: Sequence[NamedGroup] = (),
) -> keras.Optimizer | None:
    """Puts the arrays of a run into a model and its optimizer, which it returns, and sets the counts of updates.

    Keras numbers unnamed layers separately in each process, and may put the name of the model in front:
    "sequential_1/dense_3/kernel" there can be "dense/kernel" here. So variables are matched by their order.

    Args:
        names: of the model's variables in the run, in the order of `saved_variables`.
        arrays: by their names in the run. Those of the optimizer are left out if this one has no such variable.
        groups: see `named_groups`.
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
    optimizer, per_step = _built_optimizer(model, dict(zip(names, variables, strict=True)), groups)
    by_name = named_variables(model, variables, [optimizer] if optimizer else [])
    by_name = {_renamed(name, renamed): copies for name, copies in by_name.items()}
    arrays = {name: array for name, array in arrays.items() if name in by_name}
    assign(by_name, {name: array for name, array in arrays.items() if not put(by_name[name][0], array)})
    for average, variable in averages_left_out(by_name, arrays).items() if step else ():
        by_name[average][0].assign(by_name[variable][0])
    # A LossScaleOptimizer leaves out updates; how many it has applied is among the arrays.
    has_count = any(name.startswith(LOSS_SCALE) for name in arrays)
    if optimizer and not has_count:
        for counter, times in zip(counters_of(optimizer), per_step, strict=True):
            counter.assign(times * step)
    return optimizer


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
    """A text about the memory that a model needs, if this machine has less; otherwise empty.

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
    """Gives a model and its layers the names of another model that was built in the same way."""
    for layer, named_layer in zip(layers_of(model), layers_of(named), strict=True):
        layer.name = named_layer.name
