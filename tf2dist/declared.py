"""What has come as JSON, as the dataclass that it is to be: every field of its declared type, or an error.

A type may be `Annotated` with what holds its values, such as a range.
"""

import contextlib
import dataclasses
import types
import typing
from functools import cache
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


class UndeclaredError(ValueError):
    """Something is not what is declared.

    Attributes:
        where: the dotted name of the field.
    """

    def __init__(self, where: str, value: str) -> None:
        super().__init__(f"{where}: {value:.40}")
        self.where = where


def from_json(kind: type[T], fields: dict[str, Any], where: str = "", *, is_open: bool = False) -> T:
    """An object of a dataclass, with those nested in it, from the fields of a JSON object.

    Args:
        where: the dotted name of the object, for errors.
        is_open: the fields may be those of an earlier or a later version: of those with a default any may be missing,
            and unknown ones are left out.

    Raises:
        UndeclaredError: a field is missing, unknown or of another type.
    """
    hints, required = _declared(typing.cast(Any, kind))
    if is_open:
        fields = {name: value for name, value in fields.items() if name in hints}
        for name in required:
            if name not in fields:
                raise UndeclaredError(_inside(where, name), "is missing")
    elif fields.keys() != hints.keys():
        raise UndeclaredError(where, ", ".join(sorted(fields.keys() ^ hints.keys())))
    return kind(**{name: _checked(fields[name], hints[name], _inside(where, name), is_open) for name in fields})


@cache
def _declared(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """The types of all fields, and the names of those without a default."""
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return typing.get_type_hints(kind, include_extras=True), required


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _checked(value: Any, hint: Any, where: str, is_open: bool) -> Any:
    """The value, if it is of the declared type; arrays of JSON become tuples."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        if _checked(value, of[0], where, is_open) in of[1]:
            return value
    elif origin in (typing.Union, types.UnionType):
        if value is None and type(None) in of:
            return None
        (hint,) = (item for item in of if item is not type(None))
        return _checked(value, hint, where, is_open)
    elif origin is tuple and isinstance(value, list):
        if of[-1] is Ellipsis:
            return tuple(_checked(item, of[0], where, is_open) for item in value)
        if len(value) == len(of):
            return tuple(_checked(item, inner, where, is_open) for item, inner in zip(value, of, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {name: _checked(item, of[1], where, is_open) for name, item in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_json(typing.cast(type, hint), value, where, is_open=is_open)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number of hundreds of digits
            return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise UndeclaredError(where, repr(value))
