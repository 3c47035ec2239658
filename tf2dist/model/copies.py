"""Comparison of a model with the copy that Keras makes of it from what it has saved."""

import dis
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# The types of settings, and of attributes in which a step could count in Python.
PLAIN = (bool, int, float, str, type(None))
KERAS = ("keras", "tensorflow")
# Methods that set what they are given, unlike others that Keras calls.
SETTING = ("__init__", "compile", "compile_from_config")
# What Keras's own classes set and a configuration may leave out.
SETTINGS = {"reduction"}
# A layer without a seed may draw its own; the states of random generators are sent by themselves.
VARYING = {"seed"}
OF_TENSORFLOW = "_self_"  # begins the names of attributes by which TensorFlow tracks objects


def lost_in_copy(model: keras.Model, copy: keras.Model) -> tuple[type, str] | None:
    """The class of an object in a model, and an attribute of it that the copy lacks or has with another value."""
    # The values keep the objects alive: the `id` of one that is gone could be given to another.
    visited: dict[int, Any] = {}
    queue: list[tuple[Any, Any]] = [(model, copy)]
    while queue:
        original, copied = queue.pop()
        if id(original) in visited:
            continue
        visited[id(original)] = original
        if isinstance(original, dict) and isinstance(copied, dict):
            queue += [(value, copied[key]) for key, value in original.items() if key in copied]
        elif isinstance(original, list | tuple) and isinstance(copied, list | tuple):
            queue.extend(zip(original, copied, strict=False))
        elif _is_saved(original) and type(original) is type(copied):
            if (key := _lost_attribute(original, copied)) is not None:
                return type(original), key
            queue += [(value, vars(copied).get(key)) for key, value in vars(original).items()]
    return None


def lost_of_weight(weight: keras.Variable, copied: keras.Variable) -> str:
    """What the copy of a weight lacks or has otherwise of what its layer gave it when it made it; "" for nothing."""
    for name in ("regularizer", "constraint"):
        one, other = getattr(weight, name), getattr(copied, name)
        if not _is_same_object(one, other) or different_attribute(_attributes(one), _attributes(other)):
            return name
    return ""


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _is_saved(value: Any) -> bool:
    # What an initializer gives is among the weights, which are sent.
    return hasattr(value, "get_config") and hasattr(value, "__dict__") and not isinstance(value, keras.Initializer)


def _lost_attribute(original: Any, copied: Any) -> str | None:
    kind = type(original)
    attributes, others = vars(original), vars(copied)
    is_function = (types.FunctionType, types.MethodType)
    # Such as a train_step of this object alone. Keras itself wraps some of the methods, and `intercept_updates` others.
    of_user = {key: v for key, v in attributes.items() if isinstance(v, is_function) and not _is_internal(v)}
    lost: list[str] = [key for key in of_user if hasattr(kind, key) and key not in others]
    if lost:
        return lost[0]
    settings = settings_of(original)
    # One of Keras's has a configuration, but a class of the user's may have made it, whose own is not complete.
    if (lost_setting := different_attribute(settings, others | settings_of(copied))) is not None or is_of_keras(kind):
        return lost_setting
    objects = {key: v for key, v in settings.items() if not hasattr(kind, key) and _is_object(v)}
    return next((key for key, v in objects.items() if not _is_same_object(v, others.get(key))), None)


def settings_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that make it another one, and that none of its methods changes."""
    kind, attributes = type(value), vars(value)
    if is_of_keras(kind):
        settings = {key: v for key, v in attributes.items() if key in _arguments(kind)}  # type: ignore[arg-type]
        # Those that wrap a function have its arguments in a dict, and Huber saves nothing of it.
        if isinstance(value, keras.Loss | keras.Metric):
            for arguments in (v for v in attributes.values() if isinstance(v, dict)):
                settings |= arguments
        return settings
    varying = _varying(kind)  # type: ignore[arg-type]
    return {key: v for key, v in attributes.items() if key not in varying and not key.startswith(OF_TENSORFLOW)}


def _is_object(value: Any) -> bool:
    # Optimizers are compared by themselves: a step need not apply all of them.
    return isinstance(value, types.FunctionType) or (_is_saved(value) and not isinstance(value, keras.Optimizer))


def _is_same_object(one: Any, other: Any) -> bool:
    """Whether a copy has the same function, or an object of the same class, whose attributes are compared later."""
    if one is other or not isinstance(one, types.FunctionType):
        return type(one) is type(other)
    # Keras makes a new function of the code of a lambda.
    return isinstance(other, types.FunctionType) and one.__code__ == other.__code__


def different_attribute(original: Mapping[str, Any], copied: Mapping[str, Any]) -> str | None:
    """The first attribute of plain values that a copy lacks or has with another value."""
    plain = {key: value for key, value in original.items() if _is_plain(value)}
    return next((key for key, value in plain.items() if key not in copied or not _are_equal(value, copied[key])), None)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or _is_array(value)


def _is_array(value: Any) -> bool:
    if isinstance(value, tf.Tensor):
        return tf.executing_eagerly() and hasattr(value, "numpy") and value.dtype.is_numpy_compatible
    return isinstance(value, np.ndarray | np.generic) and value.dtype != object


def _are_equal(one: Any, other: Any) -> bool:
    if _is_array(one) or _is_array(other):
        return _is_plain(other) and np.array_equal(np.asarray(one), np.asarray(other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_are_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        is_sequence = isinstance(other, list | tuple) and len(one) == len(other)
        return is_sequence and all(map(_are_equal, one, other))
    if isinstance(one, str) and isinstance(other, str):  # Keras numbers equal names by what a process has made before
        one, other = (re.sub(r"_\d+", "", text) for text in (one, other))
    return bool(one == other) or (one != one and other != other)


def is_of_keras(kind: type) -> bool:
    """Whether a class is one of Keras or TensorFlow."""
    return kind.__module__.partition(".")[0] in KERAS


def _is_internal(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] in (*KERAS, "tf2dist")


@functools.cache
def _arguments(kind: type) -> set[str]:
    """The arguments by which Keras makes an object, beside those that a copy may have in another form."""
    return set(inspect.signature(kind).parameters) - {"name", *VARYING}


@functools.cache
def _varying(kind: type) -> set[str]:
    """The attributes of a class of the user's that are no settings: Keras's, and those that methods change for it."""
    classes = [one for one in kind.__mro__ if one is not object]
    of_keras = [one for one in classes if is_of_keras(one)]
    called = {name for one in of_keras for name in dir(one)} - {*SETTING}
    of_base = {name for one in of_keras for method in vars(one).values() for name in _assigned(method)}
    of_methods = {
        name
        for one in classes
        if not is_of_keras(one)
        for method_name, method in vars(one).items()
        if method_name in called or isinstance(method, functools.cached_property)
        for name in (*_assigned(method), method_name)
    }
    return (of_base - SETTINGS) | of_methods | VARYING


def _assigned(method: Any) -> Iterator[str]:
    """The attributes that a method assigns, of whatever object."""
    function = inspect.unwrap(method) if callable(method) else getattr(method, "fset", None)
    codes = [function.__code__] if isinstance(function, types.FunctionType) else []
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from (one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")
