"""Refusals of `fit` before anything is started, each with the name of the argument and a way out."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config import for_fit
from tf2dist.config.schema import MODES
from tf2dist.errors import FitError, kind_of
from tf2dist.linux import free_memory
from tf2dist.model import support
from tf2dist.tf_internals.keras import profiles

# What the function of `data=load` does instead of these arguments.
ALTERNATIVES = {
    "x": "its batches are (x, y) or (x, y, sample_weight)",
    "y": "its batches are (x, y) or (x, y, sample_weight)",
    "sample_weight": "give batches (x, y, sample_weight)",
    "class_weight": "give batches (x, y, sample_weight)",
    "validation_split": "give validation_data",
    "shuffle": "shuffle in the function, as with dataset.shuffle(1000, seed=shard.seed)",
}
BATCH_HOOKS_OF_TEST = ("on_test_batch_begin", "on_test_batch_end")


def check_mode(mode: Any) -> str:
    """One of the three modes."""
    if mode not in MODES:
        raise FitError(f"mode ({mode}): must be 'async', 'sync' or 'sync_replicas'")
    return str(mode)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of Python or of numpy."""
    # Python's bool is an int, and True for a number is a mistake.
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_numbers(**values: Any) -> dict[str, Any]:
    """The values as Python's own numbers; refuses those that are neither whole numbers of at least 1 nor None."""
    for name, value in values.items():
        if value is not None and (not is_whole(value) or value < 1):
            raise FitError(f"{name} ({value}): must be a whole number of at least 1")
    return {name: None if value is None else int(value) for name, value in values.items()}


def check_data(x: Any, name: str, ways: str = "arrays") -> None:
    """Refuses data that come batch by batch, such as datasets, generators and data loaders.

    Args:
        name: of the argument.
        ways: what can be given instead.
    """
    # By the names of the classes, so that PyTorch, whose loaders Keras takes too, need not be installed.
    kinds = [kind.__name__ for kind in type(x).__mro__ if kind is not object]
    is_dataset = "DatasetV2" in kinds or "DataLoader" in kinds or "DataAdapter" in kinds or "PyDataset" in kinds
    if inspect.isgenerator(x) or is_dataset:
        raise FitError(
            f"{name}: is {kind_of(x)}, whose batches are made in this process and cannot be sent to the workers; give "
            f"{ways}, also memory-mapped ones (numpy.load with mmap_mode='r')"
        )
    if is_function(x):
        raise FitError(f"{name}: is a function; give {ways}")


def is_function(data: Any) -> bool:
    """Whether data are to come from a function of the user's."""
    return callable(data) and not hasattr(data, "__array__")


def check_stream(arguments: Any) -> None:
    """Refuses arguments that need arrays when `data=load` is given; `arguments` are those of `fit`, checked."""
    # The workers' positions in their streams would not be known after a resume.
    if arguments.mode == "sync_replicas":
        raise FitError("data: mode='sync_replicas' trains on arrays; give x and y, or use mode='async' or 'sync'")
    load = arguments.data
    if not callable(load):
        raise FitError(f"data: is {kind_of(load)}; give a function of a tf2dist.Shard that returns a tf.data.Dataset")
    for name, alternative in ALTERNATIVES.items():
        value = getattr(arguments, name)
        is_default = value is True if name == "shuffle" else value is None or (name == "validation_split" and not value)
        if not is_default:
            raise FitError(f"{name}: cannot be given together with data; {alternative}")


def check_model(name: str, model: keras.Model, mode: str) -> None:
    """Refuses a compiled model that the tasks cannot train as Keras would."""
    support.check_model(support.BUILT, name, model)
    if model.optimizer is None:
        raise FitError(f"model ({name}): is compiled without an optimizer; give one to model.compile")
    way = {"async": support.ASYNC, "sync": support.SYNC, "sync_replicas": support.SYNC_REPLICAS}[mode]
    support.check_model(way, name, model)
    support.check_optimizer(way, model.optimizer)


def check_memory(name: str, variables: Sequence[keras.Variable], is_seen: bool) -> None:
    """Refuses a model for which this process has too little memory.

    Args:
        variables: of the model and its optimizer, which are there.
        is_seen: whether a callback may see them.
    """
    sizes = [int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size for variable in variables]
    # What comes from the tasks is mapped from a file; while a variable is assigned, there are two more copies of it. A
    # callback may keep a copy of all, such as the best ones.
    needed, free = 2 * max(sizes, default=0) + (sum(sizes) if is_seen else 0), free_memory()
    if needed > free:
        where = "in this process, where callbacks see all of its variables" if is_seen else "in this process"
        raise FitError(
            f"model ({name}): needs {needed / 1e9:.1f} GB more memory {where}, and {free / 1e9:.1f} GB are free; train "
            "it with the command and a plugin"
        )


def check_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks as a list."""
    # Keras takes nested lists, single callbacks and its own CallbackList.
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    flat: list[Any] = keras.tree.flatten(callbacks) if callbacks else []
    for callback in flat:
        if not isinstance(callback, keras.callbacks.Callback):
            raise FitError(
                f"callbacks: has {kind_of(callback)}; give objects of subclasses of keras.callbacks.Callback"
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise FitError("callbacks: BackupAndRestore is not needed; give run_dir, and the same call resumes the run")
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise FitError(
                "callbacks: SwapEMAWeights swaps the weights for a validation, but the cluster validates with its own; "
                "leave it out: with use_ema=True in the optimizer the finished model has the averages"
            )
        if isinstance(callback, keras.callbacks.TensorBoard) and profiles(callback):
            raise FitError(
                f"callbacks: {kind_of(callback)} has a profile_batch, which would profile this process, but others "
                "train; leave it out, and give options={'profile': True}"
            )
        if user_hooks := [name for name in BATCH_HOOKS_OF_TEST if is_own_hook(callback, name)]:
            raise FitError(
                f"callbacks: {kind_of(callback)} has {user_hooks[0]}, which would not be called, since all workers "
                "validate at once; use on_test_begin and on_test_end"
            )
    return flat


def is_own_hook(callback: keras.callbacks.Callback, name: str) -> bool:
    """Whether a callback has a hook that the user wrote, not one of Keras's."""
    # `LambdaCallback` keeps the user's functions as attributes of the object.
    if name in vars(callback):
        return True
    hook = getattr(type(callback), name)
    return hook is not getattr(keras.callbacks.Callback, name) and not hook.__module__.startswith("keras.")


def check_validation_freq(freq: Any) -> int | tuple[int, ...]:
    """The number of epochs between validations, or the epochs with one, counted from 1."""
    if isinstance(freq, list | tuple | set | range) and all(map(is_whole, freq)):
        return tuple(sorted(map(int, freq)))
    check_numbers(validation_freq=freq)
    if freq is None:
        raise FitError("validation_freq (None): must be a whole number of at least 1, or a list of epochs")
    return int(freq)


def check_shuffle(shuffle: Any) -> bool:
    """Whether examples are shuffled."""
    # It shuffles only within batches, and the sum over a batch does not depend on their order.
    if shuffle == "batch":
        return False
    if not isinstance(shuffle, bool):
        raise FitError(f"shuffle ({shuffle}): must be True or False")
    return shuffle


def check_verbose(verbose: Any) -> int:
    """The level 0, 1 or 2; "auto" is 1."""
    if verbose not in ("auto", 0, 1, 2):
        raise FitError(f"verbose ({verbose}): must be 'auto', 0 (silent), 1 (progress) or 2 (a line an epoch)")
    return 1 if verbose == "auto" else int(verbose)


def overrides_of(options: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    """The options as on the command line, such as "train.steps_per_execution=10"."""
    # A string is a sequence too, of letters.
    if isinstance(options, str) or not isinstance(options, Iterable | None):
        raise FitError(f"options ({options}): must be a list or a dict, such as {{'checkpoint.every_secs': 60}}")
    if isinstance(options, Mapping):
        overrides = [f"{name}={_text(value)}" for name, value in options.items()]
    else:
        overrides = list(options or ())
    for override in overrides:
        if not isinstance(override, str):
            raise FitError(f"options: has {kind_of(override)}; write 'checkpoint.every_secs=60', or give a dict")
    for_fit.check(overrides, "options")
    return overrides


def _text(value: Any) -> str:
    """A value in the grammar of Hydra's command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return str(value)


def has_terminator(callbacks: Iterable[keras.callbacks.Callback]) -> bool:
    """Whether a loss that is not finite ends the training without an error, as in Keras with `TerminateOnNaN`."""
    return any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks)
