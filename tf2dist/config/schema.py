"""Declares every option with its type, default, help text and range, and the algorithms with their options.

Nothing is declared elsewhere; ``conf/`` chooses and overrides. The tree that Hydra composes, ``--help`` and the range
checks are made from these fields, and so is all that depends on where an option belongs: to a mode, to each host, to
the command line or to `fit`. `checks` has the other rules. Nothing in a configuration is ever executed or instantiated.

The table of algorithms says how updates are applied, or how often workers communicate.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import OmegaConf

from tf2dist.config.option import (
    ARE_DELAYS,
    COMMAND_LINE,
    COUNT,
    IS_ACCURACY,
    IS_FOLDER_NAME,
    IS_FRACTION,
    IS_PATTERN,
    IS_PAUSE,
    IS_RUN,
    POSITIVE,
    SECS,
    Constraint,
    OnlyFor,
    Pause,
    above,
    at_least,
    at_most,
    between,
    choice,
    one_of,
    option,
    options_of,
    section,
)

IS_MOMENTUM = Constraint(lambda value: 0 <= value < 1, "must be at least 0 and less than 1, such as 0.9")


@dataclass(frozen=True)
class AlgorithmEntry:
    """One row of the table.

    Attributes:
        implementation: the class, as `pkgutil.resolve_name` takes it: what reads options does not import TensorFlow.
        mode: for which it is; plain is for all modes.
        sends_weights: whether workers send weights, on which they go on computing: rounding them would add up.
    """

    implementation: str
    mode: str = "async"
    sends_weights: bool = False


_ROOM = "tf2dist.training.parameter_server.algorithms"
ALGORITHMS = {
    "plain": AlgorithmEntry(f"{_ROOM}:Algorithm"),
    "staleness_aware": AlgorithmEntry(f"{_ROOM}:StalenessAware"),
    "delay_compensated": AlgorithmEntry(f"{_ROOM}:DelayCompensated"),
    "local_sgd": AlgorithmEntry("tf2dist.training.synchronous.local_sgd:LocalSgdStep", mode="sync", sends_weights=True),
}
SEND_NO_WEIGHTS = tuple(name for name, entry in ALGORITHMS.items() if not entry.sends_weights)
DELAY_COMPENSATED = OnlyFor("algorithm.kind", ("delay_compensated",))
LOCAL_SGD = OnlyFor("algorithm.kind", ("local_sgd",))


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """How the parameter servers apply updates, or how often synchronous workers communicate."""

    kind: str = choice("plain", one_of(*ALGORITHMS))
    strength: float = option(
        0.04, POSITIVE, DELAY_COMPENSATED, help="algorithm=delay_compensated: the factor lambda of the correction"
    )
    mean_square_decay: float | None = option(
        None, IS_MOMENTUM, DELAY_COMPENSATED, help="algorithm=delay_compensated: for a factor relative to the gradients"
    )
    local_steps: int = option(
        8, *COUNT, LOCAL_SGD, help="algorithm=local_sgd: how many steps a worker takes on its own between two averages"
    )
    outer_momentum: float = option(
        0.0,
        IS_MOMENTUM,
        LOCAL_SGD,
        help="algorithm=local_sgd: Nesterov momentum of the steps from one average to the next",
    )
    outer_learning_rate: float = option(
        1.0,
        POSITIVE,
        LOCAL_SGD,
        help="algorithm=local_sgd: the factor of these steps; 1 without momentum: the average itself",
    )

    @property
    def has_outer_steps(self) -> bool:
        return self.outer_momentum > 0 or self.outer_learning_rate != 1


MODES = ("async", "sync", "sync_replicas")
PS_MODES = ("async", "sync_replicas")  # with parameter servers and a coordinator
CONTROL_PORT_SHIFT = 1000  # from a task's port to its control port, at which its launching process listens
MAX_SHIFT = 32_767  # half of all ports, so that for every port either the sum or the difference is a port too
MAX_EPOCHS = 10**6
IS_FLOAT32 = Constraint(
    lambda value: value == "float32",
    "must be float32, the type in which gradients and updates are sent; give keras.floatx=float32, and "
    "devices.precision=bfloat16 for mixed precision",
)

# Where options have a meaning. An option of one mode stands in the section of its subject, with one of these.
IN_ASYNC = OnlyFor("mode", ("async",), "is for mode=async; leave it out")
IN_SYNC = OnlyFor("mode", ("sync",), "is for mode=sync; leave it out")
IN_SYNC_REPLICAS = OnlyFor("mode", ("sync_replicas",))
WITH_PS = OnlyFor("mode", PS_MODES, "is for modes with a ps; leave it out")
SEVERAL_PS = OnlyFor("mode", PS_MODES, WITH_PS.text, harmless=lambda count: count <= 1)
PS_LEAVES = "with mode=sync every worker takes part in each step, so none can leave; leave it out"
ON_HOSTS, BY_RANK = OnlyFor("cluster.kind", ("hosts",)), OnlyFor("cluster.kind", ("ranks",))
SEVERAL_COMMANDS = ("hosts", "tf_config", "ranks", "slurm")
TOGETHER = "with cluster=local one command starts all workers; leave it out"
NO_SIGNAL = "with cluster=local one command runs all tasks, so none gets a signal of its own; leave it out"
SAYS_IT_ITSELF = "is not for cluster={}, which says it itself; leave it out"
EVALUATED = "is looked at when the validation set is evaluated; add train.eval_every_steps"
WITH_EVALUATIONS = OnlyFor("train.eval_every_steps", text=EVALUATED)
WITH_INIT_FROM = OnlyFor("init_from", text="is for init_from=RUN_DIR; add that")
# A ps adds up what workers send, or workers send their weights: the roundings would add up.
MAY_ROUND = (
    OnlyFor("mode", ("async", "sync"), "is not for mode={}; leave it out"),
    OnlyFor("algorithm.kind", SEND_NO_WEIGHTS, "is not for algorithm={}; leave it out"),
)


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    kind: str = choice("local", scope="place", fit="cluster")  # one of `cluster.sources`
    num_workers: int = option(
        3,
        *COUNT,
        OnlyFor("cluster.kind", ("local",), SAYS_IT_ITSELF),
        help="cluster=local: how many workers",
        fit="cluster",
    )
    num_ps: int = option(
        1,
        at_least(0),
        SEVERAL_PS,
        OnlyFor("cluster.kind", ("local", "ranks", "slurm"), SAYS_IT_ITSELF),
        help="number of parameter servers, not with mode=sync",
        fit="cluster",
    )
    min_workers: int | None = option(
        None,
        *COUNT,
        IN_ASYNC,
        OnlyFor("cluster.kind", SEVERAL_COMMANDS, TOGETHER),
        help="mode=async on many hosts; how many workers a run begins with, while others may join later; null: all",
        scope="job",
    )
    # Under the names of TensorFlow's jobs, as TF_CONFIG has them.
    chief: list[str] = option([], ON_HOSTS, help="the chief as [host:port], only with cluster=hosts", scope="place")
    ps: list[str] = option([], ON_HOSTS, help="likewise, of each ps", scope="place")
    worker: list[str] = option([], ON_HOSTS, help="likewise, of each worker", scope="place")
    evaluator: list[str] = option([], ON_HOSTS, help="likewise, of the evaluator", scope="place")
    addresses: list[str] = option(
        [],
        BY_RANK,
        help="host or host:port of each task in order, only with cluster=ranks; []: from the environment",
        scope="place",
    )
    rank: int | None = option(
        None, at_least(0), BY_RANK, help="of this task in cluster.addresses, from 0", scope="place"
    )
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
        IN_SYNC,
        help="mode=sync; auto: NCCL if each replica has a GPU of its own and NCCL is installed, else tf2dist's own if "
        "the workers can connect, else TensorFlow's ring; or always nccl, tf2dist or tensorflow (its ring)",
        scope="job",
        predicts=False,
    )
    transfer_dtype: str = option(
        "float32",
        one_of("float32", "bfloat16", "float16"),
        *MAY_ROUND,
        help="modes sync and async; how the gradients of large variables travel, and with async their values, too",
        scope="job",
        predicts=False,
    )
    placement: str = option(
        "round_robin",
        one_of("round_robin", "balanced", "partitioned"),
        WITH_PS,
        help="modes with ps; round_robin: variables go to the parameter servers in turn; balanced: each to the one "
        "with the fewest bytes so far; partitioned: the same, with large ones cut over several",
        scope="job",
    )
    min_part_bytes: int = option(
        256 << 10,
        *COUNT,
        OnlyFor("cluster.placement", ("partitioned",)),
        help="cluster.placement=partitioned: smallest size of a part; variables smaller than two parts are not cut",
        scope="job",
    )


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Which task this process is, with cluster=hosts, and how it ends."""

    type: str | None = option(None, ON_HOSTS, help="chief, worker, ps or evaluator", scope="place", predicts=True)
    index: int | None = option(
        None,
        ON_HOSTS,
        help="cluster=hosts: which task of its type this process is, from 0",
        scope="place",
        predicts=True,
    )
    on_term: str = option(
        "stop",
        one_of("stop", "leave"),
        OnlyFor("mode", PS_MODES, PS_LEAVES),
        OnlyFor("cluster.kind", SEVERAL_COMMANDS, NO_SIGNAL),
        help="what SIGTERM to one task does; stop: all tasks save and end; leave: a worker with parameter servers ends "
        "alone, and may come back",
    )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    name: str = choice("mnist", scope="job")
    dir: str | None = option(
        None,
        IS_FOLDER_NAME,
        help="where tensorflow-datasets keeps the data, or the idx files of fashion_mnist; null: TFDS_DATA_DIR or "
        "~/tensorflow_datasets",
        is_text=True,
    )
    offline: str = option(
        "fallback",
        one_of("fallback", "fail"),
        help="if mnist cannot be had: fallback (train on digits) or fail (always on many hosts and with other data)",
    )
    num_validation: int = option(
        0, at_least(0), help="how many of the first training examples are held out for validation", scope="job"
    )
    download_timeout_secs: float = option(300.0, *SECS, help="how long a download of the data may take")
    # Those of a choice, or of a plugin's data.
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    # Neither by default: the length of a run depends on the data, which is known only later.
    steps: int | None = option(
        None, *COUNT, help="number of global steps; or give train.epochs", fit="epochs and steps_per_epoch"
    )
    epochs: float | None = option(
        None,
        above(0),
        at_most(MAX_EPOCHS),
        help="passes of the whole cluster over the training set; both null: the default of the data",
        fit="epochs",
    )
    batch_size_per_worker: int = option(100, *COUNT, help="examples in a batch of one worker", fit="batch_size")
    log_every_steps: int = option(100, *COUNT, help="interval of a worker's log lines, in its own steps")
    eval_every_steps: int | None = option(
        None,
        *COUNT,
        help="interval of evaluations on the validation set, in global steps; null: only at the end",
        fit="validation_freq",
    )
    until_accuracy: float | None = option(
        None,
        IS_ACCURACY,
        WITH_EVALUATIONS,
        help="end the training at the first of these evaluations with this accuracy, such as 0.97",
        fit="callbacks",
    )
    until_secs: float | None = option(
        None,
        *SECS,
        WITH_EVALUATIONS,
        help="end it at the first of these evaluations after so many seconds of training",
        fit="callbacks",
    )
    steps_per_execution: int | None = option(
        None, *COUNT, help="number of steps in one call of TensorFlow; null: chosen automatically"
    )


@dataclass(kw_only=True, slots=True)
class SyncReplicasConfig:
    replicas_to_aggregate: int | None = option(
        None,
        *COUNT,
        IN_SYNC_REPLICAS,
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
        None,
        IS_FRACTION,
        help="a fixed fraction of each GPU's memory, such as 0.2; null: it grows as needed",
        scope="host",
        predicts=True,
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
        scope="host",
        predicts=True,
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
        OnlyFor("simulate.delay_secs"),
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

    mode: str = choice("async", one_of(*MODES), scope="job", fit="mode")
    cluster: ClusterConfig = section(ClusterConfig, "host", predicts=True)
    task: TaskConfig = section(TaskConfig, "host")
    data: DataConfig = section(DataConfig, "host", fit=COMMAND_LINE)
    model: dict[str, Any] = field(default_factory=lambda: {"name": "dnn"})
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "job")
    train: TrainConfig = section(TrainConfig, "job")
    sync_replicas: SyncReplicasConfig = section(SyncReplicasConfig, "job")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "job")
    devices: DevicesConfig = section(DevicesConfig, "job")
    keras: KerasConfig = section(KerasConfig, "job", fit=COMMAND_LINE)
    simulate: SimulateConfig = section(SimulateConfig, "job")
    run_dir: str | None = option(
        None,
        IS_FOLDER_NAME,
        help="the directory of the run; an existing run is continued; null: outputs/DATE_TIME-MODE-MODEL",
        scope="host",
        fit="run_dir",
        is_text=True,
    )
    seed: int = option(
        0,
        between(0, 2**31 - 1),
        help="the seed of everything random: weights, shuffling, dropout",
        scope="job",
        fit="seed",
    )
    # Each host may have the files elsewhere; what they hold is compared.
    plugins: list[str] = option(
        [],
        help="Python files that register your own models, data or optimizers",
        scope="host",
        fit=COMMAND_LINE,
        is_text=True,
    )
    init_from: str | None = option(
        None,
        IS_RUN,
        help="a run directory whose newest checkpoint gives a new run its first weights",
        scope="either",
        fit=COMMAND_LINE,
        is_text=True,
    )
    init_layers: str | None = option(
        None,
        IS_PATTERN,
        WITH_INIT_FROM,
        help="with init_from: only layers whose names match, such as 'hidden[123]'",
        scope="job",
        fit=COMMAND_LINE,
        is_text=True,
    )
    profile: bool = option(False, help="profile two seconds of the training, for TensorBoard", scope="host")
    figure: bool = option(
        True, help="draw loss, metrics and staleness to run_dir/training.png at the end", scope="host"
    )
    timeline: bool = option(
        False,
        help="record when each worker's steps begin and end, in run_dir/timeline; makes small steps a bit slower",
        scope="host",
    )
    startup_timeout_secs: float = option(
        60.0, *SECS, help="how long to wait for the other tasks at the start", scope="host", predicts=True
    )
    watchdog_secs: float = option(
        120.0,
        *SECS,
        help="a task is lost after this long without progress (600 more at its start), or 0.6 of it in silence",
        scope="job",
        predicts=True,
    )
    max_restarts: int = option(
        3, at_least(0), help="how many times lost tasks are restarted", scope="job", predicts=True
    )
    grace_secs: float = option(
        10.0, *SECS, help="how long tasks may take to save and exit after a signal", scope="host", predicts=True
    )

    @property
    def silence_secs(self) -> float:
        """How long a task or a host may show no sign of life."""
        # Shorter than `watchdog_secs`, so that a silent task is found before the tasks that wait for it give up.
        return 0.6 * self.watchdog_secs

    def batches_per_update(self, num_workers: int) -> int:
        """How many batches, and so gradients, make an update of the model."""
        aggregated = self.sync_replicas.replicas_to_aggregate or num_workers
        return {"async": 1, "sync": num_workers, "sync_replicas": aggregated}[self.mode]

    def as_tree(self) -> dict[str, Any]:
        """All options as a tree, in the form of files and the command line."""
        tree = asdict(self)
        tree["data"] |= tree["data"].pop("arguments")
        return tree

    def to_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.as_tree()))


OPTIONS = dict(options_of(RunConfig))
SECTIONS = {name.partition(".")[0] for name in OPTIONS if "." in name}
