"""The rules of a configuration that a type cannot express."""

from tf2dist.config import arguments, keras_settings, paths
from tf2dist.config.rules import Rule, at_least_one, is_pattern, positive_secs
from tf2dist.config.schema import ClusterConfig, RunConfig
from tf2dist.errors import ConfigError

MODES = ("async", "sync")
CLUSTER_KINDS = ("local", "hosts", "tf_config")
MAX_LOCAL_TASKS = 64  # as many ports as the fork server sets aside
MAX_EPOCHS = 10**6
MAX_SHIFT = 32_767  # half of all ports: from each of them one of the two directions leads to another


def check(config: RunConfig) -> None:
    """Checks everything and reports all mistakes at once.

    Raises:
        ConfigError: one line for each rule that is broken.
    """
    rules: list[Rule] = [
        ("mode", config.mode, config.mode in MODES, "must be async or sync"),
        *_train(config),
        *_cluster(config),
        *_hosts(config),
        *_data_and_devices(config),
        *keras_settings.rules(config.keras),
        ("seed", config.seed, 0 <= config.seed < 2**31, "must be from 0 to 2147483647"),
        positive_secs("startup_timeout_secs", config.startup_timeout_secs),
        positive_secs("watchdog_secs", config.watchdog_secs),
        ("max_restarts", config.max_restarts, config.max_restarts >= 0, "must be at least 0"),
        positive_secs("grace_secs", config.grace_secs),
        *_checkpoints(config),
        *arguments.rules("model", config.model, builtin=not config.plugins),
        *arguments.rules("optimizer", config.optimizer, builtin=not config.plugins),
        *arguments.rules("data", {"name": config.data.name, **config.data.arguments}, builtin=not config.plugins),
        *paths.rules({"run_dir": config.run_dir, "data.dir": config.data.dir}, config.plugins),
    ]
    broken = [" ".join(f"{name} ({value}): {rule}".split()) for name, value, holds, rule in rules if not holds]
    if broken:
        raise ConfigError("\n".join(broken))


def _train(config: RunConfig) -> list[Rule]:
    train = config.train
    steps, epochs = train.steps, train.epochs
    one_of_two = f"train.steps is {steps}; give one of the two"
    return [
        at_least_one("train.steps", steps),
        ("train.epochs", epochs, epochs is None or epochs > 0, "must be more than 0"),
        ("train.epochs", epochs, not (epochs or 0) > MAX_EPOCHS, f"must be at most {MAX_EPOCHS:,}"),
        ("train.epochs", epochs, epochs is None or steps is None, one_of_two),
        at_least_one("train.batch_size_per_worker", train.batch_size_per_worker),
        at_least_one("train.log_every_steps", train.log_every_steps),
        at_least_one("train.eval_every_steps", train.eval_every_steps),
        at_least_one("train.steps_per_execution", train.steps_per_execution),
    ]


def _cluster(config: RunConfig) -> list[Rule]:
    cluster = config.cluster
    kind, num_ps, shift, all_reduce = cluster.kind, cluster.num_ps, cluster.control_port_shift, cluster.all_reduce
    needs_ps = "mode=async keeps the variables on parameter servers and needs at least 1; or choose mode=sync"
    return [
        ("cluster.kind", kind, kind in CLUSTER_KINDS, f"must be one of {', '.join(CLUSTER_KINDS)}"),
        at_least_one("cluster.num_workers", cluster.num_workers),
        ("cluster.num_ps", num_ps, num_ps >= 0, "must be at least 0"),
        ("cluster.num_ps", num_ps, config.mode != "sync" or num_ps <= 1, "is for mode=async; leave it out"),
        *_local(config),
        ("cluster.num_ps", num_ps, config.mode == "sync" or num_ps != 0, needs_ps),
        ("cluster.control_port_shift", shift, 1 <= shift <= MAX_SHIFT, f"must be from 1 to {MAX_SHIFT}"),
        ("cluster.all_reduce", all_reduce, all_reduce in ("auto", "tensorflow"), "must be auto or tensorflow"),
        (
            "cluster.all_reduce",
            all_reduce,
            config.mode != "async" or all_reduce == "auto",
            "is for mode=sync; leave it out",
        ),
    ]


def _data_and_devices(config: RunConfig) -> list[Rule]:
    data, devices = config.data, config.devices
    fraction, precision = devices.gpu_memory_fraction, devices.precision
    share = "must be more than 0 and at most 1, such as 0.2"
    return [
        ("data.offline", data.offline, data.offline in ("fallback", "fail"), "must be fallback or fail"),
        ("data.num_validation", data.num_validation, data.num_validation >= 0, "must be at least 0"),
        positive_secs("data.download_timeout_secs", data.download_timeout_secs),
        ("devices.gpu_memory_fraction", fraction, fraction is None or 0 < fraction <= 1, share),
        ("devices.precision", precision, precision in ("float32", "bfloat16"), "must be float32 or bfloat16"),
    ]


def _hosts(config: RunConfig) -> list[Rule]:
    """Without cluster=hosts a host list or a task would be ignored, and every host train alone: it is refused."""
    given = {f"cluster.{job}": getattr(config.cluster, job) or None for job in ("chief", "ps", "worker", "evaluator")}
    given |= {"task.type": config.task.type, "task.index": config.task.index}
    used = config.cluster.kind == "hosts"
    rules = [(name, value, value is None or used, "is for cluster=hosts; add that") for name, value in given.items()]
    for size in ("num_workers", "num_ps"):
        value = getattr(config.cluster, size)
        holds = config.cluster.kind == "local" or value == getattr(ClusterConfig(), size)
        rules.append((f"cluster.{size}", value, holds, "is for cluster=local; leave it out"))
    return rules


def _local(config: RunConfig) -> list[Rule]:
    """A local cluster has an end; the larger of the two numbers is named."""
    cluster = config.cluster
    counts = {"cluster.num_workers": cluster.num_workers}
    if config.mode == "async":
        counts["cluster.num_ps"] = cluster.num_ps
    largest = max(counts, key=lambda name: counts[name])
    fits = sum(counts.values()) + (config.mode == "async") <= MAX_LOCAL_TASKS
    rule = f"a local cluster has at most {MAX_LOCAL_TASKS} tasks; use several hosts for more"
    return [(largest, counts[largest], cluster.kind != "local" or fits, rule)]


def _checkpoints(config: RunConfig) -> list[Rule]:
    source, layers = config.init_from, config.init_layers
    return [
        positive_secs("checkpoint.every_secs", config.checkpoint.every_secs),
        at_least_one("checkpoint.every_steps", config.checkpoint.every_steps),
        at_least_one("checkpoint.keep", config.checkpoint.keep),
        (
            "init_from",
            source,
            source is None or paths.is_folder(source),
            "there is no such run directory; name that of a run",
        ),
        ("init_layers", layers, layers is None or source is not None, "is for init_from=RUN_DIR; add that"),
        ("init_layers", layers, is_pattern(layers), "must be a regular expression, such as 'hidden[123]'"),
    ]
