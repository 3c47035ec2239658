"""How many steps one call of TensorFlow executes: enough to hide the cost of a call, few enough to pause soon."""

CALL_SECS = 0.4  # a request to stop or save waits for a call, with mode=async for two; longer ones make no run faster
MAX_STEPS = 50  # more would save little more
# With parameter servers the steps of a call are unrolled. Every worker has to prepare all of them before its first one,
# which takes seconds for a deep model, and the cost of a call is little beside a step of so many operations.
UNROLLED_STEPS = 10
MAX_OPERATIONS = 1000


def steps_in_call_secs(secs_per_step: float) -> int:
    """The number of steps, from 1 to MAX_STEPS, that take about CALL_SECS."""
    return max(1, min(MAX_STEPS, int(CALL_SECS / secs_per_step)))


def unrolled_steps(num_operations: int) -> int:
    """The number of unrolled steps in a call of a model whose step has so many operations."""
    return UNROLLED_STEPS if num_operations < MAX_OPERATIONS else 1
