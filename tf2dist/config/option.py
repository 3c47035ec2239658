"""How an option is declared: with its default, its help text, and the conditions for a value."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, TypeGuard, TypeVar, cast

T = TypeVar("T")
Rule = tuple[str, Any, bool, str]  # name, value, whether the rule holds, what the value must be

# Every number has an upper limit: a larger one is a mistake, or makes a call fail much later.
MAX_COUNT = 10**12  # of steps: far more than anyone trains, far less than 64 bits hold
MAX_SECS = 366 * 24 * 3600.0  # a year; system calls reject much longer timeouts


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition for one value, and the text that says what the value must be."""

    holds: Callable[[Any], bool]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of an option: in the metadata of its field, or in the table of arguments.

    Attributes:
        constraints: for any value but None; the message gives the first one that is broken.
        is_choice: whether the value comes with a chosen file in ``conf/`` and cannot be given by itself.
    """

    default: Any = None
    help: str = ""
    constraints: tuple[Constraint, ...] = ()
    is_choice: bool = False

    @property
    def default_text(self) -> str:
        """The default as it would be written on the command line."""
        if self.default is None or isinstance(self.default, bool):
            return {None: "null", True: "true", False: "false"}[self.default]
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def option(default: T, *constraints: Constraint, help: str = "", is_choice: bool = False) -> T:
    """Declares an option as a field of a dataclass; each object gets its own copy of a list."""
    # As the type of the default and not as a `Field`, so that type checkers accept the declaration.
    metadata = {"option": Option(default=default, help=help, constraints=constraints, is_choice=is_choice)}
    if isinstance(default, list):
        return cast(T, field(default_factory=default.copy, metadata=metadata))
    return field(default=default, metadata=metadata)


def choice(default: T, *constraints: Constraint) -> T:
    """An option that is chosen with ``group=name``."""
    return option(default, *constraints, is_choice=True)


def options_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """The dotted names of all options of a dataclass and of those nested in it, in the order of declaration."""
    for entry in fields(section):
        if is_dataclass(entry.type):
            yield from options_of(entry.type, f"{prefix}{entry.name}.")
        elif "option" in entry.metadata:
            yield f"{prefix}{entry.name}", entry.metadata["option"]


def rules_of(section: Any, prefix: str = "") -> list[Rule]:
    """The rules that the options of an object declare for themselves; `prefix` is put before their names."""
    rules = []
    for name, declared in options_of(section):
        value = attrgetter(name)(section)
        text = "" if value is None else broken(value, *declared.constraints)
        rules.append((f"{prefix}{name}", value, not text, text))
    return rules


def broken(value: Any, *constraints: Constraint) -> str:
    """The text of the first condition that a value breaks, or ""."""
    # In the order of declaration, so that a check of the type can come before one of the range.
    return next((constraint.text for constraint in constraints if not constraint.holds(value)), "")


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def at_least(low: float) -> Constraint:
    return Constraint(lambda value: is_number(value) and value >= low, f"must be at least {low}")


def at_most(high: float, text: str = "") -> Constraint:
    return Constraint(lambda value: is_number(value) and value <= high, text or f"must be at most {high:,}")


def above(low: float) -> Constraint:
    return Constraint(lambda value: is_number(value) and value > low, f"must be more than {low}")


def between(low: int, high: int) -> Constraint:
    return Constraint(lambda value: low <= value <= high, f"must be from {low} to {high}")


def one_of(*values: str) -> Constraint:
    listed = " or ".join(values) if len(values) == 2 else f"one of {', '.join(values)}"
    return Constraint(lambda value: value in values, f"must be {listed}")


def or_null(constraint: Constraint) -> Constraint:
    return Constraint(lambda value: value is None or constraint.holds(value), f"{constraint.text}, or null")


def is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):  # the last two for a{99999999999} and for 3,000 brackets
        return False
    return True


COUNT = (at_least(1), at_most(MAX_COUNT))
POSITIVE = Constraint(lambda value: 0 < value < math.inf, "must be more than 0 and finite")
SECS = (POSITIVE, at_most(MAX_SECS, f"must be at most {MAX_SECS:.0f}, a year"))
