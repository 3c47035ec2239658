"""The contenders of a comparison, and their runs in the order in which they take turns."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from tf2dist.config.compose import ConfigSource
from tf2dist.config.load import load
from tf2dist.config.schema import OPTIONS, RunConfig
from tf2dist.config.sweeps import MAX_JOBS, expanded
from tf2dist.data.location import DEFAULT_EPOCHS, NUM_TRAIN
from tf2dist.errors import ConfigError, RequestError
from tf2dist.tools.comparing.options import Options, backups_of

# Options that only some modes take: a contender of another mode runs without them.
MODE_OPTIONS = (
    *("algorithm", "cluster.all_reduce", "cluster.num_ps", "cluster.placement", "cluster.min_part_bytes"),
    "cluster.transfer_dtype",
)
EVALUATIONS_PER_PASS, EVALUATIONS_PER_RUN = 8, 12
BATCHES_PER_EVALUATION = 20  # of each worker, for data of unknown size
MAX_NAME_CHARS = 120  # of a run's folder
SECS_EPOCHS = 10_000  # more passes than any number of seconds is meant for


@dataclass(frozen=True)
class Contender:
    """One way of training in one situation.

    Attributes:
        way: the mode, its number of backup workers and its algorithm: what is compared.
        situation: the delay and the other options that are varied: in each the ways are compared with each other.
        backups: None for the other modes.
        varying: the values of the options that have several.
        overrides: of its command line, without the seed.
        batches: in each global step.
    """

    way: str
    situation: str
    mode: str
    delay_secs: float
    backups: int | None
    varying: dict[str, str]
    overrides: tuple[str, ...]
    batches: int
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.way}, {self.situation}"

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


def contenders_of(
    options: Options, overrides: list[str], source: ConfigSource, check: Callable[[RunConfig], None]
) -> list[Contender]:
    """All contenders, each with its checked configuration.

    Raises:
        RequestError: an option is wrong, or no mode takes it.
    """
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
                    check(contender.config)
                except RequestError as error:
                    raise type(error)(f"{error} (with mode={mode}, delay {delay_secs:g} s)") from None
                contenders.setdefault((contender.way, contender.situation), contender)
    if len(contenders) * options.seeds > MAX_JOBS:
        raise ConfigError(f"the comparison would have more than {MAX_JOBS:,} runs; give fewer values")
    return list(contenders.values())


def _group(key: str) -> str | None:
    """The option among `MODE_OPTIONS` to which an option belongs."""
    key = key.lstrip("+")
    return next((option for option in MODE_OPTIONS if key == option or key.startswith(f"{option}.")), None)


def _mode_options(line: tuple[str, ...]) -> set[str]:
    return {group for override in line if (group := _group(override.partition("=")[0]))}


def _accepted(line: tuple[str, ...], mode: str, source: ConfigSource) -> tuple[str, ...]:
    """The overrides without those of other modes, such as algorithm=staleness_aware for mode=sync."""
    common = [override for override in _undelayed(line) if _group(override.partition("=")[0]) is None]
    dropped = set()
    for key in _mode_options(line):
        group_overrides = [override for override in line if _group(override.partition("=")[0]) == key]
        try:
            load([*common, *group_overrides, f"mode={mode}", "cluster=local"], None, source)
        except ConfigError:
            dropped.add(key)
    return tuple(override for override in line if _group(override.partition("=")[0]) not in dropped)


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
    if delay_secs:
        overrides.append(f"simulate.delay_secs=[{','.join(['0'] * (workers - 1) + [f'{delay_secs:g}'])}]")
    else:
        overrides = _undelayed(overrides)
    if not any(override.startswith("figure=") for override in overrides):
        overrides.append("figure=false")
    eval_every_steps = max(1, round(_eval_every_examples(options, base) / (batches * base.train.batch_size_per_worker)))
    overrides += [*_length(options, overrides), f"train.eval_every_steps={eval_every_steps}", "timeline=true"]
    if options.until.kind in ("accuracy", "secs"):
        overrides.append(f"train.until_{options.until.kind}={options.until.value:g}")
    return Contender(
        way=_way(mode, backups, varying),
        situation=_situation(delay_secs, varying),
        mode=mode,
        delay_secs=delay_secs,
        backups=backups,
        varying=varying,
        overrides=tuple(override for override in overrides if not override.startswith("seed=")),
        batches=batches,
        config=load(overrides, None, source),
    )


def _length(options: Options, overrides: list[str]) -> list[str]:
    """The override for the longest that a run may take."""
    has_epochs = any(override.startswith("train.epochs=") for override in overrides)
    if options.until.kind == "steps":
        if has_epochs:
            raise ConfigError(f"train.epochs: until={options.until} is the end of the runs; leave one of them out")
        return [f"train.steps={options.until.value:g}"]
    if options.until.kind == "secs" and not has_epochs:
        return [f"train.epochs={SECS_EPOCHS}"]
    return []


def _eval_every_examples(options: Options, config: RunConfig) -> float:
    if options.eval_every_examples:
        return options.eval_every_examples
    batch = config.train.batch_size_per_worker
    if options.until.kind == "steps":
        return options.until.value * batch / EVALUATIONS_PER_RUN
    if size := NUM_TRAIN.get(config.data.name):
        return (size - config.data.num_validation) / EVALUATIONS_PER_PASS
    return BATCHES_PER_EVALUATION * batch * options.workers


def _way(mode: str, backups: int | None, varying: dict[str, str]) -> str:
    settings = [f"{key}={value}" for key, value in varying.items() if _group(key) and value != _default(key)]
    spare = [] if backups is None else [f"{backups or 'no'} backup{'' if backups == 1 else 's'}"]
    return " ".join([mode, *([f"({', '.join([*spare, *settings])})"] if spare or settings else [])])


def _default(key: str) -> str:
    """The value with which a mode is what it is called, such as algorithm=plain."""
    declared = OPTIONS.get(key) or OPTIONS.get(f"{key}.kind")
    return declared.default_text if declared else ""


def _situation(delay_secs: float, varying: dict[str, str]) -> str:
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
    return [
        *(override for override in overrides if override.partition("=")[0].partition(".")[0] != "data"),
        f"data={name}",
    ]
