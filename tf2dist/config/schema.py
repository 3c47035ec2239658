"""The configuration: typed values, and one strict load at the door; see `checks` for the rules between them.

Mistakes become one `ConfigError` that names the option, its value, the rule and the way out.
Nothing in a configuration is ever executed or instantiated.
"""

import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.errors import ConfigError

CONTROL_PORT_SHIFT = 1000  # from a task's port to that of its launching process


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
    control_port_shift: int = CONTROL_PORT_SHIFT
    all_reduce: str = "auto"


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
    arguments: dict[str, Any] = field(default_factory=dict)  # what a plugin's data takes beside these


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
class KerasConfig:
    """See `keras_settings`; None until it is resolved."""

    floatx: str | None = None
    image_data_format: str | None = None
    epsilon: float | None = None


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything a run is made of. `model` and `optimizer` hold a name and its own arguments.

    In a file, as on the command line, the arguments of the data stand among its options.
    """

    mode: str = "async"
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] = field(default_factory=lambda: {"name": "dnn"})
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    keras: KerasConfig = field(default_factory=KerasConfig)
    plugins: list[str] = field(default_factory=list)
    run_dir: str | None = None
    init_from: str | None = None
    init_layers: str | None = None
    seed: int = 0
    profile: bool = False
    startup_timeout_secs: float = 60.0
    watchdog_secs: float = 120.0
    max_restarts: int = 3
    grace_secs: float = 10.0

    @property
    def silence_secs(self) -> float:
        """How long a task or a host may show no sign of life: it must be found before those that wait give up."""
        return 0.6 * self.watchdog_secs

    def as_tree(self) -> dict[str, Any]:
        """All options as the user gives them."""
        tree = asdict(self)
        tree["data"] |= tree["data"].pop("arguments")
        return tree

    def to_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.as_tree()))


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
    """Raises ConfigError: a value is not of its option's type."""
    try:
        _check_truths(cfg, RunConfig)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), _with_arguments(cfg)))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    assert isinstance(config, RunConfig)
    return config


def _with_arguments(cfg: Any) -> Any:
    """The same, with the arguments of the data apart from the options that all data has."""
    if not OmegaConf.is_dict(cfg) or not OmegaConf.is_dict(cfg.get("data")):
        return cfg
    own = {option.name for option in fields(DataConfig)} - {"arguments"}
    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    given = tree["data"]
    tree["data"] = {key: value for key, value in given.items() if key in own}
    tree["data"]["arguments"] = {key: value for key, value in given.items() if key not in own}
    return OmegaConf.create(tree)


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


def _check_truths(node: Any, section: Any, prefix: str = "") -> None:
    """OmegaConf takes every whole number for a truth."""
    for option in fields(section) if OmegaConf.is_dict(node) else ():
        value = OmegaConf.select(node, option.name)
        if is_dataclass(option.type):
            _check_truths(value, option.type, f"{prefix}{option.name}.")
        elif option.type is bool and type(value) in (int, float) and value not in (0, 1):
            raise ConfigError(f"{prefix}{option.name} ({value}): must be true or false")
