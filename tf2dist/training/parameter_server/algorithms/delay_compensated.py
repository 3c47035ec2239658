"""Asynchronous training in which the gradients of stale updates are corrected.

A gradient was computed at the values of its pull, and is applied to others. The correction estimates the gradient at
the present values, by a Taylor expansion with the diagonal of the outer product of the gradient in place of the
Hessian: S. Zheng, Q. Meng, T. Wang, W. Chen, N. Yu, Z. Ma, T. Liu: Asynchronous Stochastic Gradient Descent with Delay
Compensation, ICML 2017 (DC-ASGD-c, with a constant lambda). There the ps keeps the values that each worker has pulled;
here the worker sends them back with the gradients, twice as many bytes, so that nothing is to be saved or lost with it.
"""

import keras
import tensorflow as tf

from tf2dist.training.parameter_server.algorithms.plain import Algorithm


class DelayCompensated(Algorithm):
    """See `Algorithm`."""

    needs_pulled_values = True
    # Another update between the correction and its use would change the values that the correction is for.
    runs_alone = True

    def why_no_rows(self, optimizer: keras.Optimizer) -> str:
        return "algorithm=delay_compensated compares whole tables"

    def gradients(
        self, gradients: list[tf.Tensor], pulled: list[tf.Tensor], variables: list[keras.Variable]
    ) -> list[tf.Tensor]:
        strength = self.config.algorithm.strength  # the lambda of the paper
        return [
            gradient + strength * gradient * gradient * (tf.convert_to_tensor(variable.value) - value)
            for gradient, value, variable in zip(gradients, pulled, variables, strict=True)
        ]
