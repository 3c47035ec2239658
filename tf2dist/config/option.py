"""Declaration of an option: its default and help text, the conditions for a value, and where the option belongs."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Literal, TypeGuard, TypeVar, cast

from tf2dist.files import is_folder, is_path

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


# On the hosts of a job: "job" options are equal on all; of "either" ones the values may differ, but either all hosts
# give one or none does; "host" options are chosen by each; "place" options say where the tasks are.
Scope = Literal["job", "either", "host", "place"]
COMMAND_LINE = "COMMAND_LINE"  # for `Option.fit`: the option chooses what `fit` gets as Python objects


@dataclass(frozen=True, slots=True)
class OnlyFor:
    """A condition without which an option has no meaning, so that giving it is a mistake.

    Attributes:
        option: the other option that decides.
        values: those of its values with which this one has a meaning; (): any that is given.
        text: what the message says; {} stands for the value that the other option has.
        harmless: whether a value says no more than the default does.
    """

    option: str
    values: tuple[str, ...] = ()
    text: str = ""
    harmless: Callable[[Any], bool] = lambda value: False

    def holds(self, value: Any, other: Any) -> bool:
        """Whether an option may have `value` while the one that decides has the value `other`."""
        if self.values:
            return other in self.values or self.harmless(value)
        return any(other) if isinstance(other, list) else other is not None

    def message(self, other: Any) -> str:
        needed = "=".join([self.option.removesuffix(".kind"), *self.values])
        return self.text.format(other) or f"is for {needed}; add that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of an option: in the metadata of its field, or in the table of arguments.

    Attributes:
        constraints: for any value but None; the message gives the first one that is broken.
        is_choice: whether the value comes with a chosen file in ``conf/`` and cannot be given by itself.
        scope: what the hosts of a job have to agree about.
        only_for: what must hold for a value other than the default.
        fit: the argument of `tf2dist.fit` that sets it, or `COMMAND_LINE`; "": it is given in `options` of `fit`.
        predicts: whether it has a meaning in `tf2dist.predict`; None: as its section says, or not.
        is_text: whether the value may hold what has a meaning in Hydra's grammar, as paths do.
    """

    default: Any = None
    help: str = ""
    constraints: tuple[Constraint, ...] = ()
    is_choice: bool = False
    scope: Scope | None = None
    only_for: tuple[OnlyFor, ...] = ()
    fit: str = ""
    predicts: bool | None = None
    is_text: bool = False

    @property
    def default_text(self) -> str:
        """The default as it would be written on the command line."""
        if self.default is None or isinstance(self.default, bool):
            return {None: "null", True: "true", False: "false"}[self.default]
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def option(default: T, *conditions: Constraint | OnlyFor, **declared: Any) -> T:
    """Declares an option as a field of a dataclass, with the fields of `Option`; each object has a list of its own."""
    constraints = tuple(condition for condition in conditions if isinstance(condition, Constraint))
    only_for = tuple(condition for condition in conditions if isinstance(condition, OnlyFor))
    metadata = {"option": Option(default=default, constraints=constraints, only_for=only_for, **declared)}
    # As the type of the default and not as a `Field`, so that type checkers accept the declaration.
    if isinstance(default, list):
        return cast(T, field(default_factory=default.copy, metadata=metadata))
    return field(default=default, metadata=metadata)


def choice(default: T, *conditions: Constraint | OnlyFor, **declared: Any) -> T:
    """An option that is chosen with ``group=name``."""
    return option(default, *conditions, is_choice=True, **declared)


def section(kind: type[T], scope: Scope, **declared: Any) -> T:
    """Declares a section; its options have this scope, and the other fields of `Option` that they do not declare."""
    return field(default_factory=kind, metadata={"section": {"scope": scope, **declared}})


def options_of(section: Any, prefix: str = "", **declared: Any) -> Iterator[tuple[str, Option]]:
    """The dotted names of all options of a dataclass and of those nested in it, in the order of declaration."""
    for entry in fields(section):
        if is_dataclass(entry.type):
            yield from options_of(entry.type, f"{prefix}{entry.name}.", **entry.metadata.get("section", {}))
        elif option := entry.metadata.get("option"):
            missing = {name: value for name, value in declared.items() if getattr(option, name) in (None, "")}
            yield f"{prefix}{entry.name}", replace(option, **missing)


def rules_of(section: Any, prefix: str = "") -> list[Rule]:
    """The rules that the options of an object declare for themselves; `prefix` is put before their names."""
    rules = []
    for name, declared in options_of(section):
        value = attrgetter(name)(section)
        text = "" if value is None else broken(value, *declared.constraints)
        rules.append((f"{prefix}{name}", value, not text, text))
    return rules


def rules_between(config: Any) -> list[Rule]:
    """The rules about options that have a meaning only with a value of another option."""
    # Refused and not ignored: the run would differ from what the user asked for. The default must pass, since a value
    # that was given cannot be told from it.
    rules = []
    for name, declared in options_of(config):
        value = attrgetter(name)(config)
        for need in declared.only_for:
            other = attrgetter(need.option)(config)
            rules.append((name, value, value == declared.default or need.holds(value, other), need.message(other)))
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


PAUSE_FORM = re.compile(r"((?:chief|worker)-[0-9]{1,9}) at ([0-9]{1,15}) for ([0-9]{1,15}(?:\.[0-9]{1,15})?)")


@dataclass(frozen=True)
class Pause:
    """A worker that freezes once.

    Attributes:
        task: its name, such as "worker-2".
        step: the number of the step in which it does, among its own steps, from 1.
        secs: for how long.
    """

    task: str
    step: int
    secs: float

    @classmethod
    def parse(cls, text: str) -> "Pause | None":
        """The pause that a text such as "worker-2 at 300 for 5" asks for; None for one that has another form."""
        match = PAUSE_FORM.fullmatch(text)
        pause = cls(match[1], int(match[2]), float(match[3])) if match else None
        return pause if pause and 1 <= pause.step <= MAX_COUNT and 0 < pause.secs <= MAX_SECS else None


COUNT = (at_least(1), at_most(MAX_COUNT))
POSITIVE = Constraint(lambda value: 0 < value < math.inf, "must be more than 0 and finite")
SECS = (POSITIVE, at_most(MAX_SECS, f"must be at most {MAX_SECS:.0f}, a year"))
IS_FOLDER_NAME = Constraint(is_path, "is not a valid name of a directory; leave it out for the default")
IS_RUN = Constraint(is_folder, "there is no such run directory; name that of a run")
IS_ACCURACY = Constraint(lambda value: 0 < value <= 1, "must be more than 0 and at most 1, such as 0.97")
IS_FRACTION = Constraint(lambda value: 0 < value <= 1, "must be more than 0 and at most 1, such as 0.2")
ARE_DELAYS = Constraint(
    lambda delays: all(is_number(secs) and 0 <= secs <= MAX_SECS for secs in delays),
    f"must be a number of seconds for each worker, such as [0,0,0.05], from 0 to {MAX_SECS:.0f}, a year",
)
IS_PAUSE = Constraint(
    lambda text: Pause.parse(text) is not None,
    "must name a worker, one of its own steps, and seconds, as in 'worker-2 at 300 for 5'",
)
IS_PATTERN = Constraint(is_pattern, "must be a regular expression, such as 'hidden[123]'")
