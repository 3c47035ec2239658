"""In-graph replication: one client builds one graph with a tower for each worker."""

import numpy as np
import tensorflow as tf

from tf2dist.testing import start_ps_cluster

strategy = start_ps_cluster(num_workers=2).strategy  # this program is the only client
TASKS = ("ps/task:0", "worker/task:0", "worker/task:1")
PS, *WORKERS = (f"/job:{task}/device:CPU:0" for task in TASKS)
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
y = x @ np.float32([[1], [2], [3]])
with tf.device(PS):
    weights = tf.Variable(tf.zeros([3, 1]))


def gradient_of(weights, x, y):
    """Of the mean squared error."""
    return tf.matmul(x, x @ weights - y, transpose_a=True) * (2 / len(x))


@tf.function
def step(x, y):
    towers, parts = [], zip(WORKERS, tf.split(x, 2), tf.split(y, 2), strict=True)
    for worker, x_part, y_part in parts:
        with tf.device(worker):
            towers.append(gradient_of(weights, x_part, y_part))
    with tf.device(PS):
        weights.assign_sub(0.1 * tf.add_n(towers) / 2)
    return towers


here = np.zeros([3, 1], "float32")  # one process, with the whole batch
for _ in range(100):
    towers = step(x, y)
    here -= 0.1 * gradient_of(here, x, y).numpy()

print("towers on", *(tower.device for tower in towers), sep="\n  ")
operations = step.get_concrete_function(x, y).graph.get_operations()
devices = {operation.device for operation in operations} - {""}
print("in the one graph:", *sorted(devices), sep="\n  ")
same = np.allclose(weights, here, atol=1e-6)
print("weights", weights.numpy().ravel().round(3), "as in one process:", same)
