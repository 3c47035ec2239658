"""Converts plain values, as the command line and YAML give them, into the typed fields of a dataclass.

OmegaConf could do this too, but the reason of an error would have to be parsed out of its English messages, and
it accepts any int as bool.
"""

from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from tf2dist.errors import ConfigError

T = TypeVar("T")

CATCH_ALL = {"catch_all": True}  # metadata of the field that collects the keys without a field of their own
BOOLS = {  # the words of YAML 1.1, and 0 and 1
    **dict.fromkeys(("true", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "no", "n", "off", "0"), False),
}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word or a path"}


def to_dataclass(cls: type[T], tree: Any, name: str = "") -> T:
    """An object of the dataclass `cls` with the values of a tree; missing fields have their defaults.

    Args:
        name: the dotted name of the section, for messages; "" for the whole configuration.

    Raises:
        ConfigError: one line that names the option and says what it must be.
    """
    _check_dict(tree, name or "the configuration")
    # The arguments of data stand among its options in files, and are separate in the dataclass.
    known = {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]
    catch_all = next((entry.name for entry in known.values() if entry.metadata.get("catch_all")), None)
    values: dict[str, Any] = {catch_all: {}} if catch_all else {}
    for key, value in tree.items():
        dotted = f"{name}.{key}" if name else str(key)
        if key in known and key != catch_all:
            values[key] = _typed(known[key].type, value, dotted)
        elif catch_all:
            values[catch_all][key] = value
        else:
            raise ConfigError(f"{dotted}: there is no such option; see --help")
    return cls(**values)


def _typed(kind: Any, value: Any, name: str) -> Any:
    """The value converted to `kind`, the type of a field of the configuration."""
    if isinstance(kind, type) and is_dataclass(kind):
        return to_dataclass(kind, value, name)
    if get_origin(kind) is dict:
        _check_dict(value, name)
        return value
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{name}: must be a list such as [a,b]")
        return [_typed(get_args(kind)[0], item, f"{name}[{index}]") for index, item in enumerate(value)]
    # Of the unions there is only `T | None`, with T first.
    kinds = get_args(kind) or (kind,)
    if value is None and NoneType in kinds:
        return None
    try:
        return _scalar(kinds[0], value)
    except ValueError:
        value_text = "null" if value is None else value
        raise ConfigError(f"{name} ({value_text}): must be {KINDS[kinds[0]]}") from None


def _check_dict(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} ({value}): holds several options; give them one by one, see --help")


def _scalar(kind: type, value: Any) -> Any:
    """The value as `kind`: int, float, bool or str. Raises ValueError if it is neither that nor a text of it."""
    # Everything that has only one reading is accepted; 1.5 for a whole number has none.
    takes: dict[type, tuple[type, ...]] = {int: (int, str), float: (int, float, str), bool: (bool, int, str)}
    # Not isinstance, for which a bool is an int too.
    if type(value) not in takes.get(kind, (bool, int, float, str)):
        raise ValueError
    if kind is bool:
        if (text := str(value).lower()) not in BOOLS:
            raise ValueError
        return BOOLS[text]
    return kind(value)
