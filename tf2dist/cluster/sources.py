"""Where a run finds out which cluster it is part of: one source for each value of the option `cluster`."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tf2dist.cluster import ranks, slurm
from tf2dist.cluster.spec import ALL_JOBS, Cluster, Place
from tf2dist.cluster.validation import find_in_tf_config, validated
from tf2dist.config.schema import PS_MODES, RunConfig
from tf2dist.errors import ClusterError, ConfigError

# The place of this process. It is found in the options and in the environment alone. Raises ClusterError, with one line
# for each mistake.
ClusterSource = Callable[[RunConfig, Mapping[str, str]], Place]


def find_place(config: RunConfig, environ: Mapping[str, str]) -> Place:
    """The place of this process in the cluster that the options choose.

    Raises:
        RequestError: there is none, or the options do not fit this cluster.
    """
    kind = config.cluster.kind
    if kind not in SOURCES:
        raise ConfigError(f"cluster.kind ({kind}): must be one of {', '.join(SOURCES)}")
    cluster, task = SOURCES[kind](config, environ)
    cluster = replace(cluster, min_workers=config.cluster.min_workers)
    # The default is a new directory, in which an evaluator would wait for checkpoints for ever.
    if task.job == "evaluator" and config.run_dir is None:
        raise ClusterError(f"run_dir (null): {task} reads the checkpoints there; give it and {cluster.leader} the same")
    check_workers(config, cluster)
    return Place(cluster, task)


def check_workers(config: RunConfig, cluster: Cluster) -> None:
    """Checks the options that depend on the number of workers. Raises ConfigError."""
    num_workers, min_workers = cluster.num_workers, config.cluster.min_workers
    replicas = config.sync_replicas.replicas_to_aggregate
    if replicas is not None and replicas > num_workers and cluster.num_ps > 1:
        raise ConfigError(
            f"sync_replicas.replicas_to_aggregate ({replicas}): is more than the {num_workers} workers, which needs a "
            f"single ps; give at most {num_workers}, or use one ps"
        )
    aggregated = config.batches_per_update(num_workers)
    if config.mode == "sync_replicas" and config.task.on_term == "leave" and aggregated >= num_workers:
        raise ConfigError(
            f"task.on_term (leave): each step takes {aggregated} gradients of {num_workers} workers, so it would wait "
            f"for one that has left; leave it out, or give sync_replicas.replicas_to_aggregate less than {num_workers}"
        )
    if min_workers is not None and min_workers > num_workers:
        raise ConfigError(
            f"cluster.min_workers ({min_workers}): the cluster has {num_workers} workers; give at most "
            "as many, and list all that may come"
        )


def local(config: RunConfig, environ: Mapping[str, str]) -> Place:
    """All tasks on this machine; the launcher replaces port 0 by free ones."""
    counts = {"worker": config.cluster.num_workers}
    if config.mode in PS_MODES:
        counts |= {"chief": 1, "ps": config.cluster.num_ps}
    jobs = {job: ("127.0.0.1:0",) * counts[job] for job in sorted(counts)}
    cluster = Cluster(config.mode, jobs, is_managed=True)
    return Place(cluster, cluster.leader)


def hosts(config: RunConfig, environ: Mapping[str, str]) -> Place:
    """The task `task.type`, `task.index` of the cluster in the options' lists of host:port."""
    lists = {job: list(getattr(config.cluster, job)) for job in ALL_JOBS}
    jobs = {job: addresses for job, addresses in lists.items() if addresses}
    task = {"type": config.task.type, "index": config.task.index}
    missing = [f"task.{key}" for key, value in task.items() if value is None]
    problems = []
    if missing:
        problems.append(
            f"{' and '.join(missing)} (null): with cluster=hosts every process must be told which task it is; "
            "give task.type=worker task.index=0"
        )
    if not jobs:
        problems.append("cluster (hosts): no host is named; give lists as in cluster.worker=[host1:2222,host2:2222]")
    if problems:
        raise ClusterError("\n".join(problems))
    return validated("cluster", jobs, task, config.mode)


SOURCES: dict[str, ClusterSource] = {
    "local": local,
    "hosts": hosts,
    "tf_config": find_in_tf_config,
    "ranks": ranks.find,
    "slurm": slurm.find,
}

# For those that an engine's environment describes: whether it makes this process one of several tasks.
HAS_PEERS: dict[str, Callable[[Mapping[str, str]], bool]] = {"slurm": slurm.has_peers, "ranks": ranks.has_peers}


def of_engine(environ: Mapping[str, str]) -> str | None:
    """The value of `cluster` for a process that an engine has started as one of several; None without an engine."""
    return next((kind for kind, has_peers in HAS_PEERS.items() if has_peers(environ)), None)
