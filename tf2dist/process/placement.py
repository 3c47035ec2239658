"""Which parameter server holds which variable."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


@contextlib.contextmanager
def placed(strategy: tf.distribute.ParameterServerStrategy, placement: str, num_ps: int) -> Iterator[None]:
    """In the context, variables are created on the parameter servers; their values do not depend on where they lie.

    Args:
        placement: "round_robin", on each ps in turn; or "balanced", in the order of their creation each on the ps whose
            variables have the fewest bytes so far, as TensorFlow 1 had it in `GreedyLoadBalancingStrategy`.
    """
    if placement == "round_robin":  # the strategy's own
        with strategy.scope():
            yield
        return
    loads = [0] * num_ps

    def on_least_loaded(next_creator: Any, **kwargs: Any) -> tf.Variable:
        ps = loads.index(min(loads))
        with tf.device(f"/job:ps/task:{ps}/device:CPU:0"):
            variable = next_creator(**kwargs)
        loads[ps] += _bytes_of(variable)
        return variable

    # The strategy's creator calls the outer one on the device that it has chosen; the inner device counts.
    with tf.variable_creator_scope(on_least_loaded), strategy.scope():
        yield


def print_bytes(variables: list[keras.Variable], optimizers: list[keras.Optimizer], num_ps: int) -> None:
    """Prints a line for each ps, for the log: the bytes of the model's variables that lie there, and all bytes.

    Args:
        variables: those of the model that belong to its state.
        optimizers: one for each ps that has variables.
    """
    of_model = _bytes_of_each(variables)
    of_optimizers = _bytes_of_each([slot for optimizer in optimizers for slot in optimizer.variables])
    for ps in range(num_ps):
        own = of_model.get(ps, 0)
        total = own + of_optimizers.get(ps, 0)
        print(f"ps-{ps}: {own:,} bytes of the model, {total:,} with the optimizer's state", flush=True)


def _bytes_of_each(variables: list[keras.Variable]) -> dict[int, int]:
    found: dict[int, int] = {}
    for variable in variables:
        ps = tf.DeviceSpec.from_string(variable.value.device).task
        found[ps] = found.get(ps, 0) + _bytes_of(variable.value)
    return found


def _bytes_of(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)
