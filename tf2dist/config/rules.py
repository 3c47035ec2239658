"""The rules for values that the schema does not declare: arguments of models and optimizers, paths, plugins."""

import math
import os
from pathlib import Path
from typing import Any

from tf2dist.config.choices import keys
from tf2dist.config.option import Constraint, Option, Rule, above, at_least, broken, is_number, one_of, or_null
from tf2dist.config.schema import OPTIONS
from tf2dist.files import is_path

MAX_UNITS = 1_000_000  # in one layer; more is a mistake in typing, and would end in a lack of memory


def _are_units(value: Any) -> bool:
    items = value if isinstance(value, list) else [None]
    # Not isinstance, for which true would be one unit.
    return all(type(item) is int and 0 < item <= MAX_UNITS for item in items)


UNITS = Constraint(
    _are_units, f"must be a list such as [300,50] of whole numbers; each must be more than 0, up to {MAX_UNITS:,}"
)
POSITIVE_INT = Constraint(
    lambda value: type(value) is int and 0 < value <= MAX_UNITS, f"must be a whole number from 1 to {MAX_UNITS:,}"
)
# The ids of rows are int32.
ROWS = Constraint(
    lambda value: type(value) is int and 0 < value < 1 << 31, f"must be a whole number from 1 to {(1 << 31) - 1:,}"
)
FRACTION = Option(
    constraints=(Constraint(lambda value: is_number(value) and 0 <= value < 1, "must be at least 0 and less than 1"),)
)
SWITCH = Option(constraints=(Constraint(lambda value: isinstance(value, bool), "must be true or false"),))

# The arguments of all choices in ``conf/``, by name. The files there hold their defaults.
FLOATS = {
    "learning_rate": Option(constraints=(above(0),)),
    "beta_1": FRACTION,
    "beta_2": FRACTION,
    "rho": FRACTION,
    "momentum": FRACTION,
    "dropout": Option(constraints=FRACTION.constraints, help="before the last layer"),
    "epsilon": Option(constraints=(above(0),)),
    "weight_decay": Option(constraints=(or_null(at_least(0)),)),
    "initial_accumulator_value": Option(constraints=(or_null(at_least(0)),)),
    "clipnorm": Option(constraints=(or_null(above(0)),), help="of each gradient"),
    "clipvalue": Option(constraints=(or_null(above(0)),)),
    "global_clipnorm": Option(constraints=(or_null(above(0)),), help="of all gradients together"),
}
LAZY_ROWS = "lazy_rows"  # an option of `optimizer` that is no argument of Keras
ARGUMENTS = {
    **FLOATS,
    "schedule": Option(
        constraints=(one_of("constant", "cosine"),),
        help="of the learning rate: constant, or cosine (rises for 5 % of the steps, then falls to 0)",
    ),
    LAZY_ROWS: Option(constraints=SWITCH.constraints, help="of large tables update only rows that a batch looks up"),
    "amsgrad": SWITCH,
    "nesterov": SWITCH,
    "centered": SWITCH,
    "batch_norm": Option(constraints=SWITCH.constraints, help="after each convolution"),
    "hidden_units": Option(constraints=(UNITS,)),
    "units": Option(constraints=(POSITIVE_INT,), help="of the hidden layer"),
    "points": Option(constraints=(POSITIVE_INT,), help="training points, and as many others to test"),
    "num_users": Option(constraints=(ROWS,), help="rows of the table of users"),
    "num_items": Option(constraints=(ROWS,), help="rows of the table of items"),
    "num_impressions": Option(constraints=(ROWS,), help="to train and validate on; a twentieth more to test"),
    "seed": Option(constraints=OPTIONS["seed"].constraints, help="of the made-up users, items and clicks"),
    "columns": Option(constraints=(POSITIVE_INT,), help="of both tables, and units of the layer above each"),
    "noise": Option(constraints=(at_least(0),), help="standard deviation of the noise"),
}


def argument_rules(group: str, arguments: dict[str, Any], builtin: bool) -> list[Rule]:
    """The rules for the arguments of a choice: plain finite values, of a plugin also words.

    Args:
        group: model, optimizer or data.
        builtin: whether there are no plugins, which may give names another meaning; then ranges apply too.
    """
    choice_keys = keys(group, arguments["name"]) if isinstance(arguments.get("name"), str) else ()
    rules: list[Rule] = []
    for key, value in arguments.items():
        if key == "name":
            text = "" if isinstance(value, str) else "must be a name"
        elif group == "optimizer" and key in ("schedule", LAZY_ROWS):  # handled by us for a plugin's optimizer too
            text = broken(value, *ARGUMENTS[key].constraints)
        else:
            text = _problem(key, value, builtin, key in choice_keys)
        rules.append((f"{group}.{key}", value, not text, text))
    # The schedule scales this number; a plugin's optimizer may have none, or another kind of rate.
    if group == "optimizer" and arguments.get("schedule") == "cosine":
        rate, must = arguments.get("learning_rate"), "must be a number for optimizer.schedule=cosine"
        rules.append(("optimizer.learning_rate", rate, is_number(rate) and math.isfinite(rate), must))
    return rules


def _problem(key: str, value: Any, builtin: bool, in_choice: bool) -> str:
    """What an argument must be, if it is not, or ""; `in_choice`: whether its choice has it in ``conf/``."""
    text = broken(value, *ARGUMENTS[key].constraints) if builtin and key in ARGUMENTS else ""
    if _is_plain(value, allow_words=not builtin and not in_choice):
        return text
    if isinstance(value, float):
        return "must be a finite number"
    kinds = "a number, true or false, or null" if in_choice else "a number, a word, true, false, null, or a list"
    return text or f"must be {kinds}"


def _is_plain(value: Any, allow_words: bool) -> bool:
    """Whether a value, or each item of a list, is a finite number, a bool, None, or, if `allow_words`, a word."""
    items = value if isinstance(value, list) else [value]
    return all(
        item is None
        or (isinstance(item, int | float) and math.isfinite(item))
        or (allow_words and isinstance(item, str))
        for item in items
    )


def with_floats(group: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with 1.0 for 1 where a number need not be whole."""
    # Keras refuses an int for a rate, and `learning_rate=1` on a command line is one.
    fractional = set(FLOATS) & set(keys(group, arguments["name"]))
    if group == "optimizer":
        fractional.add("learning_rate")  # of a plugin's optimizer too
    return {
        key: float(value) if key in fractional and type(value) is int else value for key, value in arguments.items()
    }


def path_rules(folders: dict[str, str | None], plugins: list[str]) -> list[Rule]:
    """The rules for paths: folders must have valid names, and plugins must be Python files."""
    rules: list[Rule] = [
        (name, path, path is None or is_path(path), "is not a valid name of a directory; leave it out for the default")
        for name, path in folders.items()
    ]
    for path in plugins:
        exists = is_path(path) and os.path.isfile(os.path.expanduser(path))
        rules.append(("plugins", path, exists, "there is no such Python file"))
        if exists and (problem := _syntax_problem(os.path.expanduser(path))):
            rules.append(("plugins", path, False, f"{problem}; correct the file"))
    return rules


def _syntax_problem(path: str) -> str:
    """Why a file is not Python, or ""; the file is not executed."""
    # Compiled here, so that a mistake is found before TensorFlow is started in each task.
    try:
        compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f"cannot be read ({error})"
    return ""
