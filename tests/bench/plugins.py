"""Changes to tf2dist that some comparisons need; named in `plugins=[...]`, so every task applies them.

TF2DIST_BENCH names them: "unmeasured", "sleep".
"""

import os
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from tests.bench.figures import SLEEP_SECS
from tf2dist import pipeline
from tf2dist.parameter_server import TOTALS, ParameterServer

wanted = os.environ["TF2DIST_BENCH"]


def count_only(self: ParameterServer, footer: tf.Tensor, worker: tf.Tensor, number: tf.Tensor) -> None:
    """Like `ParameterServer._count`, without staleness, loss, accuracy and examples."""
    who = tf.one_hot(worker, self.totals.shape[0], dtype=tf.float64)
    what = tf.one_hot(TOTALS.index("steps"), len(TOTALS), dtype=tf.float64)
    self.totals.assign_add(who[:, None] * what)
    self.applied.assign_add(1)


def sleeping(rows: tf.data.Dataset, images: tf.Tensor, labels: tf.Tensor) -> tf.data.Dataset:
    """Like `pipeline._gathered`; each step's rows take SLEEP_SECS, and no core."""
    steps: Any = rows.element_spec[0].shape
    per_element = steps[0] if steps.rank == 2 else 1
    return gathered(rows.apply(testing.sleep(int(per_element * SLEEP_SECS * 1e6))), images, labels)


if wanted == "unmeasured":
    ParameterServer._count = count_only  # type: ignore[method-assign]
elif wanted == "sleep":
    gathered = pipeline._gathered
    pipeline._gathered = sleeping
else:
    raise ValueError(f"TF2DIST_BENCH ({wanted}): must be unmeasured or sleep")
