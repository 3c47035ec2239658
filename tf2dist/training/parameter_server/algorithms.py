"""The algorithms of asynchronous training: what a ps does with an update, as hooks that are called while it is traced.

`config.schema` has their table.
"""

import contextlib
import pkgutil
from collections.abc import Iterator

import keras
import tensorflow as tf

from tf2dist.config.schema import ALGORITHMS, RunConfig
from tf2dist.errors import ConfigError
from tf2dist.tf_internals.keras import scale_learning_rate

EPSILON = 1e-7  # of the authors' program


class Algorithm:
    """Plain training: each update is applied as it comes, however old the values it was computed from.

    The other algorithms override a part of this. All methods are called while graphs are made: what does nothing here
    costs nothing. Every update that a ps has numbered is applied and counted. An algorithm changes its gradients or its
    learning rate, and cannot refuse it.

    Attributes:
        needs_pulled_values: whether workers send back the values that they have pulled.
        runs_alone: whether a ps may apply only one update at a time, even if the optimizer does not need that.
        why_no_rows: why tables travel as a whole; empty if their rows may, see `model.row_choice`.
    """

    needs_pulled_values = False
    runs_alone = False
    why_no_rows = ""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def prepare(self, optimizer: keras.Optimizer) -> None:
        """Called once with the optimizer of each ps, when it is built and before it is traced.

        Raises:
            ConfigError: the algorithm cannot be combined with the optimizer.
        """

    def gradients(
        self, gradients: list[tf.Tensor], pulled: list[tf.Tensor], variables: list[keras.Variable]
    ) -> list[tf.Tensor]:
        """The gradients that the optimizer gets.

        Args:
            gradients: one for each of `variables`, as a worker has pushed them.
            pulled: the values from which they were computed; empty unless `needs_pulled_values`.
            variables: if `runs_alone`, the trainable ones of this ps. Otherwise small ones may lie in a vector, which
                is padded at its end and so longer than its gradient; see `storage`.
        """
        return gradients

    def update(self, staleness: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """The block in which the optimizer applies an update, such as one in which its learning rate is scaled.

        Args:
            staleness: how many others were numbered on this ps between the pull and this update, int64.
        """
        return contextlib.nullcontext()


class StalenessAware(Algorithm):
    """Training in which an update counts for less the staler it is.

    The learning rate of an update is divided by its staleness, if that is more than 1: W. Zhang, S. Gupta, X. Lian,
    J. Liu: Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016. The rate is divided and not the
    gradient: Adam and its kin divide by the size of the gradients, which would cancel it. Weight decay, which is a
    multiple of the rate, becomes smaller with it.
    """

    _factor: tf.Tensor | None = None  # while an update is traced

    def prepare(self, optimizer: keras.Optimizer) -> None:
        if optimizer.gradient_accumulation_steps:
            raise ConfigError(
                f"optimizer.gradient_accumulation_steps ({optimizer.gradient_accumulation_steps}): makes one update of "
                "several gradients, each with a staleness of its own; leave it out, or algorithm=staleness_aware"
            )
        scale_learning_rate(optimizer, lambda: self._factor)

    @contextlib.contextmanager
    def update(self, staleness: tf.Tensor) -> Iterator[None]:
        self._factor = 1 / tf.cast(tf.maximum(staleness, 1), tf.float32)
        try:
            yield
        finally:
            self._factor = None  # a tensor of one graph, which means nothing outside of it


class DelayCompensated(Algorithm):
    """Training in which the gradients of stale updates are corrected.

    A gradient was computed at the values of its pull, and is applied to others. The correction estimates the gradient
    at the present values, by a Taylor expansion with the diagonal of the outer product of the gradient in place of the
    Hessian: S. Zheng, Q. Meng, T. Wang, W. Chen, N. Yu, Z. Ma, T. Liu: Asynchronous Stochastic Gradient Descent with
    Delay Compensation, ICML 2017 (DC-ASGD-c with a constant lambda, and DC-ASGD-a, in which it is divided by the root
    of a moving mean square of the gradients). There the ps keeps the values that each worker has pulled; here the
    worker sends them back with the gradients, twice as many bytes, so that nothing is to be saved or lost with it. The
    mean squares begin anew with each start.
    """

    needs_pulled_values = True
    # Another update between the correction and its use would change the values that the correction is for.
    runs_alone = True
    why_no_rows = "algorithm=delay_compensated compares whole tables"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._mean_squares: dict[int, tf.Variable] = {}  # by id of the variable

    def gradients(
        self, gradients: list[tf.Tensor], pulled: list[tf.Tensor], variables: list[keras.Variable]
    ) -> list[tf.Tensor]:
        return [
            gradient + self._strength(gradient, variable) * gradient * gradient * (variable.value.read_value() - value)
            for gradient, value, variable in zip(gradients, pulled, variables, strict=True)
        ]

    def _strength(self, gradient: tf.Tensor, variable: keras.Variable) -> float | tf.Tensor:
        """The lambda of the paper."""
        options = self.config.algorithm
        decay = options.mean_square_decay
        if decay is None:
            return options.strength
        if id(variable) not in self._mean_squares:
            with tf.init_scope(), tf.device(variable.value.device):
                zeros = tf.zeros(variable.shape, variable.dtype)
                self._mean_squares[id(variable)] = tf.Variable(zeros, trainable=False)
        mean_square = self._mean_squares[id(variable)]
        now = decay * mean_square.read_value() + (1 - decay) * gradient * gradient
        mean_square.assign(now)
        return options.strength * tf.math.rsqrt(now + EPSILON)


def algorithm_of(config: RunConfig) -> Algorithm:
    """The algorithm that the option names."""
    algorithm: Algorithm = pkgutil.resolve_name(ALGORITHMS[config.algorithm.kind].implementation)(config)
    return algorithm
