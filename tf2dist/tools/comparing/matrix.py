"""The options of a comparison itself, and the contenders and runs that these and the options of the runs make."""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tf2dist.config.compose import ConfigSource, groups, name_of
from tf2dist.config.load import load
from tf2dist.config.option import MAX_SECS
from tf2dist.config.schema import MODES, OPTIONS, RunConfig
from tf2dist.config.sweeps import MAX_JOBS, expanded
from tf2dist.data.location import DEFAULT_EPOCHS, NUM_TRAIN
from tf2dist.errors import ConfigError, RequestError, nearest
from tf2dist.files import expand, is_path
from tf2dist.launch.single_run import check_local

MAX_WORKERS, MAX_SEEDS = 60, 100
MAX_STEPS = 10**9
# Options of a run that the comparison sets by itself, with what to give instead.
REPLACED = {
    "mode": "modes=[async,sync]",
    "cluster": "workers=3; a comparison runs on this machine alone",
    "cluster.num_workers": "workers=3",
    "simulate.delay_secs": "delays=[0,0.05], which slow down the last worker, or common_delay=0.05 for all",
    "sync_replicas.replicas_to_aggregate": "backups=[1], the workers that a step does not wait for",
    "run_dir": "compare_dir=DIR",
    "hydra.run.dir": "compare_dir=DIR",
    "train.steps": "until=2000steps, or train.epochs, after which every run ends",
    "train.eval_every_steps": "eval_every_examples=5000, since a step has another number of examples in each mode",
    "train.until_accuracy": "until=0.97",
    "train.until_secs": "until=30s",
    "timeline": "nothing: a comparison always records it",
}


def _depends_on_mode(name: str) -> bool:
    return any(need.option == "mode" or _depends_on_mode(need.option) for need in OPTIONS[name].only_for)


# Options that only some modes take: a contender of another mode runs without them. Each algorithm is of one mode.
MODE_OPTIONS = ("algorithm", *filter(_depends_on_mode, OPTIONS))
EVALUATIONS_PER_PASS, EVALUATIONS_PER_RUN = 8, 12
BATCHES_PER_EVALUATION = 20  # of each worker, for data of unknown size
MAX_NAME_CHARS = 120  # of a run's folder
SECS_EPOCHS = 10_000  # more passes than any number of seconds is meant for


@dataclass(frozen=True)
class Until:
    """The end of the runs; `kind`: accuracy, steps or secs."""

    kind: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Until":
        """Reads 0.97, 2000steps or 30s."""
        if match := re.fullmatch(r"([0-9]{1,10})steps", text):
            if 1 <= int(match[1]) <= MAX_STEPS:
                return cls("steps", int(match[1]))
        elif match := re.fullmatch(r"([0-9]{0,9}\.?[0-9]{1,9})(s?)", text):
            number = float(match[1])
            if 0 < number <= (MAX_SECS if match[2] else 1):
                return cls("secs" if match[2] else "accuracy", number)
        raise ConfigError(
            f"until ({text[:40]}): must be an accuracy above 0 and up to 1, a number of steps, or of seconds, as in "
            "until=0.97, until=2000steps and until=30s"
        )

    @property
    def number(self) -> str:
        return f"{self.value:.15g}"  # six digits, the default, would make a million steps 1e+06

    def __str__(self) -> str:
        return f"{self.number}{ {'accuracy': '', 'steps': 'steps', 'secs': 's'}[self.kind] }"


@dataclass(frozen=True)
class Options:
    """The values of the own options of a comparison.

    Attributes:
        modes: each with every delay.
        delays: by which a step of the last worker takes longer, in seconds.
        common_delay: by which a step of every worker takes longer, the last one's too.
        backups: with mode=sync_replicas, how many workers a step does not wait for; each number is a contender.
        seeds: how often each contender trains, with another seed each time.
        eval_every_examples: how many training examples lie between two evaluations; None: chosen from the data.
        folder: of the comparison; None for a new one.
    """

    modes: tuple[str, ...] = ("sync", "async", "sync_replicas")
    delays: tuple[float, ...] = (0.0, 0.05)
    common_delay: float = 0.0
    backups: tuple[int, ...] = (1,)
    workers: int = 3
    seeds: int = 2
    until: Until = Until("accuracy", 0.95)
    eval_every_examples: int | None = None
    folder: Path | None = None


# Without a choice of the user's: with momentum it shows what stale gradients cost, while Adam makes up for some of it.
OPTIMIZER = ("optimizer=momentum", "optimizer.learning_rate=0.04")


def split(arguments: list[str]) -> tuple[Options, list[str]]:
    """The own options of a comparison, and the overrides of its runs."""
    values: dict[str, Any] = {}
    run_overrides = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if key in PARSERS and separator:
            values["folder" if key == "compare_dir" else key] = PARSERS[key](key, value)
        elif name_of(key) in REPLACED:
            raise ConfigError(f"{key} ({value}): is set by the comparison; give {REPLACED[name_of(key)]}")
        else:
            _check_name(key)
            run_overrides.append(argument)
    options = Options(**values)
    _check(options, values)
    given = set(map(name_of, run_overrides))
    if given.isdisjoint(("optimizer", "experiment")):
        run_overrides[:0] = (override for override in OPTIMIZER if name_of(override) not in given)
    return options, run_overrides


def _check_name(key: str) -> None:
    """Refuses a name that no run has either, and that is nearly one of ours."""
    if key not in OPTIONS and key not in groups() and (suggestion := nearest(key, PARSERS)) and "." not in key:
        raise ConfigError(f"{key}: there is no such option{suggestion}")


def _check(options: Options, values: dict[str, Any]) -> None:
    """The rules between several options."""
    if "backups" not in values:
        return
    if "sync_replicas" not in options.modes:
        raise ConfigError(f"backups ({_listed(options.backups)}): is for mode sync_replicas; add it to modes")
    if max(options.backups) >= options.workers:
        raise ConfigError(f"backups ({max(options.backups)}): must be less than the {options.workers} workers")


def backups_of(options: Options) -> tuple[int, ...]:
    """The numbers of backup workers that the workers allow: one worker alone has none."""
    return tuple(number for number in options.backups if number < options.workers) or (0,)


def _listed(values: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, values))}]"


def _items(key: str, text: str) -> list[str]:
    """The items of a list, in brackets or without, since a shell may take those for a pattern."""
    bare = text[1:-1] if text[:1] + text[-1:] == "[]" else text
    items = [item.strip() for item in bare.split(",")]
    if not all(items):
        raise ConfigError(f"{key} ({text[:60]}): must be a list such as {EXAMPLES[key]}")
    if len(set(items)) < len(items):
        raise ConfigError(f"{key} ({text[:60]}): has a value twice; give each once")
    return items


def _modes(key: str, text: str) -> tuple[str, ...]:
    items = _items(key, text)
    for item in items:
        if item not in MODES:
            raise ConfigError(f"{key} ({item[:40]}): must be among {', '.join(MODES)}{nearest(item, MODES)}")
    return tuple(items)


def _delays(key: str, text: str) -> tuple[float, ...]:
    try:
        secs = tuple(float(item) for item in _items(key, text))
    except ValueError:
        secs = (math.nan,)
    if not all(0 <= value <= MAX_SECS for value in secs):
        raise ConfigError(f"{key} ({text[:60]}): must be seconds from 0 on, such as {EXAMPLES[key]}")
    return secs


def _common_delay(key: str, text: str) -> float:
    secs = _delays(key, text)
    if len(secs) > 1:
        raise ConfigError(f"{key} ({text[:60]}): must be one number; give several to delays")
    return secs[0]


def _integer(key: str, text: str, low: int, high: int) -> int:
    if re.fullmatch(r"[0-9]{1,12}", text) and low <= int(text) <= high:
        return int(text)
    raise ConfigError(f"{key} ({text[:40]}): must be a whole number from {low} to {high:,}")


def _folder(key: str, text: str) -> Path:
    path = expand(text)
    if not is_path(text) or path is None:
        raise ConfigError(f"{key} ({text[:60]}): is not a valid name of a directory; leave it out for the default")
    return path.absolute()


EXAMPLES = {
    "modes": "modes=[sync,async]",
    "delays": "delays=[0,0.05]",
    "backups": "backups=[0,1]",
    "common_delay": "common_delay=0.05",
}
PARSERS: dict[str, Callable[[str, str], Any]] = {
    "modes": _modes,
    "delays": _delays,
    "common_delay": _common_delay,
    "backups": lambda key, text: tuple(_integer(key, item, 0, MAX_WORKERS) for item in _items(key, text)),
    "workers": lambda key, text: _integer(key, text, 1, MAX_WORKERS),
    "seeds": lambda key, text: _integer(key, text, 1, MAX_SEEDS),
    "until": lambda key, text: Until.parse(text),
    "eval_every_examples": lambda key, text: _integer(key, text, 1, 10**12),
    "compare_dir": _folder,
}


@dataclass(frozen=True)
class Contender:
    """One way of training in one scenario.

    Attributes:
        mode_label: the mode, its number of backup workers and its algorithm: what is compared.
        scenario: the delay and the other options that are varied: in each the modes are compared with each other.
        backups: None for the other modes.
        varying: the values of the options that have several.
        overrides: of its command line, without the seed.
        batches: in each global step.
    """

    mode_label: str
    scenario: str
    mode: str
    delay_secs: float
    backups: int | None
    varying: dict[str, str]
    overrides: tuple[str, ...]
    batches: int
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.mode_label}, {self.scenario}"

    @property
    def last_step(self) -> int | None:
        """The step after which a run ends in any case; None if that depends on data of unknown size."""
        train, data = self.config.train, self.config.data
        size, epochs = NUM_TRAIN.get(data.name), train.epochs or DEFAULT_EPOCHS.get(data.name)
        if train.steps or not (size and epochs):
            return train.steps
        return round(epochs * (size - data.num_validation) / (self.batches * train.batch_size_per_worker))


@dataclass(frozen=True)
class ContenderRun:
    """One run of a contender; `folder`: its name in the folder of the comparison."""

    contender: Contender
    seed: int
    folder: str

    @property
    def overrides(self) -> list[str]:
        return [*self.contender.overrides, f"seed={self.seed}"]

    def __str__(self) -> str:
        return f"{self.contender.name}, seed {self.seed}"


def contenders_of(options: Options, overrides: list[str], source: ConfigSource) -> list[Contender]:
    """All contenders, each with its checked configuration."""
    contenders: dict[tuple[str, str], Contender] = {}
    for line, varying in expanded(overrides, source):
        if "seed" in varying:
            raise ConfigError(f"seed ({varying['seed']}): the runs of a contender have seeds in a row; give seeds=3")
        accepted = {mode: _accepted(line, mode, source) for mode in options.modes}
        for key in _mode_options(line):
            if not any(key in _mode_options(accepted_line) for accepted_line in accepted.values()):
                load([*line, f"mode={options.modes[0]}"], None, source)  # raises the error that says why
        # Loaded alone first, so that a mistake in all contenders is reported without the name of one.
        mode = options.modes[0]
        base = load([*_undelayed(accepted[mode]), f"mode={mode}", "cluster=local"], None, source)
        for mode, delay_secs in product(options.modes, options.delays):
            mode_options = {None, *_mode_options(accepted[mode])}
            mode_varying = {key: value for key, value in varying.items() if _group(key) in mode_options}
            for backups in backups_of(options) if mode == "sync_replicas" else (None,):
                try:
                    contender = _contender(
                        options, mode, delay_secs, backups, accepted[mode], mode_varying, base, source
                    )
                    check_local(contender.config)
                except RequestError as error:
                    raise type(error)(f"{error} (with mode={mode}, delay {delay_secs:g} s)") from None
                contenders.setdefault((contender.mode_label, contender.scenario), contender)
    if len(contenders) * options.seeds > MAX_JOBS:
        raise ConfigError(f"the comparison would have more than {MAX_JOBS:,} runs; give fewer values")
    return list(contenders.values())


def _group(override: str) -> str | None:
    """The option among `MODE_OPTIONS` to which an override, or the name of an option, belongs."""
    key = name_of(override)
    return next((option for option in MODE_OPTIONS if key == option or key.startswith(f"{option}.")), None)


def _mode_options(line: tuple[str, ...]) -> set[str]:
    return {group for override in line if (group := _group(override))}


def _accepted(line: tuple[str, ...], mode: str, source: ConfigSource) -> tuple[str, ...]:
    """The overrides without those of other modes, such as algorithm=staleness_aware for mode=sync."""
    common = [override for override in _undelayed(line) if _group(override) is None]
    dropped = set()
    for key in _mode_options(line):
        group_overrides = [override for override in line if _group(override) == key]
        try:
            load([*common, *group_overrides, f"mode={mode}", "cluster=local"], None, source)
        except ConfigError:
            dropped.add(key)
    return tuple(override for override in line if _group(override) not in dropped)


def _undelayed(line: Iterable[str]) -> list[str]:
    """The overrides without the one that is refused where no worker is delayed."""
    return [override for override in line if not override.startswith("simulate.distribution=")]


def _contender(
    options: Options,
    mode: str,
    delay_secs: float,
    backups: int | None,
    line: tuple[str, ...],
    varying: dict[str, str],
    base: RunConfig,
    source: ConfigSource,
) -> Contender:
    """One contender; `base`: the configuration of its line, for what does not depend on the mode."""
    workers = options.workers
    batches = {"async": 1, "sync": workers}.get(mode, workers - (backups or 0))
    overrides = [*line, f"mode={mode}", "cluster=local", f"cluster.num_workers={workers}"]
    if backups:
        overrides.append(f"sync_replicas.replicas_to_aggregate={batches}")
    if longest := options.common_delay + delay_secs:
        delays = [options.common_delay] * (workers - 1) + [longest]
        overrides.append(f"simulate.delay_secs=[{','.join(f'{secs:g}' for secs in delays)}]")
    else:
        overrides = _undelayed(overrides)
        if base.simulate.delay_secs:  # of an experiment or a file, with its distribution
            overrides += ["simulate.delay_secs=[]", "simulate.distribution=constant"]
    if not any(override.startswith("figure=") for override in overrides):
        overrides.append("figure=false")
    eval_every_steps = max(1, round(_eval_every_examples(options, base) / (batches * base.train.batch_size_per_worker)))
    overrides += [*_length(options, overrides, base), f"train.eval_every_steps={eval_every_steps}", "timeline=true"]
    if options.until.kind in ("accuracy", "secs"):
        overrides.append(f"train.until_{options.until.kind}={options.until.number}")
    return Contender(
        mode_label=_mode_label(mode, backups, varying),
        scenario=_scenario(delay_secs, varying),
        mode=mode,
        delay_secs=delay_secs,
        backups=backups,
        varying=varying,
        overrides=tuple(override for override in overrides if not override.startswith("seed=")),
        batches=batches,
        config=load(overrides, None, source),
    )


# By the kind of the end: the other ends, which a file may set and the comparison takes away.
OTHER_ENDS = {
    "accuracy": ("until_secs",),
    "steps": ("epochs", "until_accuracy", "until_secs"),
    "secs": ("steps", "until_accuracy"),
}


def _length(options: Options, overrides: list[str], base: RunConfig) -> list[str]:
    """The overrides for the longest that a run may take; `base`: with what a file says about it."""
    until = options.until
    replaced = [f"train.{end}=null" for end in OTHER_ENDS[until.kind] if getattr(base.train, end) is not None]
    has_epochs = any(override.startswith("train.epochs=") for override in overrides)
    if until.kind == "steps":
        if has_epochs:
            raise ConfigError(f"train.epochs: until={until} is the end of the runs; leave one of them out")
        return [*replaced, f"train.steps={until.number}"]
    if until.kind == "secs" and not has_epochs:
        return [*replaced, f"train.epochs={SECS_EPOCHS}"]
    return replaced


def _eval_every_examples(options: Options, config: RunConfig) -> float:
    if options.eval_every_examples:
        return options.eval_every_examples
    batch = config.train.batch_size_per_worker
    if options.until.kind == "steps":
        return options.until.value * batch / EVALUATIONS_PER_RUN
    if size := NUM_TRAIN.get(config.data.name):
        return (size - config.data.num_validation) / EVALUATIONS_PER_PASS
    return BATCHES_PER_EVALUATION * batch * options.workers


def _mode_label(mode: str, backups: int | None, varying: dict[str, str]) -> str:
    settings = [f"{key}={value}" for key, value in varying.items() if _group(key) and value != _default(key)]
    spare = [] if backups is None else [f"{backups or 'no'} backup{'' if backups == 1 else 's'}"]
    return " ".join([mode, *([f"({', '.join([*spare, *settings])})"] if spare or settings else [])])


def _default(key: str) -> str:
    """The value with which a mode is what it is called, such as algorithm=plain."""
    declared = OPTIONS.get(key) or OPTIONS.get(f"{key}.kind")
    return declared.default_text if declared else ""


def _scenario(delay_secs: float, varying: dict[str, str]) -> str:
    slow = f"one worker {1000 * delay_secs:g} ms slower" if delay_secs else "equal workers"
    return ", ".join([slow, *(f"{key}={value}" for key, value in varying.items() if not _group(key))])


def runs_of(contenders: list[Contender], seeds: int) -> Iterator[ContenderRun]:
    """Round by round: every contender once with each seed.

    Every second round goes backwards, so that a machine that becomes slower or faster favours no contender.
    """
    for number in range(seeds):
        order = contenders if number % 2 == 0 else contenders[::-1]
        for contender in order:
            seed = contender.config.seed + number
            yield ContenderRun(contender, seed, f"{_folder_name(contender)}-seed{seed}")


def _folder_name(contender: Contender) -> str:
    parts = [contender.mode, f"delay{contender.delay_secs:g}"]
    if contender.backups is not None:
        parts.append(f"backups{contender.backups}")
    parts += [f"{key}{value}" for key, value in contender.varying.items()]
    full_name = "-".join(parts)
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "_", full_name)[:MAX_NAME_CHARS]
    # Two values may differ only in what a file name cannot have.
    return name if name == full_name else f"{name}-{hashlib.sha256(full_name.encode()).hexdigest()[:8]}"


def with_data(overrides: list[str], name: str) -> list[str]:
    """The overrides for other data, which replaces the data of all runs."""
    return [*(override for override in overrides if name_of(override).partition(".")[0] != "data"), f"data={name}"]
