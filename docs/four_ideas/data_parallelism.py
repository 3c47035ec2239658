"""Data parallelism: every worker computes the gradient for its part of the batch."""

import numpy as np
import tensorflow as tf

from tf2dist.testing import start_ps_cluster

cluster = start_ps_cluster(num_workers=2)
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
y = x @ np.float32([[1], [2], [3]])
parts = [(x[:32], y[:32]), (x[32:], y[32:])]
with cluster.strategy.scope():  # variables on the ps
    weights, updates = tf.Variable(tf.zeros([3, 1])), tf.Variable(0)


@tf.function
def gradient(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ weights - y) ** 2)
    return tape.gradient(loss, weights)


@tf.function
def step(x, y):
    weights.assign_sub(0.1 * gradient(x, y))
    updates.assign_add(1)


# Synchronously: wait for all parts, and apply their mean.
pushed = [cluster.coordinator.schedule(gradient, args=part) for part in parts]
cluster.coordinator.join()
mean = (pushed[0].fetch() + pushed[1].fetch()) / 2
same = np.allclose(mean, gradient(x, y), atol=1e-6)
print("the mean of the parts is the gradient of the whole batch:", same)

# Asynchronously: a worker that is free takes the next step and changes the weights.
for _ in range(100):
    for part in parts:
        cluster.coordinator.schedule(step, args=part)
cluster.coordinator.join()
print(updates.numpy(), "updates applied; weights", weights.numpy().ravel().round(3))
print("on", weights.device)
