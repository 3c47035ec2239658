"""Prepares a synchronous run: the model and the optimizer, equal on all workers, and the graph of a step.

Before their first step the workers must have the data, the variables and the first weights in common. From then on all
of them apply the same updates. What differs at the start would stay different, and checkpoints would hold only one
worker's copy.
"""

import contextlib
import functools
import hashlib
import json
import pkgutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.checkpoint.state import (
    Named,
    assign,
    earlier_updates,
    input_position,
    stream_positions,
    values,
)
from tf2dist.config.schema import ALGORITHMS, AlgorithmConfig, RunConfig
from tf2dist.data.passes import InputPosition, Sharding
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError, DataError, RequestError
from tf2dist.model import support
from tf2dist.model.evaluation import chunk_size, evaluated_sizes
from tf2dist.model.model_checks import check_batches
from tf2dist.model.own_step import OwnStep
from tf2dist.model.row_choice import choose_tables
from tf2dist.model.shards import read_piece, row_pieces
from tf2dist.model.source import build_step
from tf2dist.model.step import Step
from tf2dist.process import heartbeat
from tf2dist.tf_internals.keras import counters_of, inner_optimizers, trained_variables
from tf2dist.training.setup import PreparedRun, RunPlan, StartValues, TaskContext
from tf2dist.training.synchronous.feeds import ArrayFeed, Feed
from tf2dist.training.synchronous.sync_step import PhasedStep, SyncStep, gathers_one_length
from tf2dist.training.synchronous.workers import Workers

DIGEST_BYTES = 6  # as many as a float64 holds exactly, since digests travel through a sum
OF_ALL = "random choices are the same everywhere if they come from random or numpy.random, which have the run's seed"


def synchronize_initial_state(
    config: RunConfig,
    splits: Splits,
    optimizer: keras.Optimizer,
    workers: Workers,
    named: Named,
    by_row: Collection[str],
) -> None:
    """Compares what all workers have made, and gives all of them the weights of worker 0; to be called by all.

    Args:
        by_row: the names of tables; see `names_by_row`.
    """
    shapes = {name: [tuple(variable.shape) for variable in variables] for name, variables in named.items()}
    own = [_description_of(splits), str(sorted(shapes.items())).encode(), _description_of_optimizer(optimizer)]
    of_model = {name: variables for name, variables in named.items() if not name.startswith("optimizer/")}
    weights = hashlib.sha256()
    for name, (variable, *_) in of_model.items():
        for first, last in row_pieces(variable) if name in by_row else []:
            weights.update(read_piece(variable, first, last).data)
        if name not in by_row:
            # Neither `numpy()` nor `tobytes()`: the process would keep the memory of these copies of the model.
            weights.update(np.ascontiguousarray(tf.reshape(variable, [-1])).view(np.uint8).data)

    # Every worker sees all rows, so all of them raise the same error and none is left waiting.
    everywhere = workers.gather([*(_as_number(hashlib.sha256(text)) for text in own), _as_number(weights)])
    differs = everywhere != everywhere[0]
    for number in range(len(own)):
        if differs[:, number].any():
            others = ", ".join(f"worker-{index}" for index in np.flatnonzero(differs[:, number]))
            raise _errors(config, others)[number]

    # Weights alone may differ, if a builder draws them where the seed does not reach: all workers take worker 0's. The
    # broadcast is left out if they are equal, since it costs time with a large model.
    if differs[:, -1].any():
        own_values = values(of_model, by_row, progress=heartbeat.progress) if workers.index == 0 else {}
        _, arrays = workers.broadcast_arrays(None, own_values)
        assign(of_model, arrays, by_row)


def _errors(config: RunConfig, others: str) -> list[RequestError]:
    """The error for each of the descriptions that all workers compare, if the workers `others` differ in it."""
    data, model, optimizer = config.data.name, config.model["name"], config.optimizer["name"]
    return [
        DataError(f"data ({data}): not the same examples on {others} as on worker-0; give all of them the same"),
        ConfigError(f"model ({model}): its builder makes other variables on {others} than on worker-0; {OF_ALL}"),
        ConfigError(f"optimizer ({optimizer}): not the same on {others} as on worker-0; {OF_ALL}"),
    ]


def _description_of(splits: Splits) -> bytes:
    evaluated = str(splits.validation_stream or sorted(splits.sizes().items()))
    return str([str(splits.stream or splits.train), evaluated, splits.num_classes]).encode()


def _description_of_optimizer(optimizer: keras.Optimizer) -> bytes:
    def kind(value: Any) -> Any:
        return float(value) if isinstance(value, np.floating) else type(value).__name__

    description: list[Any] = []
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        description += [optimizer.initial_scale, optimizer.dynamic_growth_steps]
    place = {id(variable): number for number, variable in enumerate(trained_variables(optimizer))}
    for inner in inner_optimizers(optimizer):
        config: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # a user's own schedule may not be able to give its configuration
            config = inner.get_config()
        if not isinstance(config.get("learning_rate"), float | np.floating):
            # The configuration of a function names its file, which may lie elsewhere on another host.
            config["learning_rate"] = float(inner.learning_rate)
        description += [type(inner).__name__, config, [place[id(variable)] for variable in trained_variables(inner)]]
    return json.dumps(description, default=kind, sort_keys=True).encode()


def _as_number(sha256: "hashlib._Hash") -> float:
    return float(int.from_bytes(sha256.digest()[:DIGEST_BYTES], "big"))


@dataclass(frozen=True)
class Origin:
    """The beginning of a run: its counts, and the position of the input of all replicas.

    Attributes:
        step: the updates that were applied before.
        examples: the examples that all workers had seen before.
        begin: the position of the input of arrays.
        first_batch: of each worker's stream, the number.
        earlier_steps: the updates in `step` that were not applied by synchronous workers of this number.
    """

    step: int
    examples: int
    begin: InputPosition
    first_batch: int
    earlier_steps: int

    @classmethod
    def of(cls, start: Snapshot | None, sharding: Sharding, num_workers: int) -> "Origin":
        begin = input_position(start, sharding)
        first_batch = stream_positions(start, sharding)[0]  # synchronous workers take their steps together
        if start is None:
            return cls(0, 0, begin, first_batch, 0)
        # The local steps of another mode or number of workers do not belong to the workers of this run.
        local_steps = start.facts.local_steps if start.facts.mode == "sync" else ()
        earlier_steps = start.step - (local_steps[0] if len(local_steps) == num_workers else 0)
        return cls(start.step, start.facts.examples, begin, first_batch, earlier_steps)


@dataclass(frozen=True)
class SyncRun(PreparedRun):
    """A synchronous run as one worker holds it.

    Attributes:
        origin: where the run begins.
        evaluated_at_once: how many examples, at most.
        graphs: the graph of the training steps.
    """

    origin: Origin
    evaluated_at_once: int
    graphs: SyncStep


def prepare(context: TaskContext, workers: Workers, start: Snapshot | Weights | None) -> SyncRun:
    """Builds the model on every worker, with the same values everywhere; to be called by all of them.

    Args:
        start: what the leader has read; those of the other workers are ignored.
    """
    config, source, splits = context.config, context.source, context.splits

    # What all workers share: the snapshot that the leader has read, the plan of the run, the connections.
    batch_size = workers.batch_size_per_replica(config.train.batch_size_per_worker)
    start = workers.broadcast_start(start)
    plan = RunPlan.of(context, "sync", workers.num_replicas, batch_size, start)
    origin = Origin.of(plan.start, plan.sharding, workers.count)
    all_reduce = workers.make_all_reduce(config.cluster.all_reduce, config.startup_timeout_secs)

    # The model. Every worker has its own, outside of the strategy, so that a Keras optimizer does all that it does in a
    # single process.
    step, make_optimizer = build_step(source, splits, config, contextlib.nullcontext())
    new_optimizer = functools.partial(make_optimizer, plan.target_step)
    has_any_batches = bool(splits.stream) and gathers_one_length(workers, all_reduce)
    optimizer, graph_class, note = _prepare_model(context, workers, plan, start, step, new_optimizer, has_any_batches)

    # The same values everywhere.
    synchronize = functools.partial(synchronize_initial_state, config, splits, optimizer, workers)
    values = StartValues.assigned(config, step, [optimizer], start, synchronize)
    earlier = earlier_updates(step.earlier_optimizer, plan.start)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # Snapshots leave the counter out: the global step tells it, also to an optimizer that came from another mode.
        for counter in counters_of(optimizer):
            counter.assign(origin.step + earlier)

    # The graph of the steps.
    feed: Feed = (
        graph_class.make_stream_feed(workers, splits.stream, origin.first_batch)
        if splits.stream
        else ArrayFeed(workers, splits.train, plan.sharding, origin.begin)
    )
    graphs = graph_class(config, workers, step, optimizer, all_reduce, feed, origin.step)
    graphs.restore(plan.start.arrays if plan.start else {})
    # A GPU has the memory for its part of a worker's batch; what depends on the batches needs whole ones, as in Keras.
    at_once, batch = 0, config.train.batch_size_per_worker
    if workers.index == 0:
        at_once = chunk_size(batch, step, splits, source.plan, replica_size=batch_size)
    # It may rest on a comparison of floats, which differs between types of CPU; all workers take worker 0's.
    at_once = int(workers.gather([at_once])[0, 0])
    return SyncRun(
        plan=plan,
        step=step,
        new_optimizer=new_optimizer,
        earlier_updates=earlier,
        values=values,
        note=note,
        sizes=evaluated_sizes(splits.sizes(), at_once, source.plan),
        origin=origin,
        evaluated_at_once=at_once,
        graphs=graphs,
    )


def _prepare_model(
    context: TaskContext,
    workers: Workers,
    plan: RunPlan,
    start: Snapshot | Weights | None,
    step: Step,
    new_optimizer: Callable[[], keras.Optimizer],
    has_any_batches: bool,
) -> tuple[keras.Optimizer, type[SyncStep], str]:
    """Builds the optimizer of a model, and chooses the class of its steps; returns both, and a note for the user.

    Args:
        has_any_batches: see `_why_no_rows`.
    """
    config, source, splits, replicas = context.config, context.source, context.splits, workers.num_replicas
    _check(source.name, config, step, plan.sharding, replicas)
    notes = [check_batches(source.name, step, splits) if replicas > 1 else ""]
    optimizer = new_optimizer()
    if isinstance(start, Weights):
        support.check_optimizer(support.INIT_FROM, optimizer)
    optimizer.build(step.trainable)
    graph_class = step_class(config.algorithm, step)
    why_no_rows = _why_no_rows(config, optimizer, graph_class, has_any_batches)
    notes.append(choose_tables(source.name, step, optimizer, config, why_no_rows))
    graph_class.check(source.name, config, workers, splits, step, optimizer)
    _take_loss_scale(step, optimizer)
    return optimizer, graph_class, "; ".join(filter(None, notes))


def _take_loss_scale(step: Step, optimizer: keras.Optimizer) -> None:
    """Gives the step the factor by which the optimizer wants the loss scaled."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        step.loss_scale = optimizer.dynamic_scale
    else:  # the step divides the gradients by the loss scale before they are summed, so the optimizer must not
        step.loss_scale, optimizer.loss_scale_factor = optimizer.loss_scale_factor, None


def step_class(algorithm: AlgorithmConfig, step: Step) -> type[SyncStep]:
    """The class of the steps. Local SGD in rounds of one step, without an outer optimizer, is plain training."""
    entry = ALGORITHMS[algorithm.kind]
    if entry.mode != "sync" or (algorithm.local_steps == 1 and not algorithm.has_outer_steps):
        return PhasedStep if isinstance(step, OwnStep) and step.is_in_phases else SyncStep
    local_sgd: type[SyncStep] = pkgutil.resolve_name(entry.implementation)
    return local_sgd


def _why_no_rows(
    config: RunConfig, optimizer: keras.Optimizer, graph_class: type[SyncStep], has_any_batches: bool
) -> str:
    """Why tables travel as a whole; empty if their rows may, see `sync_rows`.

    Args:
        has_any_batches: whether batches are of any sizes, and TensorFlow gathers.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return "a LossScaleOptimizer looks at all gradients of an update"
    if graph_class is not SyncStep:
        return f"algorithm={config.algorithm.kind} averages whole variables"
    return "the batches of streams differ in size, and TensorFlow's all-reduce is used" if has_any_batches else ""


def _check(model_name: str, config: RunConfig, step: Step, sharding: Sharding, num_replicas: int) -> None:
    """Raises ConfigError for a model that cannot be trained synchronously and exactly."""
    support.check_step(support.SYNC, model_name, step)
    if num_replicas > 1:
        support.check_step(support.SEVERAL, model_name, step)
    if num_replicas > 1 and config.devices.xla:
        support.check_step(support.XLA_ON_SEVERAL, model_name, step)
    last_batch = sharding.num_examples % sharding.step_size  # 0 if it is as large as the others
    if 0 < last_batch < num_replicas:
        support.check_step(support.UNEVEN, model_name, step, last_batch=last_batch, num_workers=num_replicas)
