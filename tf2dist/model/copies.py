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
    if _is_of_keras(kind):  # its configuration is complete
        return None
    varying = _varying(kind)  # type: ignore[arg-type]
    settings = {key: v for key, v in attributes.items() if key not in varying and not key.startswith(OF_TENSORFLOW)}
    return different_attribute(settings, others)


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


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in KERAS


def _is_internal(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] in (*KERAS, "tf2dist")


@functools.cache
def _varying(kind: type) -> set[str]:
    """The attributes of a class of the user's that are no settings: Keras's, and those that methods change for it."""
    classes = [one for one in kind.__mro__ if one is not object]
    of_keras = [one for one in classes if _is_of_keras(one)]
    called = {name for one in of_keras for name in dir(one)} - {*SETTING}
    of_base = {name for one in of_keras for method in vars(one).values() for name in _assigned(method)}
    of_methods = {
        name
        for one in classes
        if not _is_of_keras(one)
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
