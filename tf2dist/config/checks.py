"""Checks of a configuration: the ranges of options, the rules between several options, and values without a schema.

The schema declares the ranges. It does not declare the arguments of models and optimizers, paths and plugins, so the
rules for these are here.
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
    rules_of,
)
from tf2dist.config.schema import ALGORITHMS, OPTIONS, PS_MODES, AlgorithmEntry, RunConfig
from tf2dist.errors import ConfigError
from tf2dist.files import is_folder, is_path

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


# The kinds of clusters whose description has these sizes in it.
DESCRIBED_BY = {"num_workers": ("hosts", "tf_config", "ranks", "slurm"), "num_ps": ("hosts", "tf_config")}
MAX_LOCAL_TASKS = 64  # as many ports as the fork server sets aside


def check(config: RunConfig) -> None:
    """Checks everything and reports all mistakes at once.

    Raises:
        ConfigError: one line for each broken rule.
    """
    # A plugin may register a model under a name of ours, with other arguments.
    builtin = not config.plugins
    rules: list[Rule] = [
        *rules_of(config),
        *_length(config),
        *_mode(config),
        *_hosts(config),
        *_local(config),
        *_leaving(config),
        *_joining(config),
        *_first_weights(config),
        *_algorithm(config),
        *_transfers(config),
        *_precision(config),
        *_parts(config),
        *_simulated(config),
        *argument_rules("model", config.model, builtin),
        *argument_rules("optimizer", config.optimizer, builtin),
        *argument_rules("data", {"name": config.data.name, **config.data.arguments}, builtin),
        *path_rules({"run_dir": config.run_dir, "data.dir": config.data.dir}, config.plugins),
    ]
    # Values may hold line breaks; each message stays on one line.
    broken = [" ".join(f"{name} ({value}): {rule}".split()) for name, value, holds, rule in rules if not holds]
    if broken:
        raise ConfigError("\n".join(broken))


def _length(config: RunConfig) -> list[Rule]:
    steps, epochs = config.train.steps, config.train.epochs
    must = f"train.steps is {steps}; give one of the two"
    evaluates = config.train.eval_every_steps is not None
    needs_evaluations = "is looked at when the validation set is evaluated; add train.eval_every_steps"
    goals = {"train.until_accuracy": config.train.until_accuracy, "train.until_secs": config.train.until_secs}
    return [
        ("train.epochs", epochs, epochs is None or steps is None, must),
        *((name, value, value is None or evaluates, needs_evaluations) for name, value in goals.items()),
    ]


def _mode(config: RunConfig) -> list[Rule]:
    """Most modes need a parameter server; an option that the mode does not use is refused."""
    # Refused and not ignored: the run would differ from what the user asked for. The default of 1 must pass, since a
    # value that was given cannot be told from it.
    num_ps, all_reduce, placement = config.cluster.num_ps, config.cluster.all_reduce, config.cluster.placement
    replicas, of_replicas = config.sync_replicas.replicas_to_aggregate, config.mode == "sync_replicas"
    option = "sync_replicas.replicas_to_aggregate"
    algorithm, for_async = config.algorithm.kind, "is for mode=async; leave it out"
    mode = _entry(config).mode
    rules: list[Rule] = [
        (option, replicas, replicas is None or of_replicas, "is for mode=sync_replicas; add that"),
        ("algorithm", algorithm, algorithm == "plain" or config.mode == mode, f"is for mode={mode}; leave it out"),
    ]
    if config.mode in PS_MODES:
        needs_ps = (
            f"mode={config.mode} keeps the variables on parameter servers and needs at least 1; or choose mode=sync"
        )
        return [
            *rules,
            ("cluster.num_ps", num_ps, num_ps != 0, needs_ps),
            ("cluster.all_reduce", all_reduce, all_reduce == "auto", "is for mode=sync; leave it out"),
        ]
    return [
        *rules,
        ("cluster.num_ps", num_ps, num_ps <= 1, for_async),
        (
            "cluster.placement",
            placement,
            placement == "round_robin",
            "is for modes with a ps; leave it out",
        ),
    ]


def _transfers(config: RunConfig) -> list[Rule]:
    """Where a ps adds up what workers send, or workers send their weights, the roundings would add up."""
    dtype, algorithm = config.cluster.transfer_dtype, config.algorithm.kind
    owner = "mode=sync_replicas" if config.mode == "sync_replicas" else f"algorithm={algorithm}"
    holds = dtype == "float32" or (config.mode != "sync_replicas" and not _entry(config).sends_weights)
    return [("cluster.transfer_dtype", dtype, holds, f"is not for {owner}; leave it out")]


def _precision(config: RunConfig) -> list[Rule]:
    """Small gradients vanish in float16 unless the loss is scaled up."""
    precision, holds = config.devices.precision, config.devices.precision != "float16" or config.mode == "sync"
    must = "needs a scale of the loss that all gradients decide, as only mode=sync has it; give that, or bfloat16"
    return [("devices.precision", precision, holds, must)]


def _hosts(config: RunConfig) -> list[Rule]:
    """Refuses options of another kind of cluster."""
    # With host lists and without cluster=hosts every host would train alone, each with success.
    cluster, task = config.cluster, config.task
    lists = {f"cluster.{job}": getattr(cluster, job) or None for job in ("chief", "ps", "worker", "evaluator")}
    options_of: dict[str, dict[str, Any]] = {
        "hosts": {**lists, "task.type": task.type, "task.index": task.index},
        "ranks": {"cluster.addresses": cluster.addresses or None, "cluster.rank": cluster.rank},
    }
    rules = [
        (name, value, value is None or cluster.kind == kind, f"is for cluster={kind}; add that")
        for kind, options in options_of.items()
        for name, value in options.items()
    ]
    for size, kinds in DESCRIBED_BY.items():
        name, value = f"cluster.{size}", getattr(cluster, size)
        holds = cluster.kind not in kinds or value == OPTIONS[name].default
        rules.append((name, value, holds, f"is not for cluster={cluster.kind}, which says it itself; leave it out"))
    return rules


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


def _leaving(config: RunConfig) -> list[Rule]:
    """Refuses to let a task leave where none can; `cluster.sources` has the rule that depends on the workers."""
    name, stays = "task.on_term", config.task.on_term != "leave"
    in_every_step = "with mode=sync every worker takes part in each step, so none can leave; leave it out"
    together = "with cluster=local one command runs all tasks, so none gets a signal of its own; leave it out"
    return [
        (name, config.task.on_term, stays or config.mode in PS_MODES, in_every_step),
        (name, config.task.on_term, stays or config.cluster.kind != "local", together),
    ]


def _joining(config: RunConfig) -> list[Rule]:
    """Refuses to begin without workers where all are needed, or started together."""
    name, count = "cluster.min_workers", config.cluster.min_workers
    together = "with cluster=local one command starts all workers; leave it out"
    return [
        (name, count, count is None or config.mode == "async", "is for mode=async; leave it out"),
        (name, count, count is None or config.cluster.kind != "local", together),
    ]


def _first_weights(config: RunConfig) -> list[Rule]:
    source, layers = config.init_from, config.init_layers
    no_run = "there is no such run directory; name that of a run"
    return [
        ("init_from", source, source is None or is_folder(source), no_run),
        ("init_layers", layers, layers is None or source is not None, "is for init_from=RUN_DIR; add that"),
    ]


def _algorithm(config: RunConfig) -> list[Rule]:
    """Refuses the options of another algorithm than the chosen one."""
    owners = {option: name for name, entry in ALGORITHMS.items() for option in entry.options}
    rules: list[Rule] = []
    for key, owner in owners.items():
        name, value = f"algorithm.{key}", getattr(config.algorithm, key)
        holds = config.algorithm.kind == owner or value == OPTIONS[name].default
        rules.append((name, value, holds, f"is for algorithm={owner}; add that"))
    return rules


def _entry(config: RunConfig) -> AlgorithmEntry:
    # Another rule refuses a name that is not in the table.
    return ALGORITHMS.get(config.algorithm.kind, ALGORITHMS["plain"])


def _parts(config: RunConfig) -> list[Rule]:
    name, value = "cluster.min_part_bytes", config.cluster.min_part_bytes
    holds = config.cluster.placement == "partitioned" or value == OPTIONS[name].default
    return [(name, value, holds, "is for cluster.placement=partitioned; add that")]


def _simulated(config: RunConfig) -> list[Rule]:
    """The rules about simulated delays; `launch.single_run` has those that depend on the workers."""
    delays, distribution = config.simulate.delay_secs, config.simulate.distribution
    needs_delays = "is for simulate.delay_secs; add that"
    return [("simulate.distribution", distribution, any(delays) or distribution == "constant", needs_delays)]
