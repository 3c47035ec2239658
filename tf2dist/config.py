"""The configuration: typed values, the rules between them, and one strict load at the door.

Mistakes become one `ConfigError` that names the option, its value, the rule and the way out.
Nothing in a configuration is ever executed or instantiated.
"""

import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.errors import ConfigError

MODES = ("async", "sync")
SCHEDULES = ("constant", "cosine")


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    kind: str = "local"
    num_workers: int = 3
    num_ps: int = 1
    chief: list[str] = field(default_factory=list)
    ps: list[str] = field(default_factory=list)
    worker: list[str] = field(default_factory=list)
    evaluator: list[str] = field(default_factory=list)
    check_address: bool = True
    control_port_shift: int = 1000


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    type: str | None = None
    index: int | None = None


@dataclass(kw_only=True, slots=True)
class DataConfig:
    name: str = "mnist"
    dir: str | None = None
    offline: str = "fallback"
    num_validation: int = 0
    download_timeout_secs: float = 300.0


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    steps: int | None = None
    epochs: float | None = None
    batch_size_per_worker: int = 100
    log_every_steps: int = 100
    eval_every_steps: int | None = None
    steps_per_execution: int | None = None


@dataclass(kw_only=True, slots=True)
class DevicesConfig:
    gpu_memory_fraction: float | None = None
    xla: bool = False
    precision: str = "float32"


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything a run is made of. `model` and `optimizer` hold a name and its own arguments."""

    mode: str = "async"
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] = field(default_factory=lambda: {"name": "dnn"})
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})
    train: TrainConfig = field(default_factory=TrainConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    plugins: list[str] = field(default_factory=list)
    run_dir: str | None = None
    seed: int = 0
    startup_timeout_secs: float = 60.0
    grace_secs: float = 10.0

    def to_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(asdict(self)))


def from_yaml(text: str) -> RunConfig:
    """The configuration that another process has checked and written."""
    return to_typed(OmegaConf.create(text))


def to_typed(cfg: Any) -> RunConfig:
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    assert isinstance(config, RunConfig)
    return config


def one_line(error: Exception) -> str:
    """OmegaConf's and Hydra's messages, shortened to "name (value): rule"."""
    text = str(error)
    key = re.search(r"full_key: (\S+)", text)
    wrong = re.search(r"Value '(.*)' (?:of type '\w+' could not be converted to|is not a valid) (\w+)", text)
    kinds = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    if key and wrong:
        return f"{key[1]} ({wrong[1]}): must be {kinds.get(wrong[2], wrong[2])}"
    first = text.strip().splitlines()[0]
    return f"{key[1]}: {first}" if key else first


def check(config: RunConfig) -> None:
    """The rules that a type cannot express.

    Raises:
        ConfigError: one line for each rule that is broken.
    """
    train, cluster, devices, data = config.train, config.cluster, config.devices, config.data
    fraction = devices.gpu_memory_fraction
    rules: list[tuple[str, Any, bool, str]] = [
        ("mode", config.mode, config.mode in MODES, "must be async or sync"),
        ("train.steps", train.steps, train.steps is None or train.steps >= 1, "must be at least 1"),
        ("train.epochs", train.epochs, train.epochs is None or 0 < train.epochs < math.inf, "must be more than 0"),
        (
            "train.epochs",
            train.epochs,
            train.epochs is None or train.steps is None,
            f"train.steps is {train.steps}; give one of the two",
        ),
        _at_least_one("train.batch_size_per_worker", train.batch_size_per_worker),
        _at_least_one("train.log_every_steps", train.log_every_steps),
        _at_least_one("train.eval_every_steps", train.eval_every_steps),
        _at_least_one("train.steps_per_execution", train.steps_per_execution),
        _at_least_one("cluster.num_workers", cluster.num_workers),
        (
            "cluster.num_ps",
            cluster.num_ps,
            config.mode == "sync" or cluster.num_ps >= 1,
            "mode=async keeps the variables on parameter servers and needs at least 1; or choose mode=sync",
        ),
        (
            "cluster.control_port_shift",
            cluster.control_port_shift,
            1 <= cluster.control_port_shift <= 32767,
            "must be from 1 to 32767",
        ),
        *_check_hosts(config),
        ("data.offline", data.offline, data.offline in ("fallback", "fail"), "must be fallback or fail"),
        ("data.num_validation", data.num_validation, data.num_validation >= 0, "must be at least 0"),
        _positive("data.download_timeout_secs", data.download_timeout_secs),
        (
            "devices.gpu_memory_fraction",
            fraction,
            fraction is None or 0 < fraction <= 1,
            "must be more than 0 and at most 1, such as 0.2",
        ),
        (
            "devices.precision",
            devices.precision,
            devices.precision in ("float32", "bfloat16"),
            "must be float32 or bfloat16",
        ),
        ("seed", config.seed, 0 <= config.seed < 2**31, "must be from 0 to 2147483647"),
        _positive("startup_timeout_secs", config.startup_timeout_secs),
        _positive("grace_secs", config.grace_secs),
        *_check_arguments("model", config.model),
        *_check_arguments("optimizer", config.optimizer),
        *[("plugins", path, Path(path).is_file(), "there is no such Python file") for path in config.plugins],
    ]
    broken = [f"{name} ({value}): {rule}" for name, value, holds, rule in rules if not holds]
    if broken:
        raise ConfigError("\n".join(broken))


def _check_hosts(config: RunConfig) -> list[tuple[str, Any, bool, str]]:
    """Host lists and a task that are not looked at would mean a host that trains alone."""
    given = {f"cluster.{job}": getattr(config.cluster, job) or None for job in ("chief", "ps", "worker", "evaluator")}
    given |= {"task.type": config.task.type, "task.index": config.task.index}
    used = config.cluster.kind == "hosts"
    return [(name, value, value is None or used, "is for cluster=hosts; add that") for name, value in given.items()]


def _at_least_one(name: str, value: int | None) -> tuple[str, Any, bool, str]:
    return (name, value, value is None or value >= 1, "must be at least 1")


def _positive(name: str, value: float) -> tuple[str, Any, bool, str]:
    return (name, value, 0 < value < math.inf, "must be more than 0")


def _check_arguments(group: str, arguments: dict[str, Any]) -> list[tuple[str, Any, bool, str]]:
    """Arguments of models and optimizers are numbers, switches, or lists of numbers."""
    rules: list[tuple[str, Any, bool, str]] = []
    for key, value in arguments.items():
        items = value if isinstance(value, list) else [value]
        if (group, key) == ("optimizer", "schedule"):
            rules.append((f"{group}.{key}", value, value in SCHEDULES, f"must be {' or '.join(SCHEDULES)}"))
            continue
        if key == "name":
            rules.append((f"{group}.name", value, isinstance(value, str), "must be a name"))
            continue
        plain = all(item is None or isinstance(item, int | float) for item in items)
        rules.append((f"{group}.{key}", value, plain, "must be a number, true or false, or null"))
        if key in ("learning_rate", "hidden_units") and plain:
            positive = all(item is not None and 0 < item < math.inf for item in items)
            rules.append((f"{group}.{key}", value, positive, "must be more than 0"))
    return rules
