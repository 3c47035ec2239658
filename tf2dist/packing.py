"""Messages on their way between processes: a dataclass as one JSON object, and back.

The object has the name of the class as "type", the `VERSION` of the vocabularies, and the fields. Who reads says
which messages may come, and gets one of these, with every field of its declared type, or an error that names what
came instead.
"""

import contextlib
import dataclasses
import json
import types
import typing
from functools import cache
from typing import Any

VERSION = 3  # 3: a version in every message


class MessageError(ValueError):
    """What has come is no message that may come."""


class VersionError(MessageError):
    """What has come is of another version of tf2dist."""


def pack(message: Any) -> bytes:
    """The JSON object of a message, without line breaks."""
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    whole = {"type": type(message).__name__, "version": VERSION, **fields}
    return json.dumps(whole, separators=(",", ":"), default=_as_fields).encode()


def _as_fields(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def unpack(data: bytes, among: Any) -> Any:
    """The message that `data` holds.

    Args:
        among: the messages that may come, a union of classes.

    Raises:
        VersionError: it is of another version.
        MessageError: it is none of these, or a field is missing, unknown or of another type.
    """
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: a thousand brackets
        raise MessageError("a message that is not JSON") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("type"), str):
        raise MessageError("a message without a type")
    kind, version = whole.pop("type"), whole.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise VersionError(f"another version of tf2dist: protocol {version!s:.20}, here {VERSION}")
    if kind not in (known := _by_name(among)):
        raise MessageError(f"a message of unknown type ({kind:.40})")
    return _made(known[kind], whole, kind)


@cache
def _by_name(among: Any) -> dict[str, Any]:
    return {one.__name__: one for one in typing.get_args(among) or (among,)}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _made(kind: Any, fields: dict[str, Any], where: str) -> Any:
    """A message of a class, or what is nested in one, from the fields of a JSON object."""
    hints = _hints(kind)
    if fields.keys() != hints.keys():
        odd = ", ".join(sorted(fields.keys() ^ hints.keys()))
        raise MessageError(f"a message that makes no sense ({where}: {odd:.40})")
    return kind(**{name: _checked(fields[name], hint, f"{where}.{name}") for name, hint in hints.items()})


def _checked(value: Any, hint: Any, where: str) -> Any:
    """The value, if it is of the declared type; arrays of JSON become tuples."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in of:
            return None
        (hint,) = (one for one in of if one is not type(None))
        return _checked(value, hint, where)
    if origin is tuple and isinstance(value, list):
        if of[-1] is Ellipsis:
            return tuple(_checked(one, of[0], where) for one in value)
        if len(value) == len(of):
            return tuple(_checked(one, inner, where) for one, inner in zip(value, of, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {name: _checked(one, of[1], where) for name, one in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _made(hint, value, where)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number of hundreds of digits
            return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise MessageError(f"a message that makes no sense ({where}: {value!r:.40})")
