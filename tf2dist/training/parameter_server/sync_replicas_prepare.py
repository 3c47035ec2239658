"""What a run of mode=sync_replicas needs before its first step: the model on the ps, and the graphs."""

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tf2dist import data
from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.checkpoint.state import Named, earlier_updates, named_variables, restore, take_over
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.model.checks import check_aggregation, check_batches, check_losses, check_state, check_unsynchronized
from tf2dist.model.evaluate import evaluated_sizes
from tf2dist.model.optimizer_checks import check_init_from, check_own_apply
from tf2dist.model.source import Source, build_step
from tf2dist.model.step import ModelStep
from tf2dist.process.placement import placed, print_bytes
from tf2dist.process.strategy import parameter_server_strategy
from tf2dist.training.loop import target_step
from tf2dist.training.parameter_server.sync_replicas_origin import Origin
from tf2dist.training.parameter_server.sync_replicas_step import ReplicasStep
from tf2dist.training.sharding import aggregated_sharding_of


@dataclass(frozen=True)
class Prepared:
    """A run that is ready for its first step.

    Attributes:
        sizes: in examples, of the splits to evaluate.
        target_step: the global step at which the run ends.
        start: the snapshot that the run continues from; None for a new run.
        origin: where the run begins.
        named: the variables of the model and of the optimizers by their names in a snapshot.
        restored_from: a line for the user about what was restored; empty for nothing.
    """

    coordinator: tf.distribute.coordinator.ClusterCoordinator
    sizes: dict[str, int]
    target_step: int
    start: Snapshot | None
    origin: Origin
    step: ModelStep
    graphs: ReplicasStep
    named: Named
    restored_from: str


def prepare(
    config: RunConfig,
    cluster: Cluster,
    task: Task,
    source: Source,
    splits: data.Splits,
    start: Snapshot | Weights | None,
    strategy: tf.distribute.ParameterServerStrategy | None,
) -> Prepared:
    """Builds the model on the ps, and the functions that the workers run; see `AsyncLoop.build`.

    Raises:
        ConfigError: the run or the model cannot be trained in this mode.
    """
    # The plan of the run. A mistake in it is told before any other host is called.
    num_workers = cluster.num_workers
    replicas = config.sync_replicas.replicas_to_aggregate or num_workers
    sharding = aggregated_sharding_of(config, splits, source.plan, num_workers)
    resumed = start if isinstance(start, Snapshot) else None
    last_step = target_step(config, source.plan, sharding, resumed)

    # The cluster.
    strategy = strategy or parameter_server_strategy(cluster, task)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    # The model, whose variables are created on the ps; each ps has an optimizer for its variables.
    scope = placed(strategy, config.cluster, cluster.num_ps)
    step, make_optimizer = build_step(source, splits, config, scope)
    _check(source.name, step, replicas)
    if replicas > 1:
        check_batches(source.name, step, splits)
    origin = Origin.of(resumed, sharding)
    earlier = earlier_updates(step.earlier_optimizer, resumed)
    graphs = ReplicasStep(
        config, step, make_optimizer, sharding, origin.offsets, replicas, last_step, source.plan, earlier
    )
    check_init_from(graphs.parts[0].optimizer, isinstance(start, Weights))
    check_own_apply(source.name, graphs.parts[0].optimizer, len(graphs.parts))
    print_bytes(step.variables, [part.optimizer for part in graphs.parts], cluster.num_ps)

    # The values of the snapshot, and the counts that go with them.
    named = named_variables(step.model, step.variables, [part.optimizer for part in graphs.parts]) | step.outside
    if step.earlier_optimizer is not None:
        take_over(named, step.model, step.variables, step.earlier_optimizer)
    restored_from = restore(named, start, config)
    graphs.deciding.restore(origin.step, origin.aggregated, origin.dropped)
    for server in graphs.following:
        server.restore(origin.step)

    # On many hosts every function is made before the training, also those of TensorFlow; see `AsyncLoop.build`.
    with tf.device(f"/job:{task.job}"):
        graphs.deciding.close()
        graphs.deciding.counts()
    step.metrics.results(np.zeros(step.metrics.size))
    return Prepared(
        coordinator=coordinator,
        sizes=evaluated_sizes(splits.sizes(), graphs.evaluated_at_once, source.plan),
        target_step=last_step,
        start=resumed,
        origin=origin,
        step=step,
        graphs=graphs,
        named=named,
        restored_from=restored_from,
    )


def _check(name: str, step: ModelStep, replicas: int) -> None:
    """Raises ConfigError for a model whose gradients over several replicas have no mean."""
    check_losses(name, step, replicas)
    check_state(name, step.state)
    if replicas > 1:
        check_aggregation(name, step, "mode=sync_replicas")
        check_unsynchronized(name, step.model, "mode=sync_replicas", "mode=sync")
