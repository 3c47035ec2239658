"""Reading of trees, such as those of JSON, as dataclasses: every field of its declared type, or an error.

A type may be `Annotated` with what holds its values, such as a range.
"""

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


class TreeReader:
    """Makes dataclasses of trees. This one takes values as JSON has them; `config.decode` has one that converts them.

    Args:
        is_open: the fields may be those of an earlier or a later version: of those with a default any may be missing,
            and unknown ones are left out.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_open = is_open

    def read(self, kind: type[T], tree: Any, where: str = "") -> T:
        """An object of a dataclass, with those nested in it; `where`: its dotted name, for errors."""
        if not isinstance(tree, dict):
            raise self.error(kind, tree, where)
        hints, _ = declared(typing.cast(Any, kind))
        return kind(
            **{
                name: self._value(hints[name], value, inside(where, name))
                for name, value in self.fields(kind, tree, where).items()
            }
        )

    def fields(self, kind: Any, tree: dict[str, Any], where: str) -> dict[str, Any]:
        """The values of the fields; an error if they are not the declared ones."""
        hints, required = declared(kind)
        if not self._is_open and tree.keys() != hints.keys():
            raise UndeclaredError(where, ", ".join(sorted(tree.keys() ^ hints.keys())))
        if missing := [name for name in required if name not in tree]:
            raise UndeclaredError(inside(where, missing[0]), "is missing")
        return {name: value for name, value in tree.items() if name in hints}

    def scalar(self, kind: Any, value: Any) -> Any:
        """The value, if it is of this type; ValueError if it is not."""
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if type(value) is not kind:
            raise ValueError
        return value

    def error(self, hint: Any, value: Any, where: str) -> Exception:
        """The error for a value that is not of its type."""
        return UndeclaredError(where, repr(value))

    def item(self, where: str, index: int) -> str:
        """The name of an item of a list."""
        return where

    def _value(self, hint: Any, value: Any, where: str) -> Any:
        """The value, if it is of the declared type."""
        origin, of = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return value
        if origin is Annotated:
            if self._value(of[0], value, where) in of[1]:
                return value
        elif origin in (typing.Union, types.UnionType):
            (hint,) = (item for item in of if item is not types.NoneType)
            return None if value is None else self._value(hint, value, where)
        elif dataclasses.is_dataclass(hint):
            return self.read(typing.cast(type, hint), value, where)
        elif origin is dict and isinstance(value, dict):
            return {name: self._value(of[1], item, where) for name, item in value.items()}
        elif origin in (list, tuple) and isinstance(value, list):
            kinds = of if origin is tuple and of[-1] is not Ellipsis else of[:1] * len(value)
            if len(kinds) == len(value):
                named = ((self.item(where, index), item) for index, item in enumerate(value))
                return origin(self._value(kind, item, name) for kind, (name, item) in zip(kinds, named, strict=True))
        elif origin is None:
            try:
                return self.scalar(hint, value)
            except (ValueError, OverflowError):  # the latter for a whole number of hundreds of digits
                pass
        raise self.error(hint, value, where)


@cache
def declared(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """The types of all fields, and the names of those without a default."""
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return typing.get_type_hints(kind, include_extras=True), required


def inside(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)
