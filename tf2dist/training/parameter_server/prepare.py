"""What an asynchronous run needs before its first step: the model and the optimizer on the ps, and the graphs."""

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tf2dist import data
from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.checkpoint.state import Named, earlier_updates, named_variables, restore, take_over
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.model.checks import check_assigned, check_losses
from tf2dist.model.optimizer_checks import check_init_from, check_own_apply
from tf2dist.model.source import Source, build_step
from tf2dist.model.step import ModelStep
from tf2dist.process.placement import placed, print_bytes
from tf2dist.process.strategy import parameter_server_strategy
from tf2dist.training.loop import target_step
from tf2dist.training.parameter_server.origin import Origin
from tf2dist.training.parameter_server.step import AsyncStep
from tf2dist.training.parameter_server.twins import step_for
from tf2dist.training.sharding import sharding_of


@dataclass(frozen=True)
class Prepared:
    """An asynchronous run, as the coordinator holds it, that is ready for its first step.

    Attributes:
        coordinator: of the cluster.
        target_step: the global step at which the run ends.
        start: the snapshot that the run continues from; None for a new run.
        origin: where the run begins.
        step: the step of the model, whose variables lie on the ps.
        graphs: the ps, and the functions that workers run against them.
        named: the variables of the model and of the optimizers by their names in a snapshot.
        restored_from: a line for the user about what was restored; empty for nothing.
    """

    coordinator: tf.distribute.coordinator.ClusterCoordinator
    target_step: int
    start: Snapshot | None
    origin: Origin
    step: ModelStep
    graphs: AsyncStep
    named: Named
    restored_from: str


def prepare(
    config: RunConfig,
    cluster: Cluster,
    task: Task,
    source: Source,
    splits: data.Splits,
    start: Snapshot | Weights | None,
    strategy: tf.distribute.ParameterServerStrategy | None = None,
) -> Prepared:
    """Builds the model on the ps, with the values of `start`, and traces what the workers need.

    Args:
        task: the coordinator.
        strategy: None to join the cluster here.

    Raises:
        ConfigError: the run or the model cannot be trained asynchronously.
    """
    # The plan of the run. A mistake in it is told before any other host is called.
    num_workers = cluster.num_workers
    batch_size = config.train.batch_size_per_worker * config.algorithm.batches_per_update
    sharding = sharding_of(splits, source.plan, batch_size, num_workers, config.seed, whole_batch_loss=False)
    resumed = start if isinstance(start, Snapshot) else None
    last_step = target_step(config, source.plan, sharding, resumed)

    # The cluster.
    strategy = strategy or parameter_server_strategy(cluster, task)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    # The model, whose variables are created on the ps; each ps has an optimizer for its variables.
    scope = placed(strategy, config.cluster, cluster.num_ps)
    step, make_optimizer = build_step(source, splits, config, scope)
    check_assigned(source.name, step.trace)
    check_losses(source.name, step, num_replicas=1)
    origin = Origin.of(resumed, sharding, step.metrics.size)
    offsets = list(map(int, origin.offsets))
    earlier = earlier_updates(step.earlier_optimizer, resumed)
    make_graphs = step_for(config.algorithm.kind)
    graphs = make_graphs(config, step, make_optimizer, splits, sharding, offsets, last_step, source.plan, earlier)
    check_init_from(graphs.servers[0].optimizer, isinstance(start, Weights))
    check_own_apply(source.name, graphs.servers[0].optimizer, len(graphs.servers))
    print_bytes(step.variables, [server.optimizer for server in graphs.servers], cluster.num_ps)

    # The values of the snapshot, and the counts that go with them.
    named = named_variables(step.model, step.variables, [server.optimizer for server in graphs.servers]) | step.outside
    if step.earlier_optimizer is not None:
        take_over(named, step.model, step.variables, step.earlier_optimizer)
    restored_from = restore(named, start, config)
    for server in graphs.servers:
        server.restore(origin.counts)

    # TensorFlow sends each new function to all hosts, and the whole process blocks if one of them is cut off.
    # So on many hosts every function is made before the training; with `identity` also one of TensorFlow's own, which
    # copies what workers return, and those that a metric's result takes.
    with tf.device(f"/job:{task.job}"):
        tf.identity(graphs.servers[0].counts())
    step.metrics.results(np.zeros(step.metrics.size))
    return Prepared(coordinator, last_step, resumed, origin, step, graphs, named, restored_from)
