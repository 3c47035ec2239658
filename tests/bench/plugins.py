"""Changes to tf2dist that some comparisons need; named in `plugins=[...]`, so every task applies them.

TF2DIST_BENCH names them: "unmeasured", "sleep", "watched".
"""

import os
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from tests.bench.figures import SLEEP_SECS
from tf2dist.data import pipeline
from tf2dist.training import report
from tf2dist.training.parameter_server.counters import Counters

wanted = os.environ["TF2DIST_BENCH"]


def count_only(self: Counters, indices: tf.Tensor, staleness: tf.Tensor, added: tf.Tensor) -> None:
    """Like `Counters.add`, without staleness, loss, examples and metrics."""
    ones = np.zeros(self.added)
    ones[[0, 2]] = 1  # of all, and of its worker
    self._values.scatter_nd_add(indices, tf.constant(ones))


def sleeping(rows: tf.data.Dataset, take: pipeline.Take) -> tf.data.Dataset:
    """Like `pipeline._taken`; each step sleeps for SLEEP_SECS more, which prefetching does not hide."""
    steps: Any = rows.element_spec[0].shape
    per_element = steps[0] if steps.rank == 2 else 1
    return taken(rows, take).apply(testing.sleep(int(per_element * SLEEP_SECS * 1e6)))


if wanted == "unmeasured":
    Counters.add = count_only  # type: ignore[method-assign]
elif wanted == "sleep":
    taken = pipeline._taken
    pipeline._taken = sleeping
elif wanted == "watched":
    report.WRITE_EVERY_SECS = 0.0  # every look of the coordinator becomes a record
else:
    raise ValueError(f"TF2DIST_BENCH ({wanted}): must be unmeasured, sleep or watched")
