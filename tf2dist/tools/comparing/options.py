"""The options of a comparison itself; all others are those of its runs."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf2dist.config.compose import groups
from tf2dist.config.option import MAX_SECS
from tf2dist.config.schema import MODES, OPTIONS
from tf2dist.errors import ConfigError, nearest
from tf2dist.files import expand, is_path

MAX_WORKERS, MAX_SEEDS = 60, 100
MAX_STEPS = 10**9
# Options of a run that the comparison sets by itself, with what to give instead.
REPLACED = {
    "mode": "modes=[async,sync]",
    "cluster": "workers=3; a comparison runs on this machine alone",
    "cluster.num_workers": "workers=3",
    "simulate.delay_secs": "delays=[0,0.05], which slow down the last worker",
    "sync_replicas.replicas_to_aggregate": "backups=[1], the workers that a step does not wait for",
    "run_dir": "compare_dir=DIR",
    "train.steps": "until=2000steps, or train.epochs, after which every run ends",
    "train.eval_every_steps": "eval_every_examples=5000, since a step has another number of examples in each mode",
    "train.until_accuracy": "until=0.97",
    "train.until_secs": "until=30s",
    "timeline": "nothing: a comparison always records it",
}


@dataclass(frozen=True)
class Until:
    """Where the runs end; `kind`: accuracy, steps or secs."""

    kind: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Until":
        """Reads 0.97, 2000steps or 30s.

        Raises:
            ConfigError: it is none of these.
        """
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

    def __str__(self) -> str:
        return f"{self.value:g}{ {'accuracy': '', 'steps': 'steps', 'secs': 's'}[self.kind] }"


@dataclass(frozen=True)
class Options:
    """The values of the own options of a comparison.

    Attributes:
        modes: each with every delay.
        delays: by which a step of the last worker takes longer, in seconds.
        backups: with mode=sync_replicas, how many workers a step does not wait for; each number is a contender.
        seeds: how often each contender trains, with another seed each time.
        eval_every_examples: how many training examples lie between two evaluations; None: chosen from the data.
        folder: of the comparison; None for a new one.
    """

    modes: tuple[str, ...] = ("sync", "async", "sync_replicas")
    delays: tuple[float, ...] = (0.0, 0.05)
    backups: tuple[int, ...] = (1,)
    workers: int = 3
    seeds: int = 2
    until: Until = Until("accuracy", 0.95)
    eval_every_examples: int | None = None
    folder: Path | None = None


# Without a choice of the user's: with momentum it shows what stale gradients cost, while Adam makes up for some of it.
OPTIMIZER = ("optimizer=momentum", "optimizer.learning_rate=0.04")


def split(arguments: list[str]) -> tuple[Options, list[str]]:
    """The own options of a comparison, and the overrides of its runs.

    Raises:
        ConfigError: an own option has a wrong value, or an override is one that the comparison sets by itself.
    """
    values: dict[str, Any] = {}
    run_overrides = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if key in PARSERS and separator:
            values["folder" if key == "compare_dir" else key] = PARSERS[key](key, value)
        elif key.lstrip("+") in REPLACED:
            raise ConfigError(f"{key} ({value}): is set by the comparison; give {REPLACED[key.lstrip('+')]}")
        else:
            _check_name(key)
            run_overrides.append(argument)
    options = Options(**values)
    _check(options, values)
    if not any(override.lstrip("+").startswith(("optimizer", "experiment")) for override in run_overrides):
        run_overrides += OPTIMIZER
    return options, run_overrides


def _check_name(key: str) -> None:
    """Refuses a name that no run has either, and that is nearly one of ours. Raises ConfigError."""
    if key not in OPTIONS and key not in groups() and (suggestion := nearest(key, PARSERS)) and "." not in key:
        raise ConfigError(f"{key}: there is no such option{suggestion}")


def _check(options: Options, values: dict[str, Any]) -> None:
    """The rules between several options. Raises ConfigError."""
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


def _backups(key: str, text: str) -> tuple[int, ...]:
    return tuple(_integer(key, item, 0, MAX_WORKERS) for item in _items(key, text))


def _integer(key: str, text: str, low: int, high: int) -> int:
    if re.fullmatch(r"[0-9]{1,12}", text) and low <= int(text) <= high:
        return int(text)
    raise ConfigError(f"{key} ({text[:40]}): must be a whole number from {low} to {high:,}")


def _folder(key: str, text: str) -> Path:
    path = expand(text)
    if not is_path(text) or path is None:
        raise ConfigError(f"{key} ({text[:60]}): is not a valid name of a directory; leave it out for the default")
    return path.absolute()


EXAMPLES = {"modes": "modes=[sync,async]", "delays": "delays=[0,0.05]", "backups": "backups=[0,1]"}
PARSERS: dict[str, Callable[[str, str], Any]] = {
    "modes": _modes,
    "delays": _delays,
    "backups": _backups,
    "workers": lambda key, text: _integer(key, text, 1, MAX_WORKERS),
    "seeds": lambda key, text: _integer(key, text, 1, MAX_SEEDS),
    "until": lambda key, text: Until.parse(text),
    "eval_every_examples": lambda key, text: _integer(key, text, 1, 10**12),
    "compare_dir": _folder,
}
