"""The configuration: typed values, the rules between them, and one strict load at the door.

Mistakes become one `ConfigError` that names the option, its value, the rule and the way out.
Nothing in a configuration is ever executed or instantiated.
"""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist import arguments, paths
from tf2dist.errors import ConfigError
from tf2dist.rules import Rule, at_least_one, is_pattern, positive_secs

MODES = ("async", "sync")
CLUSTER_KINDS = ("local", "hosts", "tf_config")
MAX_LOCAL_TASKS = 64  # as many ports as the fork server sets aside
MAX_EPOCHS = 10**6


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
    allow_public: bool = False
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
class CheckpointConfig:
    every_secs: float | None = 600.0
    every_steps: int | None = None
    keep: int = 3


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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    plugins: list[str] = field(default_factory=list)
    run_dir: str | None = None
    init_from: str | None = None
    init_layers: str | None = None
    seed: int = 0
    startup_timeout_secs: float = 60.0
    watchdog_secs: float = 120.0
    max_restarts: int = 3
    grace_secs: float = 10.0

    @property
    def silence_secs(self) -> float:
        """How long a task may be silent: a frozen one must be found before those that wait for it give up."""
        return 0.6 * self.watchdog_secs

    def to_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(asdict(self)))


def from_yaml(text: str) -> RunConfig:
    """The configuration that another process has checked and written.

    Raises:
        ConfigError: it is no such configuration; a YAML tag that would make an object is none.
    """
    try:
        return to_typed(OmegaConf.create(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration is no plain YAML: {one_line(error)}") from None


def to_typed(cfg: Any) -> RunConfig:
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    assert isinstance(config, RunConfig)
    return config


KINDS = {
    "int": "a whole number",
    "Integer": "a whole number",
    "float": "a number",
    "Float": "a number",
    "bool": "true or false",
    "str": "a word or a path",
    "list": "a list such as [a,b]",
}


def one_line(error: Exception) -> str:
    """OmegaConf's and Hydra's messages, shortened to "name (value): rule"."""
    text = str(error)
    key = re.search(r"full_key: (\S+)", text)
    if key:
        if wrong := re.search(r"Value '(.*)' (?:of type '\w+' could not be converted to|is not a valid) (\w+)", text):
            return f"{key[1]} ({wrong[1]}): must be {KINDS.get(wrong[2], wrong[2])}"
        if wrong := re.search(r"Incompatible value 'None' for field of type '(\w+)'|NoneType is not a subclass", text):
            return f"{key[1]} (null): must be {KINDS.get(wrong[1] or 'str', wrong[1])}"
        if wrong := re.search(r"Cannot convert '\w+' to string: '(.*)'", text):
            return f"{key[1]} ({wrong[1]}): must be {KINDS['str']}"
        if "is not a ListConfig" in text or "is not Optional" in text:
            return f"{key[1]}: must be {KINDS['list']}"
        if re.search(r"Key '.*' not in '\w+'", text):
            return f"{key[1]}: there is no such option; see --help"
    first = " ".join((text.strip().splitlines() or [type(error).__name__])[0].split())
    return f"{key[1]}: {first}" if key else first


def check(config: RunConfig) -> None:
    """The rules that a type cannot express.

    Raises:
        ConfigError: one line for each rule that is broken.
    """
    train, cluster, devices, data = config.train, config.cluster, config.devices, config.data
    fraction = devices.gpu_memory_fraction
    rules: list[Rule] = [
        ("mode", config.mode, config.mode in MODES, "must be async or sync"),
        at_least_one("train.steps", train.steps),
        ("train.epochs", train.epochs, train.epochs is None or train.epochs > 0, "must be more than 0"),
        ("train.epochs", train.epochs, not (train.epochs or 0) > MAX_EPOCHS, f"must be at most {MAX_EPOCHS:,}"),
        (
            "train.epochs",
            train.epochs,
            train.epochs is None or train.steps is None,
            f"train.steps is {train.steps}; give one of the two",
        ),
        at_least_one("train.batch_size_per_worker", train.batch_size_per_worker),
        at_least_one("train.log_every_steps", train.log_every_steps),
        at_least_one("train.eval_every_steps", train.eval_every_steps),
        at_least_one("train.steps_per_execution", train.steps_per_execution),
        ("cluster.kind", cluster.kind, cluster.kind in CLUSTER_KINDS, f"must be one of {', '.join(CLUSTER_KINDS)}"),
        at_least_one("cluster.num_workers", cluster.num_workers),
        ("cluster.num_ps", cluster.num_ps, cluster.num_ps >= 0, "must be at least 0"),
        *_check_local(config),
        (
            "cluster.num_ps",
            cluster.num_ps,
            config.mode == "sync" or cluster.num_ps != 0,
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
        positive_secs("data.download_timeout_secs", data.download_timeout_secs),
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
        positive_secs("startup_timeout_secs", config.startup_timeout_secs),
        positive_secs("watchdog_secs", config.watchdog_secs),
        ("max_restarts", config.max_restarts, config.max_restarts >= 0, "must be at least 0"),
        positive_secs("grace_secs", config.grace_secs),
        *_check_checkpoints(config),
        *arguments.rules("model", config.model, builtin=not config.plugins),
        *arguments.rules("optimizer", config.optimizer, builtin=not config.plugins),
        *paths.rules({"run_dir": config.run_dir, "data.dir": config.data.dir}, config.plugins),
    ]
    broken = [" ".join(f"{name} ({value}): {rule}".split()) for name, value, holds, rule in rules if not holds]
    if broken:
        raise ConfigError("\n".join(broken))


def _check_hosts(config: RunConfig) -> list[Rule]:
    """Host lists and a task that are not looked at would mean a host that trains alone."""
    given = {f"cluster.{job}": getattr(config.cluster, job) or None for job in ("chief", "ps", "worker", "evaluator")}
    given |= {"task.type": config.task.type, "task.index": config.task.index}
    used = config.cluster.kind == "hosts"
    return [(name, value, value is None or used, "is for cluster=hosts; add that") for name, value in given.items()]


def _check_local(config: RunConfig) -> list[Rule]:
    """A local cluster has an end; the larger of the two numbers is named."""
    cluster = config.cluster
    counts = {"cluster.num_workers": cluster.num_workers}
    if config.mode == "async":
        counts["cluster.num_ps"] = cluster.num_ps
    largest = max(counts, key=lambda name: counts[name])
    fits = sum(counts.values()) + (config.mode == "async") <= MAX_LOCAL_TASKS
    rule = f"a local cluster has at most {MAX_LOCAL_TASKS} tasks; use several hosts for more"
    return [(largest, counts[largest], cluster.kind != "local" or fits, rule)]


def _check_checkpoints(config: RunConfig) -> list[Rule]:
    source, layers = config.init_from, config.init_layers
    return [
        positive_secs("checkpoint.every_secs", config.checkpoint.every_secs),
        at_least_one("checkpoint.every_steps", config.checkpoint.every_steps),
        at_least_one("checkpoint.keep", config.checkpoint.keep),
        ("init_from", source, source is None or paths.is_folder(source), "there is no such run directory"),
        ("init_layers", layers, layers is None or source is not None, "is for init_from=RUN_DIR; add that"),
        ("init_layers", layers, is_pattern(layers), "must be a regular expression, such as 'hidden[123]'"),
    ]
