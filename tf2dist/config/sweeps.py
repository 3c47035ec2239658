"""The jobs of a sweep, expanded by Hydra's own sweeper, each with its checked configuration."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from omegaconf import DictConfig, open_dict

from tf2dist.config.compose import ERRORS, FORM, ConfigSource, hydra_message, open_hydra, overrides_of, quoted, setting
from tf2dist.config.load import to_config
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError, RequestError

MAX_JOBS = 1000  # all are checked before the first begins, which takes a tenth of a second each
Check = Callable[[RunConfig], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep.

    Attributes:
        varying: the values of the options that the sweep varies.
        folder: its run directory, relative to that of the sweep.
        config: the configuration of its command line, without the run directory.
    """

    number: int
    varying: dict[str, str]
    folder: str
    config: RunConfig


def jobs_of(hydra: Hydra, composed: DictConfig, check: Check) -> list[Job]:
    """The checked jobs of a sweep; none if its sweeper decides about jobs by earlier ones.

    Args:
        composed: the configuration of the whole sweep.
        check: raises RequestError for a configuration that cannot be run.
    """
    if not is_basic(composed, "sweeper"):
        _check_job(composed, check)
        return []
    params = [f"{key}={value}" for key, value in (composed.hydra.sweeper.params or {}).items()]
    jobs = []
    # All jobs are checked before the first one starts: a mistake in the last must not be found hours later.
    for number, (line, varying) in enumerate(_expanded([*params, *overrides_of(composed)], hydra.config_loader)):
        try:
            job_config = hydra.config_loader.load_sweep_config(composed, list(line))
            with open_dict(job_config):
                job_config.hydra.job.num = number
            config = _check_job(job_config, check)
        except RequestError as error:
            raise type(error)(f"{error} (in job {number} of the sweep: {' '.join(line)[:100]})") from None
        jobs.append(Job(number, varying, setting(job_config, "hydra.sweep.subdir"), config))
    folders = [job.folder for job in jobs]
    if duplicates := [name for name in folders if folders.count(name) > 1]:
        raise ConfigError(
            f"hydra.sweep.subdir ({duplicates[0]}): is the same for two jobs; put ${{hydra.job.num}} into it"
        )
    return jobs


def is_basic(composed: Any, kind: str) -> bool:
    """Whether the launcher or the sweeper is the one that comes with Hydra."""
    target: str = composed.hydra[kind].get("_target_", "")
    return target.startswith("hydra._internal.core_plugins.basic_")


def _check_job(composed: DictConfig, check: Check) -> RunConfig:
    config = to_config(composed, None)
    if config.cluster.kind != "local":
        raise ConfigError(f"cluster ({config.cluster.kind}): a sweep runs on this machine alone; take a local one")
    if config.run_dir:
        raise ConfigError(f"run_dir ({config.run_dir}): each job of a sweep has its own; give hydra.sweep.dir=DIR")
    check(config)
    return config


def expanded(overrides: list[str], source: ConfigSource) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """The command line of each job and its values of the varying options, in the order of Hydra's `BasicSweeper`."""
    with open_hydra(source) as hydra:
        yield from _expanded([quoted(override) for override in overrides], hydra.config_loader)


def _expanded(overrides: list[str], loader: ConfigLoader) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    parser = OverridesParser.create(config_loader=loader)
    parsed = [_parsed(parser, override) for override in overrides]
    # If an option is given twice, the last one counts, as in a single run.
    last_overrides = {override.get_key_element(): override for override in parsed}
    varying = [key for key, override in last_overrides.items() if override.is_sweep_override()]
    # Before the expansion, which would build the list of all combinations in memory.
    if math.prod(_count(last_overrides[key]) for key in varying) > MAX_JOBS:
        raise ConfigError(f"--multirun: would make more than {MAX_JOBS:,} jobs; sweep over fewer values")
    # There is one batch, since its size has no limit.
    for line in BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]:
        values = dict(override.split("=", 1) for override in line)
        yield tuple(line), {key.lstrip("+"): plain(values[key]) for key in varying}


def plain(value: str) -> str:
    """A value without the backslashes of Hydra's grammar, unless it is in quotes."""
    return value if value[:1] in ("'", '"') else re.sub(r"\\(.)", r"\1", value)


def _parsed(parser: OverridesParser, override: str) -> Override:
    """Raises ConfigError if the override cannot be read."""
    try:
        return parser.parse_overrides([override])[0]
    except ERRORS:
        raise ConfigError(f"{' '.join(override.split())}: cannot be read; {FORM}") from None


def _count(override: Override) -> int:
    """The number of values of a sweep, at most `MAX_JOBS` + 1."""
    name, text = override.key_or_group, override.get_value_string()
    if not override.is_discrete_sweep():
        raise ConfigError(f"{name} ({text}): has no single values; give a list such as 0.1,0.2 or range(0,1,0.1)")
    value = override.value()
    try:
        # Hydra's iterator of a shuffled range would build the whole list, even of range(1000000000).
        values = value.range() if isinstance(value, RangeSweep) else override.sweep_string_iterator()
        count = sum(1 for _ in itertools.islice(values, MAX_JOBS + 1))
    except ERRORS as error:
        raise ConfigError(
            f"{name} ({text}): cannot be counted ({hydra_message(error)}); give a list such as 1,2,3"
        ) from None
    if not count:
        raise ConfigError(f"{name} ({text}): has no values; give at least one")
    return count
