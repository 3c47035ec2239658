"""The jobs of a sweep: the command line of each, expanded by Hydra's own sweeper, and its checked configuration."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, RangeSweep

from tf2dist.config.choices import HIDDEN, PLUGIN_GROUPS
from tf2dist.config.compose import FORM, UNREADABLE, VERBATIM, quoted
from tf2dist.config.load import load
from tf2dist.config.paths import expand, is_path
from tf2dist.config.schema import RunConfig
from tf2dist.config.source import Source, opened, what_hydra_says
from tf2dist.errors import ConfigError, RequestError

MAX_JOBS = 1000  # all are checked before the first begins, which takes a tenth of a second each
FOLDER = "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"  # Hydra's default, as is the next one
JOB_FOLDER = "${hydra.job.num}"
NOW = re.compile(r"\$\{now:([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep.

    Attributes:
        overrides: its command line.
        varying: the values of the options that the sweep varies.
        folder: its run directory, relative to that of the sweep.
        config: the configuration of its command line, without the run directory.
    """

    number: int
    overrides: tuple[str, ...]
    varying: dict[str, str]
    folder: str
    config: RunConfig

    def __str__(self) -> str:
        return " ".join([f"job {self.number}", *(f"{name}={value}" for name, value in self.varying.items())])


@dataclass(frozen=True, slots=True)
class Sweep:
    """All jobs, and the directory of the sweep; None for a new one below `multirun`."""

    jobs: list[Job]
    folder: Path | None


def sweep_of(overrides: list[str], tf_config: str | None, source: Source, check: Callable[[RunConfig], None]) -> Sweep:
    """Expands a command line and checks every job in it.

    Args:
        check: raises RequestError for a configuration that cannot be run.

    Raises:
        RequestError: the command line is wrong, or that of a job; names the job.
    """
    own, rest = _split(overrides)
    if tf_config:
        raise ConfigError("--multirun: a sweep runs on this machine alone; unset TF_CONFIG, or run the jobs one by one")
    folder = _folder(own["hydra.sweep.dir"]) if "hydra.sweep.dir" in own else None
    jobs = []
    # All jobs are checked before the first one starts: a mistake in the last must not be found hours later.
    for number, (line, varying) in enumerate(expanded(rest, source)):
        place = _job_folder(own.get("hydra.sweep.subdir", JOB_FOLDER), number, line)
        try:
            config = load(list(line), None, source)
            if config.cluster.kind != "local":
                raise ConfigError(
                    f"cluster ({config.cluster.kind}): a sweep runs on this machine alone; take a local one"
                )
            check(config)
        except RequestError as error:
            raise type(error)(f"{error} (in job {number} of the sweep: {' '.join(line)[:100]})") from None
        jobs.append(Job(number, line, varying, place, config))
    folders = [job.folder for job in jobs]
    if same := [name for name in folders if folders.count(name) > 1]:
        raise ConfigError(f"hydra.sweep.subdir ({same[0]}): is the same for two jobs; put ${{hydra.job.num}} into it")
    return Sweep(jobs, folder)


def _split(overrides: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of the sweep itself, and those of its jobs."""
    # `compose` refuses all of Hydra's settings, so these two are taken out before.
    own, rest = {}, []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in ("hydra.sweep.dir", "hydra.sweep.subdir"):
            own[key] = value[1:-1] if value[:1] in ("'", '"') and value[-1:] == value[:1] else value
        elif key.lstrip("+") == "run_dir":
            raise ConfigError(f"run_dir ({value}): each job of a sweep has its own; give hydra.sweep.dir=DIR")
        else:
            rest.append(override)
    return own, rest


def _folder(text: str) -> Path:
    # By hand and not by OmegaConf, whose resolvers could read the environment.
    filled = NOW.sub(lambda found: datetime.now().strftime(found[1]), text)
    path = expand(filled)
    if not is_path(filled) or path is None:
        raise ConfigError(f"hydra.sweep.dir ({text}): is not a valid name of a directory; leave it out for the default")
    if "${" in filled:
        raise ConfigError(f"hydra.sweep.dir ({text}): only the time may be inserted, as in ${{now:%Y-%m-%d}}")
    return path.absolute()


def new_folder() -> Path:
    """The directory of a new sweep, named after the present time; no other sweep has it."""
    first = _folder(FOLDER)
    names = itertools.chain([first], (first.with_name(f"{first.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _job_folder(text: str, number: int, overrides: tuple[str, ...]) -> str:
    values = {"num": str(number), "override_dirname": ",".join(sorted(overrides))}
    filled = re.sub(r"\$\{hydra[.:]job\.(num|override_dirname)\}", lambda found: values[found[1]], text)
    if "${" in filled:
        raise ConfigError(
            f"hydra.sweep.subdir ({text}): only ${{hydra.job.num}} and ${{hydra.job.override_dirname}} may stand in it"
        )
    # The values of overrides come into the name, so it could lead out of the folder of the sweep.
    parts = PurePosixPath(filled).parts
    if not parts or filled.startswith("/") or ".." in parts or not is_path(filled):
        raise ConfigError(
            f"hydra.sweep.subdir ({text}): must be a folder in that of the sweep, such as run-{JOB_FOLDER}"
        )
    return filled


def expanded(overrides: list[str], source: Source) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """The command line of each job and its values of the varying options, in the order of Hydra's `BasicSweeper`."""
    with opened(source) as hydra:
        parser = OverridesParser.create(config_loader=hydra.config_loader)
        parsed = [_parsed(parser, override) for override in overrides]
        # If an option is given twice, the last one counts, as in a single run.
        last = {override.get_key_element(): override for override in parsed}
        varying = [key for key, override in last.items() if override.is_sweep_override()]
        counts = {key: _count(last[key]) for key in varying}
        # Before the expansion, which would build the list of all combinations in memory.
        if math.prod(counts.values()) > MAX_JOBS:
            raise ConfigError(f"--multirun: would make more than {MAX_JOBS:,} jobs; sweep over fewer values")
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    # There is one batch, since its size has no limit.
    for line in batches[0]:
        pairs = dict(_pair(override) for override in line)
        yield (
            tuple(f"{key}={value}" for key, value in pairs.items()),
            {key.lstrip("+"): _plain(pairs[key]) for key in varying},
        )


def _pair(override: str) -> tuple[str, str]:
    """Name and value; a path loses the backslashes of Hydra's grammar, which does not apply to paths."""
    key, _, value = override.partition("=")
    return key, _plain(value) if key in VERBATIM else value


def _plain(value: str) -> str:
    """A value without the backslashes of Hydra's grammar, unless it is in quotes."""
    return value if value[:1] in ("'", '"') else re.sub(r"\\(.)", r"\1", value)


def _parsed(parser: OverridesParser, override: str) -> Override:
    """Raises ConfigError if the override cannot be read."""
    # A path may contain characters that Hydra's grammar cannot parse without quotes.
    for text in (override, quoted(override)):
        try:
            parsed = parser.parse_overrides([text])[0]
        except UNREADABLE:
            continue
        value = parsed.value()
        # glob(*) means the choices that users see.
        if isinstance(value, Glob) and parsed.key_or_group in PLUGIN_GROUPS:
            value.exclude.append(HIDDEN)
        return parsed
    raise ConfigError(f"{' '.join(override.split())}: cannot be read; {FORM}")


def _count(override: Override) -> int:
    """The number of values of a sweep, at most `MAX_JOBS` + 1.

    Raises:
        ConfigError: there are none, or they cannot be counted.
    """
    name, text = override.key_or_group, override.get_value_string()
    if not override.is_discrete_sweep():
        raise ConfigError(f"{name} ({text}): has no single values; give a list such as 0.1,0.2 or range(0,1,0.1)")
    value = override.value()
    try:
        # Hydra's iterator of a shuffled range would build the whole list, even of range(1000000000).
        values = value.range() if isinstance(value, RangeSweep) else override.sweep_string_iterator()
        count = sum(1 for _ in itertools.islice(values, MAX_JOBS + 1))
    except UNREADABLE as error:
        raise ConfigError(
            f"{name} ({text}): cannot be counted ({what_hydra_says(error)}); give a list such as 1,2,3"
        ) from None
    if not count:
        raise ConfigError(f"{name} ({text}): has no values; give at least one")
    return count
