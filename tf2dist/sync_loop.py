"""The synchronous twin: every worker holds the model, gradients are all-reduced each step.

One all-reduce a step carries everything: the gradients, the changes of the state, and the sums
for the log, packed into one vector. All replicas then apply the same update to their own copy.
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist import data, peers
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.errors import ConfigError, NotFiniteError
from tf2dist.evaluate import Evaluation, chunks
from tf2dist.loop import Progress, Report, target_step
from tf2dist.models import build_model, build_optimizer
from tf2dist.step import Batch, ModelStep, Packing, step_seed
from tf2dist.strategy import barrier, multi_worker_mirrored_strategy

STEPS_PER_EXECUTION = 50
FINISH_TIMEOUT_SECS = 60.0
LEAVE_TIMEOUT_SECS = 10.0


class SyncLoop:
    """Runs on every worker; see `loop.Loop`."""

    def __init__(self, config: RunConfig, cluster: Cluster, task: Task, splits: data.Splits, report: Report) -> None:
        self._config, self._report = config, report
        self._task, self._cluster = task, cluster
        self._strategy = multi_worker_mirrored_strategy(cluster, task, config.startup_timeout_secs)
        num_replicas = self._strategy.num_replicas_in_sync
        local_replicas = num_replicas // cluster.num_workers
        batch_size, rest = divmod(config.train.batch_size_per_worker, local_replicas)
        if rest:
            raise ConfigError(
                f"train.batch_size_per_worker ({config.train.batch_size_per_worker}): must be a multiple of the "
                f"{local_replicas} GPUs of a worker"
            )
        self.sharding = data.Sharding(len(splits.train), batch_size, num_replicas, config.seed, whole_batch_loss=True)
        self.target_step = target_step(config, self.updates_per_epoch)
        self._splits = splits
        with self._strategy.scope():
            self.model = build_model(config.model, splits.image_shape, splits.num_classes, config.seed)
            self._optimizer = build_optimizer(config.optimizer, self.target_step)
            self._optimizer.build(self.model.trainable_variables)
            self._applied = tf.Variable(
                0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )
        # The gradients arrive summed over all replicas; Keras would sum them once more.
        self._optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
        self._step = ModelStep(self.model)
        self._compute = tf.function(self._step, autograph=False, jit_compile=True) if config.devices.xla else self._step
        self._packing = Packing([*self._step.trainable, *self._step.state])
        self._iterator = iter(self._strategy.distribute_datasets_from_function(self._dataset))
        self._train = tf.function(self._train_steps)
        self._evaluate = tf.function(self._step.evaluate, autograph=False)
        self._reduce = tf.function(self._sum_over_workers, autograph=False)
        self._num_steps = config.train.steps_per_execution or STEPS_PER_EXECUTION
        self.progress = Progress(0, (0,) * cluster.num_workers, 0, math.nan, math.nan)

    @property
    def updates_per_epoch(self) -> int:
        return self.sharding.steps_per_epoch

    def _dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """This worker's batches, for its replicas in turn."""
        images, labels = tf.constant(self._splits.train.images), tf.constant(self._splits.train.labels)
        count = context.num_replicas_in_sync // context.num_input_pipelines
        first = context.input_pipeline_id * count
        shards = [data.batches(images, labels, self.sharding, first + i) for i in range(count)]
        if count == 1:
            return shards[0]
        return tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(count).repeat())

    def train(self, until_step: int) -> None:
        """Runs exactly as many steps as are missing; every worker must ask for the same."""
        while self.progress.global_step < until_step:
            count = min(self._num_steps, until_step - self.progress.global_step)
            loss, correct, examples = self._train(self._iterator, tf.constant(count)).numpy()
            step = int(self._applied.numpy())
            if not np.isfinite(loss):
                raise NotFiniteError(f"the loss is {loss} before global step {step}; try a lower learning rate")
            self.progress = Progress(
                global_step=step,
                local_steps=(step,) * self._cluster.num_workers,
                examples=self.progress.examples + int(examples),
                loss=float(loss / count),
                accuracy=float(correct / examples),
            )
            self._log(count)
            self._report(self.progress)

    def _log(self, count: int) -> None:
        """The worker's line, whenever it passes a multiple of log_every_steps."""
        step, every = self.progress.global_step, self._config.train.log_every_steps
        if step // every != (step - count) // every:
            worker, epoch = self._cluster.training_tasks.index(self._task), (step - 1) // self.updates_per_epoch
            loss = self.progress.loss
            print(f"worker={worker}, epoch={epoch}, global_step={step}, local_step={step}, loss={loss:.4f}", flush=True)

    def _train_steps(self, iterator: Any, num_steps: tf.Tensor) -> tf.Tensor:
        """`num_steps` steps; returns the sums of loss, correct and examples over them, float64 [3]."""
        sums = tf.zeros([3], tf.float64)
        for _ in tf.range(num_steps):
            per_replica = self._strategy.run(self._replica_step, args=(*next(iterator),))
            sums += tf.cast(self._strategy.experimental_local_results(per_replica)[0], tf.float64)
        return sums

    def _replica_step(self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        trainable, state = (
            [tf.convert_to_tensor(v.value) for v in variables] for variables in (self._step.trainable, self._step.state)
        )
        seed = step_seed(self._config.seed, context.replica_id_in_sync_group, self._applied.read_value())
        output = self._compute(trainable, state, Batch(images, labels, weights), seed)
        changes = [(new - old) / self.sharding.num_shards for new, old in zip(output.state, state, strict=True)]
        packed = self._packing.pack([*output.gradients, *changes], output.sums)
        tensors, sums = self._packing.unpack(context.all_reduce(tf.distribute.ReduceOp.SUM, packed))
        gradients, changes = tensors[: len(trainable)], tensors[len(trainable) :]
        self._optimizer.apply(gradients, self._step.trainable)
        context.merge_call(self._add_to_state, args=(changes,))
        return sums

    def _add_to_state(self, strategy: tf.distribute.Strategy, changes: list[tf.Tensor]) -> None:
        """Adds the mean change of the replicas to every copy; all copies stay equal."""
        for variable, change in zip(self._step.state, changes, strict=True):
            strategy.extended.update(variable.value, lambda v, c: v.assign_add(c), args=(change,))
        strategy.extended.update(self._applied, lambda v: v.assign_add(1))

    def evaluate(self, split: str) -> Evaluation:
        """Every worker evaluates its ranges of the split; the sums are all-reduced."""
        arrays = getattr(self._splits, split)
        worker, num_workers = self._cluster.training_tasks.index(self._task), self._cluster.num_workers
        trainable, state = (
            [tf.convert_to_tensor(v.value) for v in variables] for variables in (self._step.trainable, self._step.state)
        )
        sums = np.zeros(3)
        for first, last in chunks(len(arrays), worker, num_workers):
            sums += self._evaluate(trainable, state, arrays.images[first:last], arrays.labels[first:last]).numpy()
        return Evaluation.of_sums(self._reduce(tf.constant(sums)).numpy(), len(arrays))

    def _sum_over_workers(self, values: tf.Tensor) -> tf.Tensor:
        """Adds up what every worker has; the first replica of each contributes it."""
        first = self._strategy.num_replicas_in_sync // self._cluster.num_workers

        def mine(tensor: tf.Tensor) -> tf.Tensor:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return tf.where(tf.cast(replica, tf.int32) % first == 0, tensor, tf.zeros_like(tensor))

        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, self._strategy.run(mine, (values,)), None)

    def updates_applied(self) -> int:
        """What the optimizer has counted; the global step is a counter of our own."""
        return int(self._optimizer.iterations.numpy())

    def abandon(self, reason: str) -> None:
        """Nothing: TensorFlow's heartbeats tell the others."""

    def facts(self) -> dict[str, Any]:
        return {}

    def finish(self, accuracy: float) -> None:
        # A worker that ends cuts off what its neighbours still read of the last all-reduce.
        barrier("finished", FINISH_TIMEOUT_SECS)
        worker = self._cluster.training_tasks.index(self._task)
        print(f"worker={worker}, final accuracy={accuracy:.4f}", flush=True)
        if self._task == self._cluster.leader:
            # It hosts the coordination service: who still listens to it must leave first.
            others = [task for task in self._cluster.training_tasks if task != self._task]
            peers.wait_until_gone(self._cluster, others, LEAVE_TIMEOUT_SECS)
