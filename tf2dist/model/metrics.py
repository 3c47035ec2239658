"""The metrics of a compiled model as sums, which workers can add up.

A Keras metric keeps sums over the examples in its variables. A worker begins every step with zeros in them, so after
the update they hold what the step has added. The sums over all workers, given back to the metric, yield its result
over all examples, whichever worker has seen them.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.process.tf_internals import loss_tracker_of, output_trackers_of

Results = dict[str, float]


class Metrics:
    """The metrics of a model, all of them built.

    Attributes:
        loss_tracker: the metric of the loss.
        variables: of all metrics, in the order of the sums.
        size: how many numbers they hold.
        place_of_loss: of the sum of the losses among these numbers.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.loss_tracker = loss_tracker_of(model)
        self.variables: list[keras.Variable] = list(model.metrics_variables)
        self._sizes = [int(np.prod(v.shape)) for v in self.variables]
        self.size = sum(self._sizes)
        places = np.cumsum([0, *self._sizes])
        total = self.loss_tracker.variables[0]
        self.place_of_loss = int(next(p for v, p in zip(self.variables, places, strict=False) if v is total))
        # Keras averages the losses of single outputs over batches, whatever their sizes, instead of over examples.
        self._of_batches = {id(v) for tracker in output_trackers_of(model) for v in tracker.variables}

    def zeros(self) -> list[tf.Tensor]:
        """What the variables hold before the first example."""
        return [tf.zeros(v.shape, v.dtype) for v in self.variables]

    def changes(self, scope: keras.StatelessScope, share: tf.Tensor | None = None) -> list[tf.Tensor]:
        """What has been added in a scope that began with `zeros`: float32 vectors of `size` numbers together.

        Args:
            share: the part of the whole step's batch that was seen here; None if it was all of it.
        """
        parts = []
        for variable in self.variables:
            change = tf.reshape(tf.cast(scope.get_current_value(variable), tf.float32), [-1])
            # All workers together count one batch in each step, of which this one has its share.
            parts.append(change if share is None or id(variable) not in self._of_batches else change * share)
        return parts

    def results(self, totals: np.ndarray) -> Results:
        """The metrics by name, the loss among them, in the order of the names, which is that of Keras' History.

        Args:
            totals: the sums over some examples, [size]. Zeros, for none, give what the metric makes of them: often NaN.
        """
        parts = np.split(totals, np.cumsum(self._sizes)[:-1])
        mapping = [
            (v, tf.constant(part.reshape(v.shape), v.dtype)) for v, part in zip(self.variables, parts, strict=True)
        ]
        # The metric computes its result from these values; its own variables stay as they are.
        with keras.StatelessScope(mapping):
            results = self._model.get_metrics_result()
        return {name: _plain(value) for name, value in sorted(results.items())}


def _plain(value: Any) -> Any:
    """A number, or a list of the numbers of a metric that gives several."""
    array = keras.ops.convert_to_numpy(value)
    return float(array) if array.ndim == 0 else array.tolist()
