"""The synchronous twin: every worker holds the model, gradients are all-reduced each step.

One all-reduce a step carries everything: the gradients, the changes of the state, and the sums
for the log, packed into one vector. All replicas then apply the same update to their own copy.
"""

import contextlib
import functools
import math
import os
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist import data
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import (
    counter_of,
    finalize,
    input_facts,
    input_positions,
    named_variables,
    restore,
    values,
)
from tf2dist.cluster import reachability
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.data.pipeline import Sharding, batches, of_arrays
from tf2dist.errors import ConfigError, NotFiniteError, TaskLostError
from tf2dist.model.checks import advice_on_outputs, check_compiled, check_last_batch, check_state
from tf2dist.model.evaluate import Evaluation, chunk_size, chunks
from tf2dist.model.models import build_optimizer, build_step
from tf2dist.model.step import Batch, Packing, step_seed, without_padding
from tf2dist.process import heartbeat
from tf2dist.process.strategy import barrier, broadcast, multi_worker_mirrored_strategy, sum_over_workers
from tf2dist.training.call_size import steps_of_a_call
from tf2dist.training.loop import PauseRequest, PauseRequests, Progress, Report, never, target_step
from tf2dist.training.synchronous import mesh
from tf2dist.training.synchronous.all_reduce import AllReduce
from tf2dist.training.synchronous.same_start import begin_equally

FINISH_TIMEOUT_SECS = 60.0
LEAVE_TIMEOUT_SECS = 10.0


class SyncLoop:
    """Runs on every worker; see `loop.Loop`."""

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        task: Task,
        splits: data.Splits,
        start: Snapshot | None,
        report: Report,
        strategy: tf.distribute.MultiWorkerMirroredStrategy | None = None,
    ) -> None:
        self._config, self._cluster, self._task, self._report = config, cluster, task, report
        self._worker = cluster.training_tasks.index(task)
        self._strategy = strategy or multi_worker_mirrored_strategy(
            cluster, task, config.startup_timeout_secs, config.watchdog_secs
        )
        num_replicas = self._strategy.num_replicas_in_sync
        local_replicas = num_replicas // cluster.num_workers
        batch_size, rest = divmod(config.train.batch_size_per_worker, local_replicas)
        if rest:
            raise ConfigError(
                f"train.batch_size_per_worker ({config.train.batch_size_per_worker}): must be a multiple of the "
                f"{local_replicas} GPUs of a worker"
            )
        self.sharding = Sharding(len(splits.train), batch_size, num_replicas, config.seed, whole_batch_loss=True)
        shared = broadcast(self._strategy, start.to_bytes() if start else b"")
        start = Snapshot.from_bytes(shared) if shared else None
        self._begin_step, examples = (start.step, int(start.facts.get("examples", 0))) if start else (0, 0)
        self._begin_position = input_positions(start, self.sharding)[0]
        local_steps = start.facts.get("local_steps", []) if start and start.facts.get("mode") == "sync" else []
        self._earlier_steps = self._begin_step - (local_steps[0] if len(local_steps) == cluster.num_workers else 0)
        self.target_step = target_step(config, self.sharding, start)
        self._splits = splits
        self._reduce = tf.function(functools.partial(sum_over_workers, self._strategy), autograph=False)
        self._all_reduce = self._own_all_reduce()
        # Every worker has its model to itself, outside of the strategy: what must be equal everywhere is seen to here
        # and in each step, and a Keras optimizer does all that it does in a single process.
        self._step = build_step(config.model, splits, config.seed, contextlib.nullcontext())
        self.model, self.advice = self._step.model, advice_on_outputs(self._step.trial)
        check_state(config.model["name"], self._step.state)
        check_compiled(config.model["name"], self.model, config.devices.xla and num_replicas > 1)
        check_last_batch(
            config.model["name"], self.model, len(splits.train) % self.sharding.global_batch_size, num_replicas
        )
        self._optimizer = build_optimizer(config.optimizer, self.target_step)
        self._optimizer.build(self._step.trainable)
        self._step.loss_scale, self._optimizer.loss_scale_factor = self._optimizer.loss_scale_factor, None
        self._applied = tf.Variable(self._begin_step, dtype=tf.int64, trainable=False)
        self._compute = tf.function(self._step, autograph=False, jit_compile=True) if config.devices.xla else self._step
        self._named = named_variables(self.model, self._step.variables, [self._optimizer])
        begin_equally(
            config,
            splits,
            self._named,
            self._optimizer,
            self._worker,
            cluster.num_workers,
            self._sum_up,
            functools.partial(broadcast, self._strategy),
        )
        self.restored_from = restore(self._named, start, config)
        self._counted = counter_of(self._optimizer)
        self._counted.assign(self._begin_step)
        self._trained: dict[str, np.ndarray] = {}
        self._packing = Packing([*self._step.trainable, *self._step.state])
        self._iterator = iter(self._strategy.distribute_datasets_from_function(self._dataset))
        self._train = tf.function(self._train_steps, autograph=False)
        self._evaluate = tf.function(self._step.evaluate, autograph=False)
        self._secs_per_step = self._own_secs = 0.0  # of all workers and of this one; not known yet
        self.progress = Progress(self._begin_step, self._local_steps(self._begin_step), examples, math.nan, math.nan)

    def _own_all_reduce(self) -> AllReduce | None:
        """Faster than TensorFlow's on CPUs; on GPUs that one is NCCL's, which is faster."""
        why_not = "there are GPUs" if tf.config.list_logical_devices("GPU") else ""
        if self._config.cluster.all_reduce == "tensorflow":
            why_not = "cluster.all_reduce=tensorflow"
        secret = broadcast(self._strategy, os.urandom(mesh.SECRET_BYTES))
        return mesh.join(self._cluster, self._task, secret, lambda own: self._reduce(tf.constant(own)).numpy(), why_not)

    def _dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """This worker's batches, for its replicas in turn."""
        take = of_arrays(self._splits.train)
        count = context.num_replicas_in_sync // context.num_input_pipelines
        first = context.input_pipeline_id * count
        begin_at = self._begin_position
        shards = [batches(take, self.sharding, first + i, begin_at) for i in range(count)]
        if count == 1:
            return shards[0]
        return tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(count).repeat())

    def _local_steps(self, step: int) -> tuple[int, ...]:
        return (step - self._earlier_steps,) * self._cluster.num_workers

    def train(self, until_step: int, pause_request: PauseRequests = never) -> PauseRequest:
        """Runs exactly as many steps as are missing; every worker must ask for the same."""
        requested = PauseRequest.NOTHING
        while self.progress.global_step < until_step and not requested:
            count = min(self._steps_per_call(), until_step - self.progress.global_step)
            started = time.monotonic()
            shared = tf.constant([*pause_request().to_floats(), self._own_secs / self._strategy.num_replicas_in_sync])
            loss, correct, examples, *requests, secs = self._take_steps(count, shared)
            requested, self._secs_per_step = PauseRequest.of_sums(requests), secs / count
            self._own_secs = (time.monotonic() - started) / count
            step = int(self._applied.numpy())
            if not np.isfinite(loss):
                raise NotFiniteError(f"the loss is {loss} before global step {step}; try a lower learning rate")
            self.progress = Progress(
                global_step=step,
                local_steps=self._local_steps(step),
                examples=self.progress.examples + int(examples),
                loss=float(loss / count),
                accuracy=float(correct / examples),
            )
            self._log(count)
            self._report(self.progress)
        return requested

    def _take_steps(self, count: int, shared: tf.Tensor) -> np.ndarray:
        """See `_train_steps`."""
        try:
            sums: np.ndarray = self._train(self._iterator, tf.constant(count), shared).numpy()
        except tf.errors.UnknownError as error:  # how an exception leaves a Python function in a graph
            if self._all_reduce and (lost := self._all_reduce.lost):
                raise TaskLostError(f"lost {self._cluster.training_tasks[lost.index]}: {lost}") from error
            raise
        return sums

    def _steps_per_call(self) -> int:
        """All workers must come to the same number, so it follows from the mean of their times."""
        if self._config.train.steps_per_execution:
            return self._config.train.steps_per_execution
        return steps_of_a_call(self._secs_per_step) if self._secs_per_step else 1

    def combine(self, request: PauseRequest) -> PauseRequest:
        return PauseRequest.of_sums(list(self._sum_up(np.array(request.to_floats()))))

    def _sum_up(self, own: np.ndarray) -> np.ndarray:
        """The sum of what all workers give, between two steps."""
        summed: np.ndarray = self._reduce(tf.constant(own)).numpy()
        return summed

    def _log(self, count: int) -> None:
        """The worker's line, whenever it passes a multiple of log_every_steps."""
        step, every = self.progress.global_step, self._config.train.log_every_steps
        if step // every != (step - count) // every:
            epoch, own_step = (step - 1) // self.sharding.steps_per_epoch, self.progress.local_steps[self._worker]
            where = f"worker={self._worker}, epoch={epoch}, global_step={step}"
            print(f"{where}, local_step={own_step}, loss={self.progress.loss:.4f}", flush=True)

    def _train_steps(self, iterator: Any, num_steps: tf.Tensor, shared: tf.Tensor) -> tf.Tensor:
        """`num_steps` steps; returns the sums over them of loss, correct, examples and `shared`, float64 [6].

        `shared` is what every worker tells the others, float32 [3].
        """

        def step(number: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            per_replica = self._strategy.run(self._replica_step, args=(*next(iterator), shared))
            reduced = self._strategy.experimental_local_results(per_replica)[0]
            return number + 1, sums + tf.cast(self._apply(reduced), tf.float64)

        start = tf.constant(0), tf.zeros([6], tf.float64)
        return tf.while_loop(lambda number, _: number < num_steps, step, start)[1]

    def _replica_step(self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, shared: tf.Tensor) -> tf.Tensor:
        """One step of one replica; returns the sum over all replicas of what each contributes, packed."""
        trainable, state = self._step.values()
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        seed = step_seed(self._config.seed, replica, self._applied.read_value())
        batch = without_padding(Batch(images, labels, weights))
        output = self._compute(trainable, state, batch, seed)
        share = tf.reduce_sum(batch.weights)  # of the examples of the step; of all replicas together 1
        changes = [tf.cast(new - old, tf.float32) * share for new, old in zip(output.state, state, strict=True)]
        return self._reduced(self._packing.pack([*output.gradients, *changes], output.sums, shared))

    def _reduced(self, packed: tf.Tensor) -> tf.Tensor:
        if self._all_reduce is None:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, packed)
        return tf.ensure_shape(tf.numpy_function(self._all_reduce, [packed], tf.float32), packed.shape)

    def _apply(self, reduced: tf.Tensor) -> tf.Tensor:
        """The same update on every worker; returns the sums that came with it, float32 [6]."""
        tensors, (sums,) = self._packing.unpack(reduced, 6)
        gradients, changes = tensors[: len(self._step.trainable)], tensors[len(self._step.trainable) :]
        for variable, change in zip(self._step.state, changes, strict=True):  # by the call, so before the optimizer
            variable.value.assign_add(change)
        self._optimizer.apply(gradients, self._step.trainable)
        self._applied.assign_add(1)
        return sums

    def evaluate(self, split: str, pause_request: PauseRequests = never) -> Evaluation:
        """Every worker evaluates its ranges of the split; the sums are all-reduced."""
        arrays = getattr(self._splits, split)
        trainable, state = self._step.values()
        sums = np.zeros(3)
        size = chunk_size(self.sharding.batch_size, self._splits.image_shape)
        for first, last in chunks(len(arrays), size, self._worker, self._cluster.num_workers):
            sums += self._evaluate(trainable, state, arrays.images[first:last], arrays.labels[first:last]).numpy()
            heartbeat.progress()
        return Evaluation.of_sums(self._sum_up(sums), len(arrays))

    def updates_applied(self) -> int:
        """What the optimizer has counted; the global step is a counter of our own."""
        return int(self._counted.numpy())

    def snapshot(self) -> Snapshot:
        position = self._begin_position + self.progress.global_step - self._begin_step
        facts = {
            "mode": "sync",
            "local_steps": list(self.progress.local_steps),
            "target_step": self.target_step,
            "examples": self.progress.examples,
            "input": input_facts(self.sharding, [position] * self.sharding.num_shards),
        }
        return Snapshot(self.progress.global_step, values(self._named) | self._trained, facts)

    def finalize(self) -> None:
        self._trained = finalize(self._named, [(self._optimizer, self._step.trainable)])

    def abandon(self, reason: str) -> None:
        """Nothing: TensorFlow's heartbeats tell the others."""

    def facts(self) -> dict[str, Any]:
        return {}

    def histograms(self) -> dict[str, np.ndarray]:
        return {}

    @property
    def optimizer(self) -> keras.Optimizer:
        return self._optimizer

    def finish(self, accuracy: float | None) -> None:
        # A worker that ends cuts off what its neighbours still read of the last all-reduce.
        barrier("finished", FINISH_TIMEOUT_SECS)
        if accuracy is not None:
            print(f"worker={self._worker}, final accuracy={accuracy:.4f}", flush=True)
        if self._task == self._cluster.leader:
            # It hosts the coordination service: who still listens to it must leave first.
            others = [task for task in self._cluster.training_tasks if task != self._task]
            reachability.wait_until_gone(self._cluster, others, LEAVE_TIMEOUT_SECS)
