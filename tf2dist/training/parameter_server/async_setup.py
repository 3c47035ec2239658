"""Preparation of a run with parameter servers: the model and the optimizer on the ps, the graphs."""

import abc
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tf2dist import data
from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.checkpoint.state import earlier_updates
from tf2dist.data.passes import Sharding
from tf2dist.model import support
from tf2dist.model.evaluation import evaluated_sizes
from tf2dist.model.shards import all_parts
from tf2dist.model.source import build_step
from tf2dist.model.step import Step
from tf2dist.process.placement import placed, print_bytes
from tf2dist.process.strategy import parameter_server_strategy
from tf2dist.training.parameter_server.counters import PsOrigin
from tf2dist.training.parameter_server.graphs import GraphsSpec, PsGraphs
from tf2dist.training.parameter_server.schedule import Scheduler
from tf2dist.training.setup import PreparedRun, RunPlan, StartValues, TaskContext, choose_rows


class UpdateRule(abc.ABC):
    """When the ps apply an update, and what that asks of a run.

    Attributes:
        way: by which it trains, with what it refuses.
        ways_on_several_ps: with what it refuses there in addition.
        scheduler_class: called as ``scheduler_class(coordinator, graphs, num_workers, grace_secs)``.
    """

    way: support.Way
    ways_on_several_ps: tuple[support.Way, ...] = (support.SEVERAL_PS,)
    scheduler_class: Callable[..., Scheduler]

    @abc.abstractmethod
    def check_model(self, name: str, step: Step, splits: data.Splits) -> str:
        """Raises ConfigError for a model that cannot be trained so; returns `PreparedRun.note`.

        Args:
            name: of the model.
        """

    def why_no_rows(self, optimizer: keras.Optimizer) -> str:
        """Why tables travel as a whole; empty if their rows may, see `model.row_choice`."""
        return ""

    @abc.abstractmethod
    def make_graphs(self, spec: GraphsSpec) -> PsGraphs:
        """The ps of a run, and the functions that workers run against them."""

    @abc.abstractmethod
    def origin(self, start: Snapshot | None, sharding: Sharding, num_metrics: int) -> PsOrigin:
        """Where the run begins."""


@dataclass(frozen=True)
class PsRun(PreparedRun):
    """A run as the coordinator holds it.

    Attributes:
        coordinator: of the cluster.
        scheduler: of the calls to the workers.
        origin: where the run begins.
        graphs: the ps, and the functions that workers run against them.
    """

    coordinator: tf.distribute.coordinator.ClusterCoordinator
    scheduler: Scheduler
    origin: PsOrigin
    graphs: PsGraphs


def prepare(
    rule: UpdateRule,
    context: TaskContext,
    start: Snapshot | Weights | None,
    strategy: tf.distribute.ParameterServerStrategy | None = None,
) -> PsRun:
    """Builds the model on the ps, with the values of `start`, and traces what the workers need.

    Args:
        rule: when the ps apply an update.
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
    notes = [rule.check_model(source.name, step, splits)]
    optimizer = make_optimizer(plan.target_step)
    if isinstance(start, Weights):
        support.check_optimizer(support.INIT_FROM, optimizer)
    _check(source.name, rule, step, optimizer)
    notes.append(choose_rows(context, step, optimizer, rule.why_no_rows(optimizer)))
    origin = rule.origin(plan.start, plan.sharding, step.metrics.size)
    earlier = earlier_updates(step.earlier_optimizer, plan.start)
    spec = GraphsSpec(
        config=config,
        step=step,
        make_optimizer=make_optimizer,
        splits=splits,
        sharding=plan.sharding,
        origin=origin,
        total_steps=plan.target_step,
        plan=source.plan,
        earlier_updates=earlier,
    )
    graphs = rule.make_graphs(spec)
    optimizers = [server.optimizer for server in graphs.servers]
    print_bytes(step.variables, optimizers, cluster.num_ps)

    # The values of the snapshot, and the counts that go with them.
    values = StartValues.assigned(config, step, optimizers, start)
    graphs.restore(origin)

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
        scheduler=rule.scheduler_class(coordinator, graphs, cluster.num_workers, config.grace_secs),
        origin=origin,
        graphs=graphs,
    )


def _check(name: str, rule: UpdateRule, step: Step, optimizer: keras.Optimizer) -> None:
    """Refuses what the ps cannot train.

    Args:
        name: of the model.
    """
    support.check_optimizer(rule.way, optimizer, step.trainable)
    if len({variable.value.device for variable in all_parts(step.variables)}) > 1:
        support.check_step(support.PARTITIONED, name, step)
        for way in (support.PARTITIONED, *rule.ways_on_several_ps):
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
