"""How many steps one call of TensorFlow executes: enough to hide the cost of a call, few enough to pause soon."""

from typing import Any

import keras

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


def unrolled_steps(traced_step: Any, model: keras.Model) -> int:
    """The number of unrolled steps in a call; `traced_step`: a function with what a worker computes in one."""
    num_operations = len(traced_step.graph.get_operations())
    num_parameters = max(1, int(model.count_params()))
    return max(1, min(UNROLLED_STEPS, UNROLLED_OPERATIONS // num_operations, UNROLLED_PARAMETERS // num_parameters))
