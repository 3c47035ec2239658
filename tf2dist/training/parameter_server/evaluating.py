"""The evaluation of a split by workers that have published it, a range at a time."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.model.evaluate import Evaluation, chunks
from tf2dist.model.metrics import Metrics
from tf2dist.process import heartbeat
from tf2dist.training.loop import PauseRequests
from tf2dist.training.parameter_server.calls import results
from tf2dist.training.parameter_server.examples import EVALUATED


def evaluate_split(
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    function: Any,
    metrics: Metrics,
    split: str,
    size: int,
    at_once: int,
    pause_request: PauseRequests,
    quiet_secs: float,
) -> Evaluation:
    """Evaluates a split in ranges; each worker that is free takes the next one.

    Args:
        function: see `AsyncStep.evaluate_function`.
        size: of the split, in examples.
        at_once: the examples of a range.
        quiet_secs: see `calls.Patience`.

    Raises:
        WorkersAway: a stop is requested, and the evaluation cannot be finished.
    """
    number = tf.constant(EVALUATED.index(split))
    ranges = [(number, tf.constant(first), tf.constant(last)) for first, last in chunks(size, at_once)]
    sums = [coordinator.schedule(function, args=each) for each in ranges]
    total = np.zeros(1 + metrics.size)
    for part in results(coordinator, sums, pause_request, quiet_secs):
        total += part
        heartbeat.progress()
    return Evaluation.of_sums(metrics, total, size)
