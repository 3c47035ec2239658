"""The way of the model and the data to the tasks of this host: files in a private folder, the job's.

    job.json        where everything stands, and the plan
    *.npy           the arrays, which tasks map
    model.keras     a compiled model, with its weights, as Keras saves it; or
    build.pickle    a function that tasks cannot import, by cloudpickle
    load.pickle     likewise the one that makes the streams of data
    custom.pickle   the user's own classes and functions in a compiled model, by cloudpickle
    seeds.json      the states of the random generators in a compiled model

What is unpickled here has been written by the same user's process on this host, into a folder that nobody else can
write. Nothing of it goes to other hosts: there the same script makes its own.
"""

import contextlib
import json
import os
import stat
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np

from tf2dist.data.arrays import Arrays, Splits
from tf2dist.data.layout import Layout
from tf2dist.data.stream import Stream
from tf2dist.errors import FitError, TrainingError, first_line, kind_of
from tf2dist.files import write_whole
from tf2dist.fitting import functions, inputs, mirror
from tf2dist.model.plan import EpochPlan
from tf2dist.process.tf_internals import fresh_names, seeds_of

JOB, MODEL, BUILD, LOAD, CUSTOM = "job.json", "model.keras", "build.pickle", "load.pickle", "custom.pickle"
SEEDS = "seeds.json"
OURS = ("keras", "tensorflow", "numpy", "builtins", "functools", "optree", "tf2dist")  # not the user's own code
is_task = False  # whether this process is a task that has got a job


def ship(folder: Path, model: Any, name: str, splits: Splits, plan: EpochPlan) -> None:
    """Writes the job of one run.

    Args:
        folder: exists, is empty, and belongs to this user alone.
        model: a compiled model, or a function without arguments that gives one.

    Raises:
        FitError: the model cannot be sent.
        TrainingError: the files cannot be written.
    """
    try:
        stored = {
            "name": name,
            "plan": asdict(plan),
            "train": inputs.store(splits.train, folder, "train") if not splits.stream else None,
            "stream": _ship_stream(folder, splits.stream) if splits.stream else None,
            "validation": inputs.store(splits.validation, folder, "validation") if splits.validation else None,
            "model": _ship_model(folder, model)
            if isinstance(model, keras.Model)
            else functions.sent(folder, model, BUILD, "model"),
        }
        write_whole(folder / JOB, json.dumps(stored))
    except OSError as error:
        raise TrainingError(
            f"{folder}: the data cannot be written for the tasks ({error.strerror or error}); make room there, or set "
            "TMPDIR to another folder"
        ) from None


def _ship_stream(folder: Path, stream: Stream) -> dict[str, Any]:
    shared = {"name": stream.name, "count": stream.count, "seed": stream.seed, "batch_size": stream.batch_size}
    return {**shared, "load": functions.sent(folder, stream.load, LOAD, "data")}


# Compiled models.


def _ship_model(folder: Path, model: keras.Model) -> dict[str, str]:
    try:
        model.save(folder / MODEL)
    except OSError:
        raise
    except Exception as error:
        raise FitError(
            f"model ({model.name}): Keras cannot save it ({first_line(str(error))}); give a function that builds it "
            "instead"
        ) from None
    write_whole(folder / CUSTOM, cloudpickle.dumps(custom_objects(model)))
    # Keras does not save the states of random generators; without a seed of the user's they differ in each process.
    write_whole(folder / SEEDS, json.dumps([np.array(seed.value).tolist() for seed in seeds_of(model)]))
    try:
        sent_model(folder)
    except Exception as error:
        raise FitError(
            f"model ({model.name}): Keras cannot load what it has saved of it ({first_line(str(error))}); give its "
            "classes a get_config, or give a function that builds it instead"
        ) from None
    return {"keras": MODEL}


def sent_model(folder: Path) -> keras.Model:
    """The compiled model of a job, with the names that it has in each of its processes."""
    custom = {name: cloudpickle.loads(data) for name, data in cloudpickle.loads((folder / CUSTOM).read_bytes()).items()}
    with fresh_names():
        model = keras.models.load_model(folder / MODEL, custom_objects=custom, safe_mode=False)
    for seed, value in zip(seeds_of(model), json.loads((folder / SEEDS).read_bytes()), strict=True):
        seed.assign(value)
    return model


def custom_objects(model: keras.Model) -> dict[str, bytes]:
    """The user's own classes and functions in a model, pickled, by the names by which Keras looks for them.

    What cannot be pickled is left out; it may not be needed.
    """
    found: dict[str, bytes] = {}
    for each in _users_own(model):
        with contextlib.suppress(FitError):
            data = functions.pickled(each, "model")
            found |= {each.__name__: data, keras.saving.get_registered_name(each): data}
    return found


def _users_own(model: keras.Model) -> Iterator[Any]:
    """The classes and functions that a model is made of, but for those of Keras itself."""
    seen: dict[int, Any] = {}  # holds them, or another object could get the number of one that is gone
    waiting: list[Any] = [model]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif isinstance(one, types.FunctionType | type):
            if _is_users(one) and one.__name__ != "<lambda>":
                yield one
        elif not _is_users(type(one)) or hasattr(one, "get_config"):
            waiting.append(type(one))
            if type(one).__module__.partition(".")[0] == "keras" or hasattr(one, "get_config"):
                waiting += vars(one).values() if hasattr(one, "__dict__") else ()


def _is_users(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "builtins").partition(".")[0] not in OURS


# In the tasks.


class Shipped:
    """The model and the data of a job, in a task's process; see `model.source.Source`.

    Args:
        folder: the job's.

    Raises:
        TrainingError: it is not this user's alone, or a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        global is_task
        is_task = True
        self._folder = folder
        check_private(folder)
        try:
            self._job = json.loads((folder / JOB).read_bytes())
        except (OSError, ValueError) as error:
            raise _unreadable(folder, error) from None
        self.name: str = self._job["name"]
        plan = self._job["plan"]
        if isinstance(freq := plan["validation_freq"], list):  # JSON has no tuples
            plan["validation_freq"] = tuple(freq)
        self.plan: EpochPlan | None = EpochPlan(**plan)

    def load(self) -> Splits:
        """The data, in memory that all tasks of this host share, or in streams.

        Raises:
            DataError: the function of a stream fails.
        """
        try:
            train, validation = (self._arrays(split) for split in ("train", "validation"))
        except (OSError, ValueError, EOFError) as error:
            raise _unreadable(self._folder, error) from None
        if train:
            return Splits(train, validation, num_classes=None)
        sent = self._job["stream"]
        load = functions.received(self._folder, sent["load"])
        return Stream(sent["name"], load, sent["count"], sent["seed"], sent["batch_size"]).splits(validation)

    def _arrays(self, split: str) -> Arrays | None:
        return inputs.load(self._job[split]) if self._job[split] else None

    def build(self, splits: Splits) -> keras.Model:
        """A new model at each call.

        Raises:
            FitError: the function gives no compiled model.
        """
        sent = self._job["model"]
        if "keras" in sent:
            return sent_model(self._folder)
        return built(functions.received(self._folder, sent), self.name, splits.layout)


def _unreadable(folder: Path, error: Exception) -> TrainingError:
    return TrainingError(f"{folder}: the job cannot be read ({first_line(str(error))})")


def built(function: Callable[[], Any], name: str, layout: Layout) -> keras.Model:
    """The model that the user's function gives, with the names that it has in each process of the job.

    Args:
        layout: of the data, for a model that makes its variables when it is called first.

    Raises:
        FitError: it is no compiled model.
    """
    with fresh_names():
        model = function()
        if not isinstance(model, keras.Model):
            raise FitError(f"model ({name}): its function gives {kind_of(model)}, and must give a keras.Model")
        if not model.compiled:
            raise FitError(
                f"model ({name}): is not compiled; call model.compile(optimizer, loss, metrics=...) before it is "
                "returned"
            )
        mirror.build(model, name, layout)
    return model


def check_private(folder: Path) -> None:
    """Refuses a job that another user could have written.

    Raises:
        TrainingError: it belongs to another user, or others can write into it.
    """
    status = folder.lstat()
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others:
        raise TrainingError(f"{folder}: the job's folder must belong to this user alone")
