"""How many steps one call of TensorFlow executes: enough to hide the cost of a call, few enough to pause soon."""

import math
from typing import Any

import keras

from tf2dist.config.schema import RunConfig
from tf2dist.data.passes import Sharding
from tf2dist.model.plan import EpochPlan

CALL_SECS = 0.4  # a request to stop or save waits for a call; longer ones make no run faster
MAX_STEPS = 50  # more would save little more
# With parameter servers the steps of a call are unrolled. A worker prepares all of their operations before its first
# step, which takes seconds for a deep model. And a step takes 20 ns and more for each parameter that it trains.
UNROLLED_STEPS = 50
UNROLLED_OPERATIONS = 30_000
UNROLLED_PARAMETERS = 20_000_000


def steps_in_call_secs(secs_per_step: float) -> int:
    """The number of steps, from 1 to MAX_STEPS, that take about CALL_SECS."""
    return max(1, min(MAX_STEPS, int(CALL_SECS / secs_per_step)))


def unrolled_steps(traced_step: Any, variables: list[keras.Variable], steps_to_pause: float) -> int:
    """The number of unrolled steps in a call.

    Args:
        traced_step: a function with what a worker computes in one step.
        variables: that travel as a whole in each step.
        steps_to_pause: that a worker takes between two points at which all workers wait; it gets two calls for them.
    """
    operations = UNROLLED_OPERATIONS // len(traced_step.graph.get_operations())
    parameters = UNROLLED_PARAMETERS // max(1, sum(int(math.prod(variable.shape)) for variable in variables))
    return max(1, min(UNROLLED_STEPS, operations, parameters, math.ceil(steps_to_pause / 2)))


def steps_to_pause(config: RunConfig, plan: EpochPlan | None, sharding: Sharding, total_steps: int) -> int:
    """The fewest global steps between two ends of an epoch of `fit`, evaluations or checkpoints that are asked for."""
    epoch = sharding.updates_per_pass if plan else None
    given = (epoch, config.train.eval_every_steps, config.checkpoint.every_steps)
    return min([total_steps, *(steps for steps in given if steps)])
