"""The metrics of a compiled model as sums, which workers can add up.

A Keras metric keeps sums over the examples in its variables. A worker begins every step with zeros in them, so after
the update they hold what the step has added. The sums over all workers, given back to the metric, yield its result
over all examples, whichever worker has seen them.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.model.scopes import inlining
from tf2dist.tf_internals.keras import loss_tracker_of, output_trackers_of

Results = dict[str, float]


class Metrics:
    """The metrics of a model, all of them built.

    Attributes:
        loss_tracker: the metric of the loss.
        variables: of all metrics, in the order of the sums.
        size: how many numbers they hold.

    Args:
        hides_outputs: whether the losses of single outputs are left out of the results.
    """

    def __init__(self, model: keras.Model, *, hides_outputs: bool = False) -> None:
        self._model = model
        self.loss_tracker = loss_tracker_of(model)
        # A model's own `metrics` may leave out that of the loss, which a step updates all the same.
        variables = [*model.metrics_variables, *self.loss_tracker.variables]
        self.variables: list[keras.Variable] = list({id(v): v for v in variables}.values())
        self._sizes = [int(np.prod(v.shape)) for v in self.variables]
        self.size = sum(self._sizes)
        # Keras averages the losses of single outputs over batches, whatever their sizes, instead of over examples.
        trackers = output_trackers_of(model)
        self._of_batches = {id(v) for tracker in trackers for v in tracker.variables}
        self._hidden = {tracker.name for tracker in trackers if hides_outputs}

    @property
    def place_of_loss(self) -> int:
        """The place of the sum of the losses among these numbers."""
        total, places = self.loss_tracker.variables[0], np.cumsum([0, *self._sizes])
        return int(next(p for v, p in zip(self.variables, places, strict=False) if v is total))

    def zeros(self) -> list[tf.Tensor]:
        """The values of the variables before the first example."""
        return [tf.zeros(v.shape, v.dtype) for v in self.variables]

    def changes(self, scope: keras.StatelessScope, share: tf.Tensor | None = None) -> list[tf.Tensor]:
        """The changes in a scope that began with `zeros`: float32 vectors of `size` numbers together.

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
        """The metrics by name, the loss among them, in the order of Keras' History.

        Args:
            totals: the sums over some examples, [size]. Zeros, for none, give what the metric makes of them: often NaN.
        """
        with self._holding(totals), inlining():
            results = flat(self._model.get_metrics_result())
            # A result may be a variable, which has the sums only here.
            return {name: _plain(value) for name, value in results.items() if name not in self._hidden}

    def _holding(self, totals: np.ndarray) -> keras.StatelessScope:
        """A scope in which the metrics compute their results from these sums; their own variables stay as they are."""
        parts = np.split(totals, np.cumsum(self._sizes))[:-1]
        return keras.StatelessScope(
            [(v, tf.constant(part.reshape(v.shape), v.dtype)) for v, part in zip(self.variables, parts, strict=True)]
        )


class LoggedMetrics(Metrics):
    """Results of a step of the model's own: those of metrics, and numbers, of which the mean is taken.

    Args:
        logged: for each name that the step returns: the metric whose result it is, and the name of it if the metric
            has several results; None for a number.
        of_batches: the ids of those variables of metrics to which every batch adds alike, whatever its size.
    """

    def __init__(
        self, model: keras.Model, logged: dict[str, tuple[keras.metrics.Metric, str] | None], of_batches: set[int]
    ) -> None:
        super().__init__(model)
        self._logged = logged
        self.numbers = [name for name, source in logged.items() if source is None]
        self._of_batches |= of_batches
        self._num_sums = self.size
        if self.numbers:
            self.size += len(self.numbers) + 1  # and of how many batches these are

    def changes_by(self, logs: dict[str, Any], share: tf.Tensor | None = None) -> list[tf.Tensor]:
        """The numbers that `logs` add to the sums, after `changes`; `share`: as there."""
        if not self.numbers:
            return []
        numbers = tf.stack([*(tf.cast(logs[name], tf.float32) for name in self.numbers), tf.ones([])])
        return [numbers if share is None else numbers * share]

    def results(self, totals: np.ndarray) -> Results:
        sums, numbers = np.split(totals, [self._num_sums])
        with np.errstate(invalid="ignore"):  # 0 / 0 before the first batch
            means = dict(zip(self.numbers, numbers[:-1] / numbers[-1:], strict=True))
        results: Results = {}
        with self._holding(sums), inlining():
            for name, source in self._logged.items():
                if source:
                    metric, part = source
                    result = metric.result()
                    results[name] = _plain(flat(result)[part] if part else result)
                else:
                    results[name] = float(means[name])
        return results


def flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Results by name, with those in dicts in the place of the dicts, in the order in which Keras logs them."""
    values: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        values.update(flat(value) if isinstance(value, dict) else {name: value})
    return values


def scalars_of(results: Results) -> Results:
    """The metrics that are a single number; Keras has some that are several."""
    return {name: value for name, value in results.items() if isinstance(value, float)}


def _plain(value: Any) -> Any:
    """A number, or a list of the numbers of a metric that gives several."""
    array = keras.ops.convert_to_numpy(value)
    return float(array) if array.ndim == 0 else array.tolist()
