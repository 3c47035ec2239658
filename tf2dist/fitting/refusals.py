"""What `fit` cannot do, refused by name and with the way out before anything is started."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from tf2dist.errors import FitError, kind_of

OWN_STEPS = ("train_step", "test_step")
# Options that an argument of `fit` stands for, and options of the command line alone.
ARGUMENT_OF = {
    "mode": "mode",
    "seed": "seed",
    "run_dir": "run_dir",
    "cluster": "cluster",
    "cluster.num_workers": "cluster",
    "cluster.num_ps": "cluster",
    "train.batch_size_per_worker": "batch_size",
    "train.epochs": "epochs",
    "train.steps": "epochs and steps_per_epoch",
    "train.eval_every_steps": "validation_freq",
}
# What `data=load` does itself.
INSTEAD = {
    "x": "its batches are (x, y) or (x, y, sample_weight)",
    "y": "its batches are (x, y) or (x, y, sample_weight)",
    "sample_weight": "give batches (x, y, sample_weight)",
    "class_weight": "give batches (x, y, sample_weight)",
    "validation_split": "give validation_data",
    "shuffle": "shuffle in the function, as with dataset.shuffle(1000, seed=shard.seed)",
}
BATCH_HOOKS_OF_TEST = ("on_test_batch_begin", "on_test_batch_end")
OF_THE_COMMAND = ("model", "optimizer", "data", "experiment", "plugins", "init_from", "init_layers", "keras")


def check_numbers(**given: Any) -> None:
    """Refuses what is no whole number of at least 1; None stays for what may be left out.

    Raises:
        FitError: names the first.
    """
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise FitError(f"{name} ({value}): must be a whole number of at least 1")


def check_data(x: Any, name: str) -> None:
    """Refuses data that come batch by batch.

    Raises:
        FitError: names them.
    """
    ways = "data=load, a function that makes the dataset of each worker, or arrays" if name == "x" else "arrays"
    kinds = [kind.__name__ for kind in type(x).__mro__ if kind is not object]
    is_dataset = "DatasetV2" in kinds or "DataLoader" in kinds or "DataAdapter" in kinds or "PyDataset" in kinds
    if inspect.isgenerator(x) or is_dataset:
        raise FitError(
            f"{name}: is {kind_of(x)}, whose batches are made in this process; give {ways}, also memory-mapped ones "
            "(numpy.load with mmap_mode='r')"
        )
    if callable(x) and not hasattr(x, "__array__"):
        raise FitError(f"{name}: is a function; give {ways}")


def check_stream(load: Any, **others: Any) -> None:
    """Refuses what goes with arrays alone beside `data=load`.

    Args:
        others: by name of the argument; None or False for what is not given.

    Raises:
        FitError: names the first.
    """
    if not callable(load):
        raise FitError(f"data: is {kind_of(load)}; give a function of a tf2dist.Shard that gives a tf.data.Dataset")
    for name, value in others.items():
        if value is not None and value is not False:
            raise FitError(f"{name}: cannot be given together with data; {INSTEAD[name]}")


def check_model(name: str, model: keras.Model, mode: str) -> None:
    """Refuses a compiled model that the tasks would not train as Keras does.

    Raises:
        FitError: says why.
    """
    if model.run_eagerly:
        raise FitError(
            f"model ({name}): has run_eagerly=True, and the tasks compile their steps; leave it out, and use tf.print "
            "in the model to look inside"
        )
    own = [method for method in OWN_STEPS if getattr(type(model), method) is not getattr(keras.Model, method)]
    if own:
        raise FitError(
            f"model ({name}): has {' and '.join(own)} of its own, which would not be used; give losses with add_loss, "
            "or a loss and metrics of your own"
        )
    if model.optimizer is None:
        raise FitError(f"model ({name}): is compiled without an optimizer; give one")
    constrained = [weight for weight in model.trainable_weights if weight.constraint is not None]
    if mode == "async" and constrained:
        raise FitError(
            f"model ({name}): {constrained[0].path} has a constraint, which the updates of several workers would "
            "break; use mode='sync'"
        )


def check_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks in a list.

    Raises:
        FitError: one cannot be called here.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    found: list[Any] = keras.tree.flatten(callbacks) if callbacks else []
    for each in found:
        if not isinstance(each, keras.callbacks.Callback):
            raise FitError(f"callbacks: holds {kind_of(each)}, and takes keras.callbacks.Callback alone")
        if isinstance(each, keras.callbacks.BackupAndRestore):
            raise FitError("callbacks: BackupAndRestore is not needed; name a run_dir, where the same call goes on")
        if isinstance(each, keras.callbacks.SwapEMAWeights):
            raise FitError(
                "callbacks: SwapEMAWeights exchanges the weights around a validation, which the cluster makes with its "
                "own; leave it out: with use_ema=True of the optimizer the finished model has the averages"
            )
        if own := [name for name in BATCH_HOOKS_OF_TEST if is_own_hook(each, name)]:
            raise FitError(
                f"callbacks: {kind_of(each)} has {own[0]}, which is not called, since all workers validate at once; "
                "use on_test_begin and on_test_end"
            )
    return found


def is_own_hook(callback: keras.callbacks.Callback, name: str) -> bool:
    """Whether a callback of the user's has a hook; those of Keras' callbacks do what is done here anyway."""
    if name in vars(callback):
        return True
    hook = getattr(type(callback), name)
    return hook is not getattr(keras.callbacks.Callback, name) and not hook.__module__.startswith("keras.")


def check_validation_freq(freq: Any) -> int | tuple[int, ...]:
    """The number of epochs between validations, or the epochs with one, counted from 1.

    Raises:
        FitError: it is neither.
    """
    if isinstance(freq, list | tuple | set | range) and all(isinstance(one, int) for one in freq):
        return tuple(sorted(freq))
    check_numbers(validation_freq=freq)
    if freq is None:
        raise FitError("validation_freq (None): must be a whole number of at least 1, or a list of epochs")
    return int(freq)


def check_shuffle(shuffle: Any) -> bool:
    """Whether examples are shuffled; "batch" shuffles only inside batches, which changes no step.

    Raises:
        FitError: it is neither.
    """
    if shuffle == "batch":
        return False
    if not isinstance(shuffle, bool):
        raise FitError(f"shuffle ({shuffle}): must be True or False")
    return shuffle


def check_verbose(verbose: Any) -> int:
    """0, 1 or 2; "auto" is 1.

    Raises:
        FitError: it is none of these.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise FitError(f"verbose ({verbose}): must be 'auto', 0 (silent), 1 (progress) or 2 (a line an epoch)")
    return 1 if verbose == "auto" else int(verbose)


def overrides_of(options: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    """The options as on the command line, such as "train.steps_per_execution=10".

    Raises:
        FitError: one is an argument of `fit`, or belongs to the command line alone.
    """
    if isinstance(options, str):
        raise FitError(f"options ({options}): must be a list or a dict, such as {{'checkpoint.every_secs': 60}}")
    if isinstance(options, Mapping):
        overrides = [f"{name}={_text(value)}" for name, value in options.items()]
    else:
        overrides = list(options or ())
    for override in overrides:
        if not isinstance(override, str):
            raise FitError(f"options: holds {kind_of(override)}; write 'checkpoint.every_secs=60', or give a dict")
        name = override.lstrip("+").partition("=")[0]
        if name in ARGUMENT_OF:
            raise FitError(f"options: {name} is the argument {ARGUMENT_OF[name]} of fit; give that")
        if name.partition(".")[0] in OF_THE_COMMAND:
            raise FitError(f"options: {name} belongs to the command line; fit has the model and the data themselves")
    return overrides


def _text(value: Any) -> str:
    """A value in the grammar of the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return str(value)


def has_terminator(callbacks: Iterable[keras.callbacks.Callback]) -> bool:
    """Whether a loss that is not finite is to end the training without an error."""
    return any(isinstance(each, keras.callbacks.TerminateOnNaN) for each in callbacks)
