"""The rules for the arguments of models and optimizers, which are free in name but not in kind."""

import math
from typing import Any

from tf2dist.config.choices import keys
from tf2dist.config.rules import Rule

SCHEDULES = ("constant", "cosine")
MAX_UNITS = 1_000_000
SWITCHES = ("amsgrad", "nesterov", "centered", "batch_norm")
FRACTIONS = ("beta_1", "beta_2", "rho", "momentum", "dropout")
POSITIVE = ("learning_rate", "epsilon")
POSITIVE_OR_NULL = ("clipnorm", "clipvalue", "global_clipnorm")
NOT_NEGATIVE = ("weight_decay", "initial_accumulator_value")


def rules(group: str, arguments: dict[str, Any], builtin: bool) -> list[Rule]:
    """Arguments are finite numbers, switches, or lists of numbers; those of a plugin may be words, too.

    Args:
        group: model, optimizer or data.
        builtin: whether no plugin can have given the names another meaning; if so they have a range, too.
    """
    found: list[Rule] = []
    own = keys(group, arguments["name"]) if isinstance(arguments.get("name"), str) else ()
    for key, value in arguments.items():
        name = f"{group}.{key}"
        if key == "name":
            found.append((name, value, isinstance(value, str), "must be a name"))
        elif name == "optimizer.schedule":
            known = isinstance(value, str) and value in SCHEDULES
            found.append((name, value, known, f"must be {' or '.join(SCHEDULES)}"))
            if known and value != "constant":
                rate, must = arguments.get("learning_rate"), f"must be a number for optimizer.schedule={value}"
                found.append(("optimizer.learning_rate", rate, _is_number(rate), must))
        elif not _is_plain(value, words=not builtin and key not in own):
            endless, its = isinstance(value, float), _range(key, value)[1] if builtin else ""
            what = (
                "a number, true or false, or null" if key in own else "a number, a word, true, false, null, or a list"
            )
            found.append((name, value, False, "must be a finite number" if endless else its or f"must be {what}"))
        elif builtin:
            found.append((name, value, *_range(key, value)))
    return found


def with_floats(group: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same, with 1.0 for 1 where a number need not be whole: Keras takes no whole number for a rate."""
    fractional = {*FRACTIONS, *POSITIVE, *POSITIVE_OR_NULL, *NOT_NEGATIVE} & {*keys(group, arguments["name"])}
    if group == "optimizer":
        fractional.add("learning_rate")  # of a plugin's, too
    return {
        key: float(value) if key in fractional and type(value) is int else value for key, value in arguments.items()
    }


def _is_plain(value: Any, words: bool) -> bool:
    """Whether a value is a number, a switch or nothing, or a word where these may be; or a list of such."""
    items = value if isinstance(value, list) else [value]
    return all(item is None or _is_finite(item) or (words and isinstance(item, str)) for item in items)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_number(value: Any) -> bool:
    return _is_finite(value) and not isinstance(value, bool)


def _range(key: str, value: Any) -> tuple[bool, str]:
    """Whether a value is one that the argument can have, and the rule."""
    if key == "hidden_units":
        items = value if isinstance(value, list) else [None]
        whole = all(isinstance(item, int) and not isinstance(item, bool) and 0 < item <= MAX_UNITS for item in items)
        return whole, f"must be a list such as [300,50] of whole numbers; each must be more than 0, up to {MAX_UNITS:,}"
    if key in SWITCHES:
        return isinstance(value, bool), "must be true or false"
    if key in FRACTIONS:
        return _is_number(value) and 0 <= value < 1, "must be at least 0 and less than 1"
    if key in POSITIVE:
        return _is_number(value) and value > 0, "must be more than 0"
    if key in POSITIVE_OR_NULL:
        return value is None or (_is_number(value) and value > 0), "must be more than 0, or null"
    if key in NOT_NEGATIVE:
        return value is None or (_is_number(value) and value >= 0), "must be at least 0, or null"
    return True, ""
