"""A tensor of all synchronous workers, for losses and state that take examples of all of them together."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

_current = threading.local()  # `exchange`: that of the step that this thread traces; `count`: of the calls of `gather`


class Exchange(NamedTuple):
    """The exchange between replicas by which one of them gathers.

    Attributes:
        add_up: the sum of a float32 tensor over all replicas, which call it equally often with equal shapes.
        replica: the number of this one, int32 [].
        num_replicas: of all workers.
        share: of this replica's batch in the step; 0 if it is padding.
        weighs_later: whether the gradients of the replica are multiplied by the share after they have been computed.
    """

    add_up: Callable[[tf.Tensor], tf.Tensor]
    replica: tf.Tensor
    num_replicas: int
    share: tf.Tensor
    weighs_later: bool


@tf.autograph.experimental.do_not_convert
def gather(tensor: Any) -> Any:
    """The tensors of all synchronous workers, one after the other in the order of the workers.

    To be called in the loss, the layers or the `train_step` of a model, by all workers equally often. Gradients flow
    through it to all workers. It returns the tensor itself where workers compute apart: with one worker, with
    mode="async" and "sync_replicas", in evaluations, and in `keras.Model.fit`.

    Args:
        tensor: float [n, ...], with the n examples of this worker; integers up to 2^24 are exact.

    Returns:
        A tensor [N, ...] of the same type, with the N examples of all workers; those of padding are left out.

    Raises:
        TypeError: the tensor holds neither floats nor integers.
    """
    tensor = tf.convert_to_tensor(tensor)
    _current.count = num_calls() + 1
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise TypeError(f"gather takes floats and integers, and not {tensor.dtype.name}")
    exchange: Exchange | None = getattr(_current, "exchange", None)
    return tensor if exchange is None else _gathered(tensor, exchange)


def _gathered(tensor: tf.Tensor, exchange: Exchange) -> tf.Tensor:
    num_own = tf.where(exchange.share > 0, tf.shape(tensor)[0], 0)
    # In the last step of an epoch the workers may have batches of different sizes.
    sizes = exchange.add_up(tf.one_hot(exchange.replica, exchange.num_replicas) * tf.cast(num_own, tf.float32))
    ends = tf.cast(tf.cumsum(sizes), tf.int32)
    first, total = ends[exchange.replica] - num_own, ends[-1]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gathered(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        around = [[first, total - first - num_own], *([0, 0] for _ in own.shape[1:])]
        result = exchange.add_up(tf.pad(tf.cast(own[:num_own], tf.float32), around))

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            # The loss of the step depends on this replica's tensor by way of the losses of all replicas.
            weight = exchange.share if exchange.weighs_later else tf.ones([])
            summed = exchange.add_up(tf.cast(upstream, tf.float32) * weight)[first : first + num_own]
            padding = [[0, tf.shape(own)[0] - num_own], *([0, 0] for _ in own.shape[1:])]
            return tf.cast(tf.pad(tf.math.divide_no_nan(summed, weight), padding), own.dtype)

        return tf.ensure_shape(tf.cast(result, own.dtype), [None, *own.shape[1:]]), backward

    return gathered(tensor)


@contextlib.contextmanager
def exchanging(exchange: Exchange | None) -> Iterator[None]:
    """The block in which the step of a replica is traced; None where replicas compute apart."""
    before: Exchange | None = getattr(_current, "exchange", None)
    _current.exchange = exchange
    try:
        yield
    finally:
        _current.exchange = before


@contextlib.contextmanager
def recording() -> Iterator[list[tf.Tensor]]:
    """The block in which a step is traced as that of a single replica; the sums that `gather` takes."""
    totals: list[tf.Tensor] = []

    def add_up(tensor: tf.Tensor) -> tf.Tensor:
        total = tf.identity(tensor)
        totals.append(total)
        return total

    with exchanging(Exchange(add_up, tf.constant(0), 1, tf.ones([]), weighs_later=False)):
        yield totals


def num_calls() -> int:
    """How often `gather` was called in this thread."""
    return getattr(_current, "count", 0)
