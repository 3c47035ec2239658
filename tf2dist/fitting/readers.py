"""Which calls of callbacks need the weights: only those bring them from the tasks to the process that has called `fit`.

Of Keras's own callbacks it is known, of most functions it can be seen, and any other callback may do in its hooks what
it likes.
"""

import dis
import inspect
import types
from collections.abc import Collection, Iterable
from typing import Any

import keras
import numpy as np

BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
# The hooks that each kind of call calls; see `training.hooks.Hooks.post`.
HOOKS = {
    "begin": ("set_model", "on_train_begin", "on_epoch_begin"),
    "epoch": ("on_test_begin", "on_test_end", "on_epoch_end", "on_epoch_begin"),
    "pause": BATCH_HOOKS,
    "end": ("on_train_end",),
}
# Of Keras's own: these neither see nor change weights, whatever their arguments are.
WITHOUT_WEIGHTS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
)
# Whose hooks of batches look at numbers alone.
WITHOUT_ARRAYS = (*WITHOUT_WEIGHTS, keras.callbacks.TensorBoard, keras.callbacks.TerminateOnNaN)
PLAIN = (bool, int, float, str)  # no None, in whose place a model may be put later
LIBRARIES = ("datetime", "json", "keras", "logging", "math", "numpy", "os", "random", "tensorflow", "time")
ESCAPES = ("eval", "exec", "globals", "__import__")


def calls_with_weights(callbacks: Iterable[keras.callbacks.Callback]) -> set[str]:
    """The kinds of calls in which one of the callbacks may see or change weights, or what optimizers keep for them."""
    return {call for callback in callbacks for call in _calls_with_weights(callback)}


def reads_progress(callbacks: Collection[keras.callbacks.Callback]) -> bool:
    """Whether hooks of batches get the metrics that come with the progress; a pause brings its own."""
    has_hooks = any(has_hook(one, BATCH_HOOKS) for one in callbacks if type(one) not in WITHOUT_ARRAYS)
    return has_hooks and "pause" not in calls_with_weights(callbacks)


def has_hook(callback: keras.callbacks.Callback, names: Iterable[str]) -> bool:
    """Whether a callback has one of these hooks; a Callback of Keras has each, which does nothing."""
    # `LambdaCallback` sets its hooks as attributes of the object, which the class does not show.
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)
        for name in names
    )


def _calls_with_weights(callback: Any) -> set[str]:
    kind, all_hooks = type(callback), {call for call, names in HOOKS.items() if has_hook(callback, names)}
    own = [vars(callback)[name] for names in HOOKS.values() for name in names if name in vars(callback)]
    if kind is keras.callbacks.LambdaCallback:
        return set() if all(map(reaches_no_model, own)) else all_hooks
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        # It leaves the model as it was before the epoch that it ends.
        return {"begin", "epoch"} | (set() if kind is keras.callbacks.TerminateOnNaN and not own else all_hooks)
    # A subclass of the user's may do anything, and so may a function that was put into an object.
    if own:
        return all_hooks
    if kind in WITHOUT_WEIGHTS:
        return set()
    if kind is keras.callbacks.EarlyStopping:
        return all_hooks if callback.restore_best_weights else set()
    if kind is keras.callbacks.ModelCheckpoint:
        return {"epoch"} if callback.save_freq == "epoch" else {"epoch", "pause"}
    if kind is keras.callbacks.TensorBoard:
        return {"epoch"} if callback.histogram_freq or callback.embeddings_freq else set()
    if kind is keras.callbacks.LearningRateScheduler:
        return set() if reaches_no_model(callback.schedule) else all_hooks
    return all_hooks


def reaches_no_model(function: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether it is certain that a function refers to no model.

    Args:
        seen: the ids of functions that are looked at already.
    """
    if id(function) in seen:
        return True
    if not isinstance(function, types.FunctionType) or vars(function):
        return False
    code = function.__code__
    if any(isinstance(constant, types.CodeType) for constant in code.co_consts):
        return False
    try:
        names = inspect.getclosurevars(function)
    except ValueError:  # a local variable of the function around it has no value yet
        return False
    for instruction in dis.get_instructions(code):
        is_unknown = instruction.argval not in names.globals.keys() | names.builtins.keys()
        if instruction.opname == "IMPORT_NAME" or (instruction.opname == "LOAD_GLOBAL" and is_unknown):
            return False
    if names.builtins.keys() & set(ESCAPES):
        return False
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held = [*names.nonlocals.values(), *names.globals.values(), *defaults]
    return all(_is_harmless(value, seen | {id(function)}) for value in held)


def _is_harmless(value: Any, seen: frozenset[int]) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in LIBRARIES
    if isinstance(value, types.FunctionType):  # its own module: that of a wrapper may be the one of what it wraps
        module = str(value.__globals__.get("__name__", ""))
        return module.partition(".")[0] in LIBRARIES or reaches_no_model(value, seen)
    module = str(getattr(value, "__module__", None) or type(value).__module__)
    is_code = isinstance(value, type | types.BuiltinFunctionType | np.ufunc)
    return isinstance(value, PLAIN) or (is_code and module.partition(".")[0] in LIBRARIES)
