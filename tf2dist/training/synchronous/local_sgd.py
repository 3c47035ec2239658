"""algorithm=local_sgd: synchronous workers that train copies of their own and average them now and then.

T. Lin, S. U. Stich, K. K. Patel, M. Jaggi: Don't Use Large Mini-Batches, Use Local SGD, arXiv 1808.07217, 2018. The
authors leave the slots of the optimizer as they are on each worker; here the mean is that of all variables, so that
after a round all workers are equal, and a checkpoint of one of them continues the run exactly. It weights each worker
by the examples that it has seen in the round, as B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas do:
Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017. A constraint of Keras is
applied in each step, as always, and to the mean. Gradients are clipped by each worker for itself.

The mean of Adam's updates is not Adam's update for the mean gradient, so a round of one step is plain training only for
an optimizer that is linear in the gradient. For rounds of one step `sync_setup.step_class` therefore takes the graph of
plain training.

The outer optimizer is that of DiLoCo: A. Douillard, Q. Feng, A. A. Rusu, R. Chhaparia, Y. Donchev, A. Kuncoro, M.
Ranzato, A. Szlam, J. Shen: DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105, 2023.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.state import Named, assign, named_variables, values
from tf2dist.config.schema import RunConfig
from tf2dist.data.splits import Splits
from tf2dist.data.stream import Stream
from tf2dist.errors import ConfigError
from tf2dist.model import support
from tf2dist.model.packing import Buckets
from tf2dist.model.recurrence import reached_from
from tf2dist.model.step import Step
from tf2dist.process import heartbeat
from tf2dist.tf_internals.keras import state_of
from tf2dist.training.synchronous.feeds import StreamFeed
from tf2dist.training.synchronous.sync_step import SHARED, SyncStep
from tf2dist.training.synchronous.workers import Workers

MAX_EXAMPLES = 1 << 24  # up to here float32, in which workers add up what they have seen, holds every whole number
PATIENCE = 2.0  # while a worker waits for slower ones, its watchdog allows for so many times the last round's time
PREFIX = "outer/"  # of the momenta of the outer optimizer in a snapshot


class OwnStreamFeed(StreamFeed):
    """Batches of the worker's own stream, of which it takes each for the same share of a step; see `StreamFeed`."""

    num_extra = 0

    def __init__(self, workers: Workers, stream: Stream, begin: int) -> None:
        super().__init__(workers, stream, begin)
        self._count = workers.count

    def slice(self, element: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        leaves, _ = element
        return leaves, tf.constant(1 / self._count)

    def extra(self, element: Any) -> list[tf.Tensor]:
        return []


class LocalSgdStep(SyncStep):
    """One worker's part in rounds of local steps.

    The all-reduce of a round carries the changes of all variables since the last one, and the sums for the log.
    """

    make_stream_feed = OwnStreamFeed

    def prepare_graph(self, config: RunConfig) -> None:
        self._length = config.algorithm.local_steps
        # Takes the way from the last weights to their new mean for a gradient.
        self._outer: keras.optimizers.SGD | None = None
        self._momenta: Named = {}
        if config.algorithm.has_outer_steps:
            rate, momentum = config.algorithm.outer_learning_rate, config.algorithm.outer_momentum
            self._outer = keras.optimizers.SGD(rate, momentum=momentum, nesterov=True)
            self._outer.build(self.step.trainable)
            slots = named_variables(self.step.model, self.step.variables, [self._outer])
            of_optimizer = "optimizer/"
            self._momenta = {
                f"{PREFIX}{name.removeprefix(of_optimizer)}": variables
                for name, variables in slots.items()
                if name.startswith(of_optimizer)
            }
        # All that differs between workers after a step, the trainable variables first.
        self._averaged = [*self.step.variables, *state_of(self.optimizer)]
        self._values = Buckets(self._averaged, self.num_sums, tf.float32)
        # As they were when the round began, and what this worker has added up since then: see `StepOutput.sums`, with
        # the loss multiplied by the number of examples.
        self._begun = [tf.Variable(tf.convert_to_tensor(v.value), trainable=False) for v in self._averaged]
        self._own = tf.Variable(tf.zeros([2 + self.step.metrics.size], tf.float64), trainable=False)
        self._begin = tf.function(self._begin_round, autograph=False)
        self._run_rounds = tf.function(self._rounds, autograph=False)
        self._allowance_secs = heartbeat.START_SECS

    @staticmethod
    def check(
        model_name: str, config: RunConfig, workers: Workers, splits: Splits, step: Step, optimizer: keras.Optimizer
    ) -> None:
        support.check_step(support.LOCAL_SGD, model_name, step)
        if workers.num_replicas > workers.count:
            raise ConfigError(
                "algorithm (local_sgd): the GPUs of a worker share its variables and cannot take steps of their own; "
                "use a worker for each GPU"
            )
        _check_length(config, workers.count)
        if workers.count > 1:
            support.check_step(support.SEVERAL_LOCAL, model_name, step)
        if splits.stream:
            support.check_step(support.LOCAL_SGD_ON_STREAMS, model_name, step)
        support.check_optimizer(support.LOCAL_SGD, optimizer)
        if config.algorithm.has_outer_steps:
            support.check_optimizer(support.OUTER_STEPS, optimizer)

    def run_steps(self, at_once: int, left: int, shared: list[float]) -> np.ndarray:
        """Runs whole rounds, see `SyncStep.run_steps`, of which the last before a pause is shorter if need be."""
        length = min(self._length, left)
        num_rounds = max(1, min(at_once, left) // length)
        self._begin()
        # A round that is too long for one call begins with calls that end without an average.
        rest = length
        while rest > at_once:
            heartbeat.progress()
            self._call(1, at_once, length, False, shared)
            rest -= at_once
        # This worker may now wait for a slower one, which reports its own progress; so may its own last steps before.
        heartbeat.extend_deadline(self._allowance_secs)
        sums = self._call(num_rounds, rest, length, True, shared)
        heartbeat.extend_deadline(0.0)
        # The last number shared is the mean time of a step, 0 while unknown; `sums` has it once for each step.
        self._allowance_secs = PATIENCE * float(sums[-1]) / num_rounds or heartbeat.START_SECS
        return sums

    def _call(self, num_rounds: int, num_steps: int, length: int, ends: bool, shared: list[float]) -> np.ndarray:
        """Calls `_rounds`."""
        whole = map(tf.constant, (num_rounds, num_steps, length))
        return self.call(self._run_rounds, *whole, tf.constant(ends), tf.constant(shared, tf.float32))

    def arrays(self) -> dict[str, np.ndarray]:
        return values(self._momenta)

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        # Those that a snapshot of another mode or algorithm lacks remain zero.
        assign(self._momenta, {name: arrays[name] for name in self._momenta if name in arrays})

    def facts(self) -> dict[str, Any]:
        return {"local_steps": self._length}

    def _rounds(
        self,
        num_rounds: tf.Tensor,
        num_steps: tf.Tensor,
        length: tf.Tensor,
        ends: tf.Tensor,
        shared: tf.Tensor,
        *iterators: Any,
    ) -> tf.Tensor:
        """Takes rounds, or a part of one; returns the sums of those that have ended, float64 [num_sums].

        Args:
            num_steps: to take in each round.
            length: of each round, with the steps that were taken before this call.
            ends: whether each round ends with these steps.
        """

        def step(number: tf.Tensor) -> tuple[tf.Tensor]:
            self._local_step(iterators)
            return (number + 1,)

        def one_round(number: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            tf.while_loop(lambda taken: taken < num_steps, step, [tf.constant(0)])
            round_sums = tf.cond(ends, lambda: self._average(length, shared), lambda: tf.zeros_like(sums))
            return number + 1, sums + round_sums

        start = tf.constant(0), tf.zeros([self.num_sums], tf.float64)
        return tf.while_loop(lambda number, _: number < num_rounds, one_round, start)[1]

    def _local_step(self, iterators: tuple[Any, ...]) -> None:
        """A step of this worker alone, on its own copy of the variables."""
        # The worker is one replica.
        gradients, state, sums = self.on_replicas(self._own_part, self.next_element(iterators))
        for variable, new in zip(self.step.state, state, strict=True):
            variable.value.assign(new)
        self.optimizer.apply(gradients, self.step.trainable)
        self.applied.assign_add(1)
        self._own.assign_add(tf.cast(sums, tf.float64))

    def _own_part(self, element: Any) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """On the replica: the gradients of the mean loss of its batch, the new state, and the sums; see `_own`.

        A batch of padding leaves the state that depends on it as it is, and has gradients of 0.
        """
        self._gathered: list[tf.Tensor] = []  # what `tf2dist.gather` adds up, the same on all workers
        output, _, state, share = self.computed(element)
        # The step multiplies a mean by the share of the batch, so that the parts of all workers add up. A loss that is
        # a sum grows by this to what it would be for the batches of all.
        gradients = [
            tf.math.divide_no_nan(gradient, tf.cast(output.weight, gradient.dtype)) for gradient in output.gradients
        ]
        reached = reached_from(*tf.nest.flatten(element), barriers=self._gathered)
        state = [
            tf.where(share > 0, new, old) if new.name in reached else new
            for new, old in zip(output.state, state, strict=True)
        ]
        part, count, metrics = output.sums[:1], output.sums[1:2], output.sums[2:]
        return gradients, state, tf.concat([tf.math.divide_no_nan(part, output.weight) * count, count, metrics], 0)

    def _added_up(self, tensor: tf.Tensor) -> tf.Tensor:
        total = super()._added_up(tensor)
        self._gathered.append(total)
        return total

    def _average(self, length: tf.Tensor, shared: tf.Tensor) -> tf.Tensor:
        """Ends a round: gives all workers the mean of their variables; returns its sums, float64 [num_sums]."""
        reduced = self.on_replicas(self._contribution, shared)
        totals = reduced[0][-self.num_sums :]
        changes, _ = self._values.unpack([bucket / totals[1] for bucket in reduced], self.num_sums)
        self._move(changes)
        self._begin_round()
        # The loss, here the mean over the examples, and what is shared count once for each step, as in plain training.
        steps = tf.cast(length, tf.float32)
        parts = [totals[:1] / totals[1] * steps, totals[1:-SHARED], totals[-SHARED:] * steps]
        return tf.cast(tf.concat(parts, 0), tf.float64)

    def _contribution(self, shared: tf.Tensor) -> list[tf.Tensor]:
        """On the replica: the sums of what all workers contribute to the end of a round."""
        examples = tf.cast(self._own.read_value()[1], tf.float32)
        news = [tf.convert_to_tensor(variable.value) for variable in self._averaged]
        changes = [
            tf.cast(new - old.read_value(), tf.float32) * examples for new, old in zip(news, self._begun, strict=True)
        ]
        return self.reduced(self._values.pack(changes, tf.cast(self._own.read_value(), tf.float32), shared))

    def _move(self, changes: list[tf.Tensor]) -> None:
        """Moves all variables from where they began the round; an outer optimizer moves the trainable ones."""
        trainable = self.step.trainable
        by_outer = len(trainable) if self._outer else 0
        for number, (variable, old) in enumerate(zip(self._averaged, self._begun, strict=True)):
            begun = old.read_value()
            variable.value.assign(begun if number < by_outer else begun + changes[number])
        if self._outer:
            self._outer.apply([-change for change in changes[:by_outer]], trainable)
            return
        # The mean of weights that fulfil a constraint need not fulfil it, if it is that of a norm. An optimizer sees to
        # that by itself.
        for variable in trainable:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    def _begin_round(self) -> None:
        """Notes the variables as they are now, and begins new sums."""
        for old, variable in zip(self._begun, self._averaged, strict=True):
            old.assign(tf.convert_to_tensor(variable.value))
        self._own.assign(tf.zeros_like(self._own))


def _check_length(config: RunConfig, num_workers: int) -> None:
    length = config.algorithm.local_steps
    most = MAX_EXAMPLES // (config.train.batch_size_per_worker * num_workers)
    if length > most:
        raise ConfigError(
            f"algorithm.local_steps ({length}): a round would have more than {MAX_EXAMPLES:,} examples, up to which "
            f"they are counted exactly; give at most {most:,}"
        )
