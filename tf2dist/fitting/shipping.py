"""Sends the model and the data to the tasks of this host: as files in a private folder, that of the job.

    job.json        the plan, and which of the files below hold what
    *.npy           the arrays, which tasks map into their memory
    model           a model, with its weights, as Keras saves it in a folder; or
    build.pickle    the function that builds it, by cloudpickle
    data.pickle, validation_data.pickle    the functions that make streams, likewise
    tables          the large tables of embeddings of a model that is to predict, which all tasks map
    custom.pickle   the user's own classes and functions in a compiled model, by cloudpickle
    unsaved.json    what Keras does not save of a compiled model

What is unpickled here was written by the same user on this host, into a folder in which nobody else can write.
Nothing of it goes to other hosts: each of them runs the same script and makes its own.
"""

import builtins
import contextlib
import dis
import json
import os
import re
import stat
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import have_same_bits
from tf2dist.data.arrays import Layout
from tf2dist.data.splits import OwnSplits, Splits, streamed
from tf2dist.data.stream import Stream
from tf2dist.errors import ConfigError, FitError, TrainingError, kind_of, naming, reason_of
from tf2dist.files import raising, write_whole
from tf2dist.fitting import inputs, mirror, pickling
from tf2dist.linux import without_warnings
from tf2dist.model.copies import is_of_keras, lost_in_copy, lost_of_weight
from tf2dist.model.optimizer_checks import has_trained
from tf2dist.model.own_step import OwnStep, has_own_step, optimizers_of
from tf2dist.model.saved import Lambda, config_in, lambdas_in, leave_out_optimizer, texts_in
from tf2dist.model.source import EpochPlan
from tf2dist.process.tables_in_files import Tables
from tf2dist.tf_internals.keras import fresh_names, groups_of, inner_optimizers, layers_of, seeds_of, undecayed

JOB, MODEL, TABLES, BUILD, CUSTOM = "job.json", "model", "tables", "build.pickle", "custom.pickle"
UNSAVED = "unsaved.json"
# An argument that Keras gives every layer, loss or metric that it loads.
NO_OPTIONS = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(?:name|trainable|dtype|reduction)'")
NO_LAMBDA = "give a function with a name in its place, or a function that builds the model"
is_task = False  # whether this process is a task that has read a job


def check_caller(call: str) -> None:
    """Refuses a call of `fit` or `predict` in a task."""
    # A task imports the module of the model. If that module makes the call itself, each task would start a cluster.
    if is_task:
        raise FitError(
            f"{call}: was called in a task of a run, which imports the module of the model; move the call into another "
            'module, or below `if __name__ == "__main__":`'
        )


def ship(
    folder: Path,
    model: Any,
    name: str,
    splits: Splits,
    plan: EpochPlan | None,
    tables: Tables | None = None,
    calls_with_weights: Collection[str] = (),
    reads_progress: bool = False,
) -> keras.Model | None:
    """Writes the files of one job; returns a copy of a model that is given, as the tasks make it.

    Args:
        folder: exists, has nothing but `tables`, and belongs to this user alone.
        model: a model, compiled if it is to be trained, or a function without arguments that returns one.
        plan: None for a prediction.
        tables: for a prediction, in the folder `TABLES` of this one.
        calls_with_weights: the kinds of calls of callbacks that need the weights; see `readers`.
        reads_progress: whether their hooks of batches get the metrics that come with the progress.
    """
    copy = None
    with raising(
        f"{folder}: the data cannot be written for the tasks",
        "make room there, or set TMPDIR to another folder",
        TrainingError,
    ):
        if isinstance(model, keras.Model):
            with naming(f"model ({model.name})"):
                with tables.in_use() if tables else contextlib.nullcontext():
                    copy = _ship_model(folder, model, trains=bool(plan))
                if plan:
                    _check_compiled(model, copy, splits.layout)
        else:
            write_whole(folder / BUILD, pickling.pickled(model, "model"))
        stored = {
            "name": name,
            "plan": asdict(plan) if plan else None,
            "train": inputs.store(splits.train, folder, "train") if not splits.stream else None,
            "stream": _ship_stream(folder, splits.stream),
            "validation": inputs.store(splits.validation, folder, "validation") if splits.validation else None,
            "validation_stream": _ship_stream(folder, splits.validation_stream),
            "is_saved": copy is not None,
            "calls_with_weights": sorted(calls_with_weights),
            "reads_progress": reads_progress,
        }
        # Last of all, so a job that can be read is whole.
        write_whole(folder / JOB, json.dumps(stored))
    return copy


def _ship_stream(folder: Path, stream: Stream | None) -> dict[str, Any] | None:
    if stream is None:
        return None
    write_whole(folder / f"{stream.argument}.pickle", pickling.pickled(stream.load, stream.argument))
    names = ("name", "count", "seed", "batch_size", "argument", "repeats")
    return {name: getattr(stream, name) for name in names}


# Compiled models.


def _ship_model(folder: Path, model: keras.Model, trains: bool) -> keras.Model:
    try:
        # Not zipped, for which Keras would hold all weights in memory once more.
        keras.saving.save_model(model, folder / MODEL, zipped=False)
    except Exception as error:  # get_config of the user's layers may raise anything
        if isinstance(error, OSError) and error.errno:  # a full disk, which `ship` reports
            raise
        raise FitError(f"Keras cannot save it ({reason_of(error)}); give a function that builds it instead") from None
    config = config_in(folder / MODEL)
    lambdas = lambdas_in(config)
    _check_lambdas(lambdas)
    if ambiguous := pickling.ambiguous_names(model).intersection(texts_in(config)):
        raise FitError(
            f"has several functions or classes of the name {min(ambiguous)}, by which Keras finds one alone when it "
            "loads the model; give them different names, or give a function that builds the model"
        )
    objects, pickles = pickling.custom_objects(model)
    if not trains:
        leave_out_optimizer(folder / MODEL, objects)
    write_whole(folder / CUSTOM, cloudpickle.dumps(pickles))
    write_whole(folder / UNSAVED, json.dumps(_unsaved(model)))
    # A trial in this process, where nothing has been started yet; otherwise every task would fail with the same error.
    try:
        copy = load_sent_model(folder, objects)
    except Exception as error:
        if found := [found for found in lambdas if not found.is_loadable]:
            raise _unloadable(found[0]) from None
        raise _not_loaded(error) from None
    if len(copy.weights) != len(model.weights):
        raise FitError(
            f"Keras makes only {len(copy.weights)} of its {len(model.weights)} weights when it "
            "loads the model; make all layers with their shapes in its __init__, or give a function that builds it"
        )
    if (index := _first_other(model.weights, copy.weights)) is not None:
        raise FitError(
            f"Keras does not load {model.weights[index].path} as it has saved it; give a function that builds the model"
        )
    return copy


def _not_loaded(error: BaseException) -> FitError:
    # Keras wraps the error once for each enclosing object, and appends the inner text each time.
    while (inner := error.__context__) and str(inner) and str(inner) in str(error):
        error = inner
    way = "give its classes a get_config"
    if found := NO_OPTIONS.search(str(error)):
        way = f"let the __init__ of {found[1]} take **kwargs and pass them to super().__init__"
    return FitError(
        f"Keras has saved it but cannot load it again ({reason_of(error)}); {way}, or give a function that builds it "
        "instead"
    )


def _first_other(variables: list[keras.Variable], loaded: list[keras.Variable]) -> int | None:
    """The index of the first variable that has another value, bit by bit, when Keras has loaded it."""
    for index, pair in enumerate(zip(variables, loaded, strict=True)):
        # These arrays share the memory of the variables; `numpy()` and Keras would copy it.
        one, other = (np.asarray(tf.convert_to_tensor(variable)) for variable in pair)
        if not have_same_bits(one, other):
            return index
    return None


def _check_lambdas(lambdas: list[Lambda]) -> None:
    """Refuses a lambda that would fail in the tasks, or would find other things under its names."""
    for found in lambdas:
        try:
            lost = _lost_name(found) if found.is_loadable else ""
        except Exception:  # Keras cannot load one with default arguments
            raise _unloadable(found) from None
        if lost:
            where = f"the lambda of its {found.role}"
            raise FitError(f"{where} uses {lost}, which Keras does not save with it; {NO_LAMBDA}")


def _unloadable(found: Lambda) -> FitError:
    reason = f"has a lambda as its {found.role}, which Keras saves but cannot load again"
    return FitError(f"{reason}; {NO_LAMBDA}")


def _check_compiled(model: keras.Model, copy: keras.Model, layout: Layout) -> None:
    """Refuses a model that would be trained in another way when Keras has loaded it."""
    if not copy.compiled:
        raise FitError(
            "its compile is its own, and Keras does not call it when it loads the model; give "
            "its class get_compile_config and compile_from_config, or give a function that builds and compiles it"
        )
    copied = optimizers_of(copy)
    for name, optimizer in optimizers_of(model).items():
        loss = _lost_of_optimizer(name, optimizer, copied.get(name))
        if loss and (name == "optimizer" or _is_applied(model, optimizer, layout)):
            raise FitError(loss)
    if lost := lost_in_copy(model, copy):
        kind, key = lost[0].__name__, lost[1]
        way = f"give {kind} a get_config with {key} and an __init__ that takes it"
        if issubclass(lost[0], keras.Loss | keras.Metric) and is_of_keras(lost[0]):
            way = f"give a function in place of the {kind}"
        elif is_of_keras(lost[0]):
            way = f"set {key} where the class that makes it does so, in its __init__"
        if hasattr(*lost):
            way = f"make {key} a method of a subclass"
        raise FitError(
            f"Keras does not save {key} of its {kind}, or not as it is now; {way}, or give a function that builds the "
            "model"
        )
    if _trained_places(model) != _trained_places(copy):
        raise FitError(
            "Keras does not save which layers of it are not to be trained; set trainable in its __init__, or give a "
            "function that builds the model"
        )
    for weight, copied_weight in zip(model.weights, copy.weights, strict=True):
        if lost_setting := lost_of_weight(weight, copied_weight):
            raise FitError(
                f"Keras does not save the {lost_setting} of {weight.path} as it is now; give it to the layer when that "
                "is made, or give a function that builds the model"
            )
    # A MultiOptimizer knows variables by their paths, and a class may give its layers other names when it is loaded.
    if _optimizer_numbers(copy) != _optimizer_numbers(model):
        raise FitError(
            "its MultiOptimizer chooses by names of layers, which are others when Keras loads "
            "the model; give its layers names, or give a function that builds it instead"
        )


def _lost_of_optimizer(name: str, optimizer: keras.Optimizer, copied: keras.Optimizer | None) -> str:
    """Why an optimizer is refused that Keras has loaded as another one, or without its state; otherwise empty.

    Args:
        name: of the model's attribute.
    """
    if copied is None or type(optimizer) is not type(copied):
        found, policy = kind_of(copied) if copied else "none", keras.config.dtype_policy().name
        if copied is None or keras.optimizers.LossScaleOptimizer not in (type(optimizer), type(copied)):
            return (
                f"its {name} is {kind_of(optimizer)}, and Keras gives {found} when it loads the model; make it in the "
                "__init__ of the model, or give a function that builds the model"
            )
        return (
            f"its {name} is {kind_of(optimizer)}, and under the dtype policy that is set now ({policy}) Keras gives "
            f"{found} when it loads the model; set the policy under which it was compiled, compile it without "
            "auto_scale_loss=False, or give a function that builds it"
        )
    if not has_trained(optimizer):
        return ""
    if len(optimizer.variables) != len(copied.variables):
        return (
            f"its {name} has {len(optimizer.variables)} variables, and {len(copied.variables)} when Keras loads the "
            "model, which leaves out its state; compile the model again, or give a function that builds it"
        )
    if (index := _first_other(optimizer.variables, copied.variables)) is not None:
        return (
            f"Keras does not load {optimizer.variables[index].path} of its {name} as it has saved it; give a "
            "function that builds the model"
        )
    return ""


def _is_applied(model: keras.Model, optimizer: keras.Optimizer, layout: Layout) -> bool:
    """Whether a step of a model of its own applies an optimizer; also if that step cannot be traced."""
    if not has_own_step(model):
        return False
    with contextlib.suppress(ConfigError):
        return any(group.optimizer is optimizer for group in OwnStep(model, layout, model.name, None).groups)
    return True


def _trained_places(model: keras.Model) -> list[bool]:
    trained = set(map(id, model.trainable_weights))
    # Without gamma and beta it has no such weights, and in training uses its moving averages if it is not trained.
    norms = [layer.trainable for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
    return [id(weight) in trained for weight in model.weights] + norms


def _optimizer_numbers(model: keras.Model) -> list[int]:
    """For each trained variable the number of the inner optimizer that trains it."""
    variables = model.trainable_variables
    groups = enumerate(groups_of(model.optimizer, variables))
    numbers = {id(variable): number for number, (_, trained) in groups for variable in trained}
    return [numbers[id(variable)] for variable in variables]


def _unsaved(model: keras.Model) -> dict[str, Any]:
    """The states of random generators, and the indices of the variables that are excluded from weight decay."""
    # A generator without a seed begins with a random one, so that each task would draw its own numbers.
    seeds = [np.array(seed.value).tolist() for seed in seeds_of(model)]
    optimizer = getattr(model, "optimizer", None)  # a prediction needs none
    inner = inner_optimizers(optimizer) if optimizer else []
    return {"seeds": seeds, "undecayed": [undecayed(one, model.trainable_variables) for one in inner]}


def load_sent_model(folder: Path, objects: dict[str, Any] | None = None) -> keras.Model:
    """The compiled model of a job; its variables have the same names in every process of the job.

    Args:
        objects: the user's own, as they are in this process; None for those that the job has.
    """
    # Where a class was pickled, unpickling it would give that very class copies of what its methods refer to.
    custom = objects
    if custom is None:
        custom = pickling.unpickled(cloudpickle.loads((folder / CUSTOM).read_bytes()))
    # Without safe mode: a Lambda layer is code, but the user's own, written a moment ago by this user's process.
    # The warning is about a model that is to predict and has not been trained.
    with fresh_names(), without_warnings("Skipping variable loading for optimizer"):
        model = keras.models.load_model(folder / MODEL, custom_objects=custom, safe_mode=False)
    unsaved = json.loads((folder / UNSAVED).read_bytes())
    for seed, value in zip(seeds_of(model), unsaved["seeds"], strict=True):
        seed.assign(value)
    inner = inner_optimizers(model.optimizer) if model.compiled else []  # to be trained, it is
    for optimizer, indices in zip(inner, unsaved["undecayed"], strict=False):
        if indices:
            optimizer.exclude_from_weight_decay([model.trainable_variables[index] for index in indices])
    return model


# In the tasks.


class ShippedSource:
    """The model and the data of a job, in a task's process; see `model.source.Source`.

    Args:
        folder: that of the job.
    """

    def __init__(self, folder: Path) -> None:
        global is_task
        is_task = True
        self._folder = folder
        # Before anything is read: some of the files are unpickled, which runs whatever is in them.
        check_private(folder)
        with _reading_job(folder):
            self._job = json.loads((folder / JOB).read_bytes())
        self.name: str = self._job["name"]
        plan = self._job["plan"]
        if plan and isinstance(freq := plan["validation_freq"], list):  # JSON has no tuples
            plan["validation_freq"] = tuple(freq)
        self.plan: EpochPlan | None = EpochPlan(**plan) if plan else None
        self.calls_with_weights: list[str] = self._job["calls_with_weights"]
        self.reads_progress: bool = self._job["reads_progress"]

    def load(self) -> Splits:
        """The data: arrays mapped from files, in memory that all tasks of this host share, or streams."""
        with _reading_job(self._folder):
            stored = [self._job[split] for split in ("train", "validation")]
            train, validation = (inputs.load(arrays) if arrays else None for arrays in stored)
        stream, validation_stream = self._stream("stream"), self._stream("validation_stream")
        if stream:
            return streamed(stream, validation, validation_stream)
        assert train, "a job has arrays or a stream"
        return OwnSplits(train, validation, num_classes=None, validation_stream=validation_stream)

    def _stream(self, split: str) -> Stream | None:
        if not (sent := self._job[split]):
            return None
        return Stream(**sent, load=cloudpickle.loads((self._folder / f"{sent['argument']}.pickle").read_bytes()))

    def build(self, splits: Splits) -> keras.Model:
        """Builds a new model at each call, compiled if it is to be trained."""
        is_saved: bool = self._job["is_saved"]
        if is_saved and self.plan:
            return load_sent_model(self._folder)
        if is_saved:
            with Tables(self._folder / TABLES).in_use():
                return load_sent_model(self._folder)
        function = cloudpickle.loads((self._folder / BUILD).read_bytes())
        if not self.plan:  # for a prediction the model comes with its weights
            return function()
        # Tasks train with copies of its optimizer, whose own slots would take as much as the tables on a ps.
        return call_builder(function, self.name, splits.layout, with_optimizer=False)


def _reading_job(folder: Path) -> contextlib.AbstractContextManager[None]:
    return raising(f"{folder}: the job cannot be read", kind=TrainingError, also=(ValueError, EOFError))


def call_builder(function: Callable[[], Any], name: str, layout: Layout, with_optimizer: bool = True) -> keras.Model:
    """Calls the user's function; the variables of its model have the same names in every process of the job.

    Args:
        layout: of the data, for a model that creates its variables when it is first called.
        with_optimizer: see `mirror.build`.
    """
    # Keras numbers layers by what the process has made before, and checkpoints know variables by these names.
    with fresh_names():
        model = function()
        with naming(f"model ({name})"):
            if not isinstance(model, keras.Model):
                raise FitError(f"its function returns {kind_of(model)}, but must return a keras.Model")
            if not model.compiled:
                raise FitError(
                    "is not compiled; call model.compile(optimizer, loss, metrics=...) before it is returned"
                )
        mirror.build(model, name, layout, with_optimizer)
    return model


def check_private(folder: Path) -> None:
    """Refuses a job that another user could have written."""
    # `lstat`, since a link could be pointed at another folder after this check.
    status = folder.lstat()
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or writable_by_others:
        raise TrainingError(f"{folder}: the job's folder must belong to this user alone")


def _lost_name(found: Lambda) -> str:
    """A name that a lambda of the user's own uses and that Keras does not save with it; "" if there is none."""
    function = _loaded(found)
    # It is loaded among names of Keras, which mean something else, but for modules.
    known = {name for name, value in function.__globals__.items() if isinstance(value, types.ModuleType)}
    lost = [name for name in _globals_of(function.__code__) if name not in known | vars(builtins).keys()]
    # Of what a function around it holds, Keras saves numbers and texts as they are, and of the rest a description.
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    lost += [name for name, cell in cells if isinstance(cell.cell_contents, dict)]
    return (lost or [""])[0]


def _loaded(found: Lambda) -> types.FunctionType:
    config = found.config
    if found.is_of_layer:
        layer = {"function": config, "name": "of_lambda"}
        config = {"module": "keras.layers", "class_name": "Lambda", "config": layer, "registered_name": None}
    loaded: Any = keras.saving.deserialize_keras_object(config, safe_mode=False)
    function: types.FunctionType = loaded.function if found.is_of_layer else loaded
    return function


def _globals_of(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)
