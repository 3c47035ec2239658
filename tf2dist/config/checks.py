"""Checks of a configuration: the ranges of options, the rules between several options, and values without a schema.

The schema declares the ranges, and which option needs which. It does not declare the arguments of models and
optimizers, and plugins, so the rules for these are here.
"""

import math
import os
from pathlib import Path
from typing import Any

from tf2dist.config.compose import keys
from tf2dist.config.option import (
    Constraint,
    Option,
    Rule,
    above,
    at_least,
    broken,
    is_number,
    one_of,
    or_null,
    rules_between,
    rules_of,
)
from tf2dist.config.schema import ALGORITHMS, OPTIONS, PS_MODES, RunConfig
from tf2dist.errors import ConfigError
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
    """The rule that an argument breaks, or ""; `in_choice`: whether its choice has it in ``conf/``."""
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


def _plugins(config: RunConfig) -> list[Rule]:
    rules: list[Rule] = []
    for path in config.plugins:
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


MAX_LOCAL_TASKS = 64  # as many ports as the fork server sets aside


def check(config: RunConfig) -> None:
    """Checks everything and reports all mistakes at once."""
    # A plugin may register a model under a name of ours, with other arguments.
    builtin = not config.plugins
    rules: list[Rule] = [
        *rules_of(config),
        *rules_between(config),
        *_length(config),
        *_mode(config),
        *_precision(config),
        *_local(config),
        *_plugins(config),
        *argument_rules("model", config.model, builtin),
        *argument_rules("optimizer", config.optimizer, builtin),
        *argument_rules("data", {"name": config.data.name, **config.data.arguments}, builtin),
    ]
    # Values may hold line breaks; each message stays on one line.
    broken = [" ".join(f"{name} ({value}): {rule}".split()) for name, value, holds, rule in rules if not holds]
    if broken:
        raise ConfigError("\n".join(broken))


def _length(config: RunConfig) -> list[Rule]:
    steps, epochs = config.train.steps, config.train.epochs
    must = f"train.steps is {steps}; give one of the two"
    return [("train.epochs", epochs, epochs is None or steps is None, must)]


def _mode(config: RunConfig) -> list[Rule]:
    """Refuses too few parameter servers, and an algorithm of another mode."""
    num_ps, algorithm = config.cluster.num_ps, config.algorithm.kind
    needs_ps = f"mode={config.mode} keeps the variables on parameter servers and needs at least 1; or choose mode=sync"
    # Another rule refuses a name that is not in the table.
    mode = ALGORITHMS[algorithm].mode if algorithm in ALGORITHMS else config.mode
    return [
        ("cluster.num_ps", num_ps, num_ps != 0 or config.mode not in PS_MODES, needs_ps),
        ("algorithm", algorithm, algorithm == "plain" or config.mode == mode, f"is for mode={mode}; leave it out"),
    ]


def _precision(config: RunConfig) -> list[Rule]:
    """Small gradients vanish in float16 unless the loss is scaled up."""
    precision, holds = config.devices.precision, config.devices.precision != "float16" or config.mode == "sync"
    must = "needs a scale of the loss that all gradients decide, as only mode=sync has it; give that, or bfloat16"
    return [("devices.precision", precision, holds, must)]


def _local(config: RunConfig) -> list[Rule]:
    """Limits the size of a local cluster; the message names the larger of its two counts."""
    cluster = config.cluster
    counts = {"cluster.num_workers": cluster.num_workers}
    if config.mode in PS_MODES:
        counts["cluster.num_ps"] = cluster.num_ps
    largest = max(counts, key=lambda name: counts[name])
    # With parameter servers there is a coordinator besides, which needs a port too.
    fits = sum(counts.values()) + (config.mode in PS_MODES) <= MAX_LOCAL_TASKS
    rule = f"a local cluster has at most {MAX_LOCAL_TASKS} tasks; use several hosts for more"
    return [(largest, counts[largest], cluster.kind != "local" or fits, rule)]
