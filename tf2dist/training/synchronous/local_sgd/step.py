"""The graph of algorithm=local_sgd: rounds of steps on the worker's own copy, and one all-reduce at the end of each."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.model.packing import Buckets
from tf2dist.model.step import ModelStep
from tf2dist.process import heartbeat
from tf2dist.training.synchronous.local_sgd.outer import Outer
from tf2dist.training.synchronous.local_sgd.slots import slots_of
from tf2dist.training.synchronous.step import SHARED, SyncStep
from tf2dist.training.synchronous.workers import Workers

PATIENCE = 2.0  # while a worker waits for slower ones, its watchdog allows for so many times the last round's time


class LocalSgdStep(SyncStep):
    """See `SyncStep`.

    The all-reduce of a round carries the changes of all variables since the last one, and the sums for the log.
    """

    def __init__(
        self, config: RunConfig, workers: Workers, step: ModelStep, optimizer: keras.Optimizer, *more: Any
    ) -> None:
        super().__init__(config, workers, step, optimizer, *more)
        self._length = config.algorithm.local_steps
        self._outer = Outer(config.algorithm, step) if config.algorithm.has_outer_steps else None
        # All that a step changes, the trainable variables first.
        self._averaged = [*step.variables, *slots_of(optimizer)]
        self._values = Buckets(self._averaged, self.num_sums, tf.float32)
        # As they were when the round began, and what this worker has added up since then: see `StepOutput.sums`, with
        # the loss multiplied by the number of examples.
        self._begun = [tf.Variable(tf.convert_to_tensor(v.value), trainable=False) for v in self._averaged]
        self._own = tf.Variable(tf.zeros([2 + step.metrics.size], tf.float64), trainable=False)
        self._begin = tf.function(self._begin_round, autograph=False)
        self._take_rounds = tf.function(self._rounds, autograph=False)
        self._allowance_secs = heartbeat.START_SECS

    def take(self, at_once: int, left: int, shared: list[float]) -> np.ndarray:
        """See `SyncStep.take`; takes whole rounds, of which the last before a pause is shorter if need be."""
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
        """See `_rounds`."""
        whole = map(tf.constant, (num_rounds, num_steps, length))
        return self.call(self._take_rounds, *whole, tf.constant(ends), tf.constant(shared, tf.float32))

    def arrays(self) -> dict[str, np.ndarray]:
        return self._outer.arrays() if self._outer else {}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        if self._outer:
            self._outer.restore(arrays)

    def facts(self) -> dict[str, Any]:
        return {"local_steps": self._length}

    def _rounds(
        self,
        num_rounds: tf.Tensor,
        num_steps: tf.Tensor,
        length: tf.Tensor,
        ends: tf.Tensor,
        shared: tf.Tensor,
        *source: Any,
    ) -> tf.Tensor:
        """Takes rounds, or a part of one; returns the sums of those that have ended, float64 [num_sums].

        Args:
            num_steps: to take in each round.
            length: of each round, with the steps that were taken before this call.
            ends: whether each round ends with these steps.
        """

        def step(number: tf.Tensor) -> tuple[tf.Tensor]:
            self._local_step(source)
            return (number + 1,)

        def one_round(number: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            tf.while_loop(lambda taken: taken < num_steps, step, [tf.constant(0)])
            found = tf.cond(ends, lambda: self._average(length, shared), lambda: tf.zeros_like(sums))
            return number + 1, sums + found

        start = tf.constant(0), tf.zeros([self.num_sums], tf.float64)
        return tf.while_loop(lambda number, _: number < num_rounds, one_round, start)[1]

    def _local_step(self, source: tuple[Any, ...]) -> None:
        """A step of this worker alone, on its own copy of the variables."""
        # The worker is one replica.
        gradients, state, sums = self.on_replicas(self._own_part, self.next_element(source))
        for variable, new in zip(self.step.state, state, strict=True):
            variable.value.assign(new)
        self.optimizer.apply(gradients, self.step.trainable)
        self.applied.assign_add(1)
        self._own.assign_add(tf.cast(sums, tf.float64))

    def _own_part(self, element: Any) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """On the replica: the gradients of the mean loss of its batch, the new state, and the sums; see `_own`.

        A batch of padding leaves the state as it is, and has gradients of 0.
        """
        output, state, share = self.computed(element)
        # The step multiplies a mean by the share of the batch, so that the parts of all workers add up. A loss that is
        # a sum grows by this to what it would be for the batches of all.
        gradients = [tf.math.divide_no_nan(gradient, tf.cast(share, gradient.dtype)) for gradient in output.gradients]
        state = [tf.where(share > 0, new, old) for new, old in zip(output.state, state, strict=True)]
        part, count, metrics = output.sums[:1], output.sums[1:2], output.sums[2:]
        return gradients, state, tf.concat([tf.math.divide_no_nan(part, share) * count, count, metrics], 0)

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
            self._outer.optimizer.apply([-change for change in changes[:by_outer]], trainable)
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
