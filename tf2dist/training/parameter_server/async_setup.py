"""Preparation of a run with parameter servers: the model and the optimizer on the ps, the graphs."""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.checkpoint.state import earlier_updates
from tf2dist.model import support
from tf2dist.model.evaluation import evaluated_sizes
from tf2dist.model.row_choice import choose_tables
from tf2dist.model.shards import all_parts
from tf2dist.model.source import build_step
from tf2dist.model.step import Step
from tf2dist.process.placement import placed, print_bytes
from tf2dist.process.strategy import parameter_server_strategy
from tf2dist.training.parameter_server.graphs import PsGraphs
from tf2dist.training.setup import PreparedRun, RunPlan, StartValues, TaskContext


@dataclass(frozen=True)
class PsRun(PreparedRun):
    """A run as the coordinator holds it.

    Attributes:
        coordinator: of the cluster.
        graphs: the ps, and the functions that workers run against them.
    """

    coordinator: tf.distribute.coordinator.ClusterCoordinator
    graphs: PsGraphs


def prepare(
    graphs_class: type[PsGraphs],
    context: TaskContext,
    start: Snapshot | Weights | None,
    strategy: tf.distribute.ParameterServerStrategy | None = None,
) -> PsRun:
    """Builds the model on the ps, with the values of `start`, and traces what the workers need.

    Args:
        graphs_class: the rule of the mode.
        context: of the coordinator.
        strategy: None to join the cluster here.
    """
    config, cluster, source, splits = context.config, context.cluster, context.source, context.splits

    # The plan of the run. A mistake in it is told before any other host is called.
    plan = RunPlan.of(context, config.mode, cluster.num_workers, config.train.batch_size_per_worker, start)

    # The cluster.
    strategy = strategy or parameter_server_strategy(cluster, context.task)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    # The model, whose variables are created on the ps; each ps has an optimizer for its variables.
    step, make_optimizer = build_step(source, splits, config, placed(strategy, config.cluster, cluster.num_ps))
    notes = [graphs_class.check_model(context, step)]
    optimizer = make_optimizer(plan.target_step)
    if isinstance(start, Weights):
        support.check_optimizer(support.INIT_FROM, optimizer)
    _check(source.name, graphs_class, step, optimizer)
    notes.append(choose_tables(source.name, step, optimizer, config, graphs_class.why_no_rows(config, optimizer)))
    earlier = earlier_updates(step.earlier_optimizer, plan.start)
    graphs = graphs_class(context, plan, step, make_optimizer, earlier)
    optimizers = [server.optimizer for server in graphs.servers]
    print_bytes(step.variables, optimizers, cluster.num_ps)

    # The values of the snapshot, and the counts that go with them.
    values = StartValues.assigned(config, step, optimizers, start)
    graphs.restore()

    _make_other_functions(context, graphs, step)
    return PsRun(
        plan=plan,
        step=step,
        new_optimizer=graphs.new_optimizer,
        earlier_updates=earlier,
        values=values,
        note="; ".join(filter(None, notes)),
        sizes=evaluated_sizes(splits.sizes(), graphs.evaluated_at_once, source.plan),
        coordinator=coordinator,
        graphs=graphs,
    )


def _check(model_name: str, graphs_class: type[PsGraphs], step: Step, optimizer: keras.Optimizer) -> None:
    """Refuses what the ps cannot train."""
    support.check_optimizer(graphs_class.way, optimizer, step.trainable)
    if len({variable.value.device for variable in all_parts(step.variables)}) > 1:
        support.check_step(support.PARTITIONED, model_name, step)
        for way in (support.PARTITIONED, *graphs_class.ways_on_several_ps):
            support.check_optimizer(way, optimizer, step.trainable)


def _make_other_functions(context: TaskContext, graphs: PsGraphs, step: Step) -> None:
    """Makes the functions that TensorFlow would make while the tasks train.

    It sends each new one to all hosts, and the whole process blocks if one of them is cut off. These are TensorFlow's
    own that copy what the ps return, and those that a metric's result takes.
    """
    with tf.device(f"/job:{context.task.job}"):
        graphs.read_counters()
        int(graphs.evaluated_batches)
    step.metrics.results(np.zeros(step.metrics.size))
    step.evaluated.results(np.zeros(step.evaluated.size))
