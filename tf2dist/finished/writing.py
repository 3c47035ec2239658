"""Writes the finished model, on the leader, in a form that any Keras program loads without this package.

model.keras    the compiled model at the end of a run: the weights that were evaluated and the optimizer's state
model.json     its description without weights, from the start of a run; those of any checkpoint fit into it
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import flush
from tf2dist.errors import reason_of
from tf2dist.files import write_whole
from tf2dist.finished.names import OPTIMIZER, copy_names, fill, lack_of_memory, names_in_files, saved_variables
from tf2dist.model.optimizer_checks import prepare_choice
from tf2dist.model.saved import WEIGHTS
from tf2dist.process.tables_in_files import Tables
from tf2dist.tf_internals import inner_optimizers, learning_rate_of, set_learning_rates

MODEL_FILE, DESCRIPTION = "model.keras", "model.json"
TEMPORARY = ".part-model"  # a folder in the run directory
Warn = Callable[[str], None]


def describe(run_dir: Path, model: keras.Model, new_optimizer: Callable[[], keras.Optimizer], warn: Warn) -> None:
    """Writes model.json at the start of a run, and removes the finished model of an earlier run.

    Args:
        model: compiled, with any optimizer.
        new_optimizer: makes an optimizer like that of the run.
        warn: called if the file cannot be written, which does not end the run.
    """
    try:
        # Until this run ends, its newest checkpoint is the model; a file from before would be taken for it.
        (run_dir / MODEL_FILE).unlink(missing_ok=True)
        config = keras.saving.serialize_keras_object(model)
        # The model of the loop is compiled for its losses and metrics; its optimizer need not be that of the run.
        config["compile_config"]["optimizer"] = keras.saving.serialize_keras_object(new_optimizer())
        text = json.dumps({"variables": list(saved_variables(model)), "model": config}, indent=1)
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
) -> None:
    """Writes model.keras at the end of a run, whole or not at all.

    Args:
        trained: the model of the run, whose variables may lie on parameter servers, with its final weights.
        optimizer: any optimizer of the run, for its learning rate.
        read_arrays: reads all variables of the run by name; tables may be mapped from a file.
        num_updates: how many the optimizer has applied.
        build: makes a new compiled model like `trained`, with plain variables in this process.
        warn: called if the file cannot be written, which does not end the run.
    """
    folder = run_dir / TEMPORARY
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed while it wrote
        folder.mkdir(mode=0o700)
        arrays, names = read_arrays(), list(saved_variables(trained))
        arrays = {name: array for name, array in arrays.items() if name in names or name.startswith(OPTIMIZER)}
        in_files = names_in_files(trained, arrays)
        if lack := lack_of_memory([array.nbytes for name, array in arrays.items() if name not in in_files]):
            warn(f"{MODEL_FILE} was not written: it {lack}; the checkpoints have the model, for load_model")
            return
        # On the CPU: beside the model of the run a second one with its optimizer may not fit on a GPU.
        tables = Tables(folder / "tables")
        with tf.device("CPU:0"), tables.in_use():
            model = build()
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            fill(model, names, arrays, num_updates)
            del arrays  # with the files from which tables are mapped
            _set_rates(model.optimizer, optimizer)
            copy_names(model, trained)
            named = trained.trainable_variables  # a MultiOptimizer has to find the variables by their new names
            prepare_choice(model.name, model.optimizer, model.trainable_variables, named)
            # Not zipped by Keras, which would first hold all weights in memory once more.
            keras.saving.save_model(model, folder / "unzipped", zipped=False)
        tables.write_into(folder / "unzipped" / WEIGHTS)
        _zip(folder / "unzipped", run_dir)
    except Exception as error:  # builders and get_config of the user's layers may raise anything
        warn(f"{MODEL_FILE} could not be written ({_reason(error)}); the weights are in the checkpoints")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _set_rates(optimizer: keras.Optimizer, source: keras.Optimizer) -> None:
    """Gives an optimizer the present learning rates of another one, unless it has schedules."""
    rates = [learning_rate_of(inner) for inner in inner_optimizers(source)]
    set_learning_rates(optimizer, [0.0 if callable(rate) else float(rate) for rate in rates])


def _reason(error: Exception) -> str:
    of_hdf5 = re.search("errno = [0-9]+, error message = '(.*?)'", str(error))  # among addresses and times
    return of_hdf5[1] if of_hdf5 else str(getattr(error, "strerror", None) or reason_of(error))


def _zip(saved: Path, run_dir: Path) -> None:
    """Makes model.keras of a saved model, whole or not at all, without following links."""
    # In the new folder and then moved: a link that has this name would be followed.
    path = saved.with_name(MODEL_FILE)
    with zipfile.ZipFile(path, "w") as archive:
        for part in sorted(saved.rglob("*")):
            archive.write(part, part.relative_to(saved))
    # On disk before it gets its name: after a power failure the name must not lead to an empty file.
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    path.replace(run_dir / MODEL_FILE)
    flush(run_dir)
