"""The state of callbacks as arrays of numbers, for checkpoints: plain values only, so that nothing is unpickled.

A callback's state is every attribute that has changed since `on_train_begin` and is a number, a string, None, a numpy
array, or a list, tuple or dict of these. Anything else, such as a file or a function, is not saved: the callback has to
create it again.
"""

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import keras
import ml_dtypes  # noqa: F401  numpy then knows bfloat16 by its name
import numpy as np

from tf2dist.errors import CheckpointError, first_line
from tf2dist.training.hooks import NamedArrays

TEXT = "callbacks"  # the name of the array that holds everything but the arrays, as JSON in UTF-8
NUMBERS = "biufc"
Text = dict[str, dict[str, Any]]  # attributes by callback


class NotPlain(Exception):
    """A value that cannot be saved."""


def state_of(callbacks: Iterable[keras.callbacks.Callback]) -> NamedArrays:
    """All plain attributes of all callbacks."""
    arrays: NamedArrays = {}
    text: Text = {}
    for name, callback in _by_name(callbacks).items():
        text[name] = {}
        for attribute in sorted(vars(callback).keys() - _constructor_arguments(callback)):
            # Filled on the way: if a later item of a list is not plain, the arrays of earlier ones must not stay.
            new_arrays: NamedArrays = {}
            try:
                text[name][attribute] = _encoded(vars(callback)[attribute], f"{TEXT}/{name}/{attribute}", new_arrays)
            except NotPlain:
                continue
            arrays |= new_arrays
    return {TEXT: _bytes(json.dumps(text).encode()), **arrays}


def changes_since(before: NamedArrays, after: NamedArrays) -> NamedArrays:
    """The part of the state `after` whose attributes are new or differ from those in `before`."""
    # What has not changed comes from the call of `fit`, which may give another patience when a run is resumed.
    texts = [_text(state) for state in (before, after)]
    changed = {
        name: {
            attribute: value
            for attribute, value in attributes.items()
            if not _equal(texts[0].get(name, {}), attributes, attribute, f"{TEXT}/{name}/{attribute}", before, after)
        }
        for name, attributes in texts[1].items()
    }
    # With a slash at the end, so that an attribute "best" does not take along the arrays of "best_weights".
    prefixes = tuple(f"{TEXT}/{name}/{attribute}/" for name, values in changed.items() for attribute in values)
    changed_arrays = {name: array for name, array in after.items() if f"{name}/".startswith(prefixes or ("\0",))}
    return {TEXT: _bytes(json.dumps(changed).encode()), **changed_arrays}


def _equal(old: dict[str, Any], new: dict[str, Any], attribute: str, prefix: str, *states: NamedArrays) -> bool:
    # As text, in which NaN equals NaN, and 1, 1.0 and True differ.
    if attribute not in old or json.dumps(old[attribute]) != json.dumps(new[attribute]):
        return False
    arrays, new_arrays = (
        {name: array for name, array in state.items() if f"{name}/".startswith(f"{prefix}/")} for state in states
    )
    return arrays.keys() == new_arrays.keys() and all(
        np.array_equal(array, new_arrays[name]) for name, array in arrays.items()
    )


def restore(callbacks: Iterable[keras.callbacks.Callback], state: NamedArrays) -> None:
    """Sets the attributes of the callbacks that the state of a checkpoint contains; all others stay as they are.

    Raises:
        CheckpointError: the state is damaged.
    """
    if TEXT not in state:
        return
    callbacks_by_name = _by_name(callbacks)
    try:
        for name, attributes in _text(state).items():
            for attribute, value in attributes.items():
                # A run may be resumed without a callback that it had.
                if name in callbacks_by_name:
                    setattr(callbacks_by_name[name], attribute, _decoded(value, state))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"run_dir: the state of the callbacks in its checkpoint cannot be read ({first_line(str(error))}); name "
            "another run_dir"
        ) from None


def _by_name(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    """Callbacks by class and number within the class, so that the order of classes may change between two runs."""
    count: Counter[str] = Counter()
    result = {}
    for callback in callbacks:
        # The name of a class in a function has "<locals>" in it, and arrays are stored as files of these names.
        kind = re.sub(r"[^\w.]", ".", type(callback).__qualname__)
        result[f"{kind}-{count[kind]}"] = callback
        count[kind] += 1
    return result


def _constructor_arguments(callback: keras.callbacks.Callback) -> set[str]:
    """Attributes that are not state: those of every callback, and the arguments by which one of Keras was made."""
    # A user's own class may count in an attribute that is named like an argument; none of Keras's does.
    attributes = set(vars(keras.callbacks.Callback()))
    for kind in type(callback).__mro__:
        if kind.__module__.partition(".")[0] == "keras" and "__init__" in vars(kind):
            attributes |= set(inspect.signature(vars(kind)["__init__"]).parameters)
    return attributes


def _text(state: NamedArrays) -> Text:
    text: Text = json.loads(state[TEXT].tobytes())
    return text


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _encoded(value: Any, key_prefix: str, arrays: NamedArrays) -> Any:
    """The value in a form for JSON; numpy arrays go into `arrays`, under the names of their places.

    Raises:
        NotPlain: the value, or something in it, is of another type.
    """
    # A subclass such as an enum could not be read back as what it was; its number can.
    if value is None or isinstance(value, bool | int | float | str):
        return value if type(value) in (type(None), bool, int, float, str) else _number(value)
    if isinstance(value, np.generic):
        return _number(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in NUMBERS and value.dtype.name != "bfloat16":
            raise NotPlain
        # As bytes: a checkpoint refuses arrays that are not finite, but here infinity is a value like any other.
        arrays[key_prefix] = _bytes(np.ascontiguousarray(value).tobytes())
        return {"array": [key_prefix, value.dtype.name, list(value.shape)]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encoded(item, f"{key_prefix}/{n}", arrays) for n, item in enumerate(value)]}
    # No subclass: a defaultdict would come back without its default. Pairs, since keys in JSON are strings only.
    if type(value) is dict:
        pairs = [
            [_encoded(key, f"{key_prefix}/{n}-key", arrays), _encoded(value[key], f"{key_prefix}/{n}", arrays)]
            for n, key in enumerate(value)
        ]
        return {"dict": pairs}
    raise NotPlain


def _number(value: Any) -> Any:
    """A number or string of numpy, or of a subclass, as Python's own type."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, str):
        return str(value)
    raise NotPlain


def _decoded(value: Any, arrays: NamedArrays) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    # The copy is the callback's own, and can be written to; what `frombuffer` gives cannot.
    if kind == "array":
        name, dtype, shape = content
        return np.frombuffer(arrays[name].tobytes(), np.dtype(dtype)).reshape(shape).copy()
    if kind == "dict":
        return {_decoded(key, arrays): _decoded(item, arrays) for key, item in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"a value of kind {kind}")
    decoded = [_decoded(item, arrays) for item in content]
    return decoded if kind == "list" else tuple(decoded)
