"""Declares every option with its type, default, help text and range, and the algorithms with their options.

Nothing is declared elsewhere; ``conf/`` chooses and overrides. The tree that Hydra composes, ``--help`` and the range
checks are made from these fields; `checks` has the rules between several options. Nothing in a configuration is ever
executed or instantiated.

The table of algorithms says how updates are applied, or how often workers communicate.
"""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import OmegaConf

from tf2dist.config.convert import CATCH_ALL
from tf2dist.config.option import (
    COUNT,
    MAX_COUNT,
    MAX_SECS,
    POSITIVE,
    SECS,
    Constraint,
    above,
    at_least,
    at_most,
    between,
    choice,
    is_number,
    is_pattern,
    one_of,
    option,
    options_of,
)

IS_MOMENTUM = Constraint(lambda value: 0 <= value < 1, "must be at least 0 and less than 1, such as 0.9")


@dataclass(frozen=True)
class AlgorithmEntry:
    """One row of the table.

    Attributes:
        implementation: the class, as `pkgutil.resolve_name` takes it: what reads options does not import TensorFlow.
        mode: for which it is; plain is for all modes.
        options: those that no other algorithm has.
        sends_weights: whether workers send weights, on which they go on computing: rounding them would add up.
    """

    implementation: str
    mode: str = "async"
    options: tuple[str, ...] = ()
    sends_weights: bool = False


_ROOM = "tf2dist.training.parameter_server.algorithms"
ALGORITHMS = {
    "plain": AlgorithmEntry(f"{_ROOM}:Algorithm"),
    "staleness_aware": AlgorithmEntry(f"{_ROOM}:StalenessAware"),
    "delay_compensated": AlgorithmEntry(f"{_ROOM}:DelayCompensated", options=("strength",)),
    "local_sgd": AlgorithmEntry(
        "tf2dist.training.synchronous.local_sgd:LocalSgdStep",
        mode="sync",
        options=("local_steps", "outer_momentum", "outer_learning_rate"),
        sends_weights=True,
    ),
}


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """How the parameter servers apply updates, or how often synchronous workers communicate."""

    kind: str = choice("plain", one_of(*ALGORITHMS))
    strength: float = option(0.04, POSITIVE, help="algorithm=delay_compensated: the factor lambda of the correction")
    local_steps: int = option(
        8, *COUNT, help="algorithm=local_sgd: how many steps a worker takes on its own between two averages"
    )
    outer_momentum: float = option(
        0.0, IS_MOMENTUM, help="algorithm=local_sgd: Nesterov momentum of the steps from one average to the next"
    )
    outer_learning_rate: float = option(
        1.0, POSITIVE, help="algorithm=local_sgd: the factor of these steps; 1 without momentum: the average itself"
    )

    @property
    def has_outer_steps(self) -> bool:
        return self.outer_momentum > 0 or self.outer_learning_rate != 1


MODES = ("async", "sync", "sync_replicas")
PS_MODES = ("async", "sync_replicas")  # with parameter servers and a coordinator
CONTROL_PORT_SHIFT = 1000  # from a task's port to its control port, at which its launching process listens
MAX_SHIFT = 32_767  # half of all ports, so that for every port either the sum or the difference is a port too
MAX_EPOCHS = 10**6
PAUSE_FORM = re.compile(r"((?:chief|worker)-[0-9]{1,9}) at ([0-9]{1,15}) for ([0-9]{1,15}(?:\.[0-9]{1,15})?)")


@dataclass(frozen=True)
class Pause:
    """A worker that freezes once.

    Attributes:
        task: its name, such as "worker-2".
        step: the number of the step in which it does, among its own steps, from 1.
        secs: for how long.
    """

    task: str
    step: int
    secs: float

    @classmethod
    def parse(cls, text: str) -> "Pause":
        """The pause that a text such as "worker-2 at 300 for 5" asks for.

        Raises:
            ValueError: the text has another form, or its numbers are out of range.
        """
        match = PAUSE_FORM.fullmatch(text)
        if not match:
            raise ValueError(f"{text} has not the form of a pause")
        pause = cls(match[1], int(match[2]), float(match[3]))
        if not (1 <= pause.step <= MAX_COUNT and 0 < pause.secs <= MAX_SECS):
            raise ValueError(f"{text} has a number out of range")
        return pause


def is_pause(text: str) -> bool:
    try:
        Pause.parse(text)
    except ValueError:
        return False
    return True


IS_ACCURACY = Constraint(lambda value: 0 < value <= 1, "must be more than 0 and at most 1, such as 0.97")
IS_FRACTION = Constraint(lambda value: 0 < value <= 1, "must be more than 0 and at most 1, such as 0.2")
ARE_DELAYS = Constraint(
    lambda delays: all(is_number(secs) and 0 <= secs <= MAX_SECS for secs in delays),
    f"must be a number of seconds for each worker, such as [0,0,0.05], from 0 to {MAX_SECS:.0f}, a year",
)
IS_PAUSE = Constraint(is_pause, "must name a worker, one of its own steps, and seconds, as in 'worker-2 at 300 for 5'")
IS_PATTERN = Constraint(is_pattern, "must be a regular expression, such as 'hidden[123]'")
IS_FLOAT32 = Constraint(
    lambda value: value == "float32",
    "must be float32, the type in which gradients and updates are sent; give keras.floatx=float32, and "
    "devices.precision=bfloat16 for mixed precision",
)


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    kind: str = choice("local")  # one of `cluster.sources`
    num_workers: int = option(3, *COUNT)
    num_ps: int = option(1, at_least(0), help="number of parameter servers, not with mode=sync")
    min_workers: int | None = option(
        None,
        *COUNT,
        help="mode=async on many hosts; how many workers a run begins with, while others may join later; null: all",
    )
    # Under the names of TensorFlow's jobs, as TF_CONFIG has them.
    chief: list[str] = option([], help="lists of host:port, only with cluster=hosts")
    ps: list[str] = option([])
    worker: list[str] = option([])
    evaluator: list[str] = option([])
    addresses: list[str] = option(
        [], help="host or host:port of each task in order, only with cluster=ranks; []: from the environment"
    )
    rank: int | None = option(None, at_least(0), help="of this task in cluster.addresses, from 0")
    check_address: bool = option(
        True, help="refuse an address that is not this host's; false for one that leads here through a proxy"
    )
    allow_public: bool = option(
        False, help="accept an address that can be reached from the internet; TensorFlow's servers have no password"
    )
    control_port_shift: int = option(
        CONTROL_PORT_SHIFT,
        between(1, MAX_SHIFT),
        help="distance from each task's port to its control port; subtracted where the sum exceeds 65535",
    )
    all_reduce: str = option(
        "auto",
        one_of("auto", "nccl", "tf2dist", "tensorflow"),
        help="mode=sync; auto: NCCL if each replica has a GPU of its own and NCCL is installed, else tf2dist's own if "
        "the workers can connect, else TensorFlow's ring; or always nccl, tf2dist or tensorflow (its ring)",
    )
    transfer_dtype: str = option(
        "float32",
        one_of("float32", "bfloat16", "float16"),
        help="modes sync and async; how the gradients of large variables travel, and with async their values, too",
    )
    placement: str = option(
        "round_robin",
        one_of("round_robin", "balanced", "partitioned"),
        help="modes with ps; round_robin: variables go to the parameter servers in turn; balanced: each to the one "
        "with the fewest bytes so far; partitioned: the same, with large ones cut over several",
    )
    min_part_bytes: int = option(
        256 << 10,
        *COUNT,
        help="cluster.placement=partitioned: smallest size of a part; variables of less than two parts are not cut",
    )


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Which task this process is, with cluster=hosts, and how it ends."""

    type: str | None = option(None, help="chief, worker, ps or evaluator")
    index: int | None = option(None)
    on_term: str = option(
        "stop",
        one_of("stop", "leave"),
        help="what SIGTERM to one task does; stop: all tasks save and end; leave: a worker with parameter servers ends "
        "alone, and may come back",
    )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    name: str = choice("mnist")
    dir: str | None = option(
        None, help="where tensorflow-datasets keeps the data; null: TFDS_DATA_DIR or ~/tensorflow_datasets"
    )
    offline: str = option(
        "fallback",
        one_of("fallback", "fail"),
        help="if the data cannot be had: fallback (train on digits) or fail (always on many hosts)",
    )
    num_validation: int = option(
        0, at_least(0), help="how many of the first training examples are held out for validation"
    )
    download_timeout_secs: float = option(300.0, *SECS)
    arguments: dict[str, Any] = field(
        default_factory=dict, metadata=CATCH_ALL
    )  # those of a choice, or of a plugin's data


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    # Neither by default: the length of a run depends on the data, which is known only later.
    steps: int | None = option(None, *COUNT, help="number of global steps; or give train.epochs")
    epochs: float | None = option(
        None,
        above(0),
        at_most(MAX_EPOCHS),
        help="passes of the whole cluster over the training set; both null: the default of the data",
    )
    batch_size_per_worker: int = option(100, *COUNT)
    log_every_steps: int = option(100, *COUNT, help="interval of a worker's log lines, in its own steps")
    eval_every_steps: int | None = option(
        None, *COUNT, help="interval of evaluations on the validation set, in global steps; null: only at the end"
    )
    until_accuracy: float | None = option(
        None, IS_ACCURACY, help="end the training at the first of these evaluations with this accuracy, such as 0.97"
    )
    until_secs: float | None = option(
        None, *SECS, help="end it at the first of these evaluations after so many seconds of training"
    )
    steps_per_execution: int | None = option(
        None, *COUNT, help="number of steps in one call of TensorFlow; null: chosen automatically"
    )


@dataclass(kw_only=True, slots=True)
class SyncReplicasConfig:
    replicas_to_aggregate: int | None = option(
        None,
        *COUNT,
        help="mode=sync_replicas; how many gradients make a step: fewer than the workers leave some of them as "
        "backups, with more a worker gives several; null: as many as the workers",
    )


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every_secs: float | None = option(
        600.0, *SECS, help="save at this interval, besides at the end and on a signal; null: not by time"
    )
    every_steps: int | None = option(None, *COUNT, help="save at every multiple of this number of global steps")
    keep: int = option(3, *COUNT, help="number of checkpoints to keep")


@dataclass(kw_only=True, slots=True)
class DevicesConfig:
    gpu_memory_fraction: float | None = option(
        None, IS_FRACTION, help="a fixed fraction of each GPU's memory, such as 0.2; null: it grows as needed"
    )
    xla: bool = option(False, help="compile the forward and backward pass with XLA")
    precision: str = option(
        "float32",
        one_of("float32", "bfloat16", "float16"),
        help="float32, or bfloat16 or, with mode=sync, float16 for mixed precision",
    )
    onednn: bool | None = option(
        None,
        help="compute with oneDNN on CPUs; null: for models known to have large dense layers, and else as "
        "TF_ENABLE_ONEDNN_OPTS or the processor tells TensorFlow",
    )


@dataclass(kw_only=True, slots=True)
class KerasConfig:
    """None stands for the value in keras.json, or else for Keras's default; `load` completes them."""

    floatx: str | None = option(None, IS_FLOAT32, help="float32")
    image_data_format: str | None = option(
        None,
        one_of("channels_last", "channels_first"),
        help="channels_last or channels_first: the layout that layers assume; the images are not transposed",
    )
    epsilon: float | None = option(
        None, POSITIVE, help="the small number that Keras adds to divisors; Keras's default is 1e-7"
    )


@dataclass(kw_only=True, slots=True)
class SimulateConfig:
    """Workers that are slowed down on purpose."""

    delay_secs: list[float] = option(
        [], ARE_DELAYS, help="slow workers on purpose: how much longer a step of each takes, such as [0,0,0.05]"
    )
    distribution: str = option(
        "constant",
        one_of("constant", "exponential"),
        help="constant, or exponential: a new delay is drawn for each step, with simulate.delay_secs as the means",
    )
    pause: str | None = option(
        None, IS_PAUSE, help="one pause: a worker, its own step, and seconds, as in 'worker-2 at 300 for 5'"
    )

    @property
    def is_on(self) -> bool:
        return any(self.delay_secs) or self.pause is not None

    @property
    def parsed_pause(self) -> Pause | None:
        return Pause.parse(self.pause) if self.pause else None


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """All options of a run. `model` and `optimizer` hold a name and its arguments.

    In files and on the command line the arguments of the data stand among its other options.
    """

    mode: str = choice("async", one_of(*MODES))
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] = field(default_factory=lambda: {"name": "dnn"})
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sync_replicas: SyncReplicasConfig = field(default_factory=SyncReplicasConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    keras: KerasConfig = field(default_factory=KerasConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    plugins: list[str] = option([], help="Python files that register your own models, data or optimizers")
    run_dir: str | None = option(
        None,
        help="the directory of the run; an existing run is continued; null: outputs/DATE_TIME-MODE-MODEL",
    )
    init_from: str | None = option(
        None, help="a run directory whose newest checkpoint gives a new run its first weights"
    )
    init_layers: str | None = option(
        None, IS_PATTERN, help="with init_from: only layers whose names match, such as 'hidden[123]'"
    )
    seed: int = option(0, between(0, 2**31 - 1), help="the seed of everything random: weights, shuffling, dropout")
    profile: bool = option(False, help="profile two seconds of the training, for TensorBoard")
    figure: bool = option(True, help="draw loss, metrics and staleness to run_dir/training.png at the end")
    timeline: bool = option(
        False, help="record when each worker's steps begin and end, in run_dir/timeline; makes small steps a bit slower"
    )
    startup_timeout_secs: float = option(60.0, *SECS, help="how long to wait for the other tasks at the start")
    watchdog_secs: float = option(
        120.0,
        *SECS,
        help="a task without progress for this long is lost (600 more at its start); without a sign of life, after "
        "0.6 of it",
    )
    max_restarts: int = option(3, at_least(0), help="how many times lost tasks are restarted")
    grace_secs: float = option(10.0, *SECS, help="how long tasks may take to save and exit after a signal")

    @property
    def silence_secs(self) -> float:
        """How long a task or a host may show no sign of life."""
        # Shorter than `watchdog_secs`, so that a silent task is found before the tasks that wait for it give up.
        return 0.6 * self.watchdog_secs

    def as_tree(self) -> dict[str, Any]:
        """All options as a tree, in the form of files and the command line."""
        tree = asdict(self)
        tree["data"] |= tree["data"].pop("arguments")
        return tree

    def to_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.as_tree()))


OPTIONS = dict(options_of(RunConfig))
SECTIONS = {name.partition(".")[0] for name in OPTIONS if "." in name}
