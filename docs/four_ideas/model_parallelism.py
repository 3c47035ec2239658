"""Model parallelism: the layers of one model lie, and are computed, on two workers."""

import keras
import numpy as np
import tensorflow as tf

from tf2dist.testing import start_ps_cluster

strategy = start_ps_cluster(num_workers=2).strategy  # connects this program to it
WORKERS = [f"/job:worker/replica:0/task:{index}/device:CPU:0" for index in (0, 1)]
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True))


def build():
    """The same weights wherever the layers are built."""
    keras.utils.set_random_seed(1)
    return keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)


hidden, output = build()
with tf.GradientTape() as first, tf.device(WORKERS[0]):
    activations = hidden(x)  # hidden's variables are created here as well
with tf.GradientTape() as second, tf.device(WORKERS[1]):
    second.watch(activations)  # fetched from worker 0
    loss = tf.reduce_mean((output(activations) - y) ** 2)
with tf.device(WORKERS[1]):
    *of_output, back = second.gradient(loss, [*output.trainable_variables, activations])
with tf.device(WORKERS[0]):
    of_hidden = first.gradient(activations, hidden.trainable_variables, back)

hidden, output = build()  # now all of it in this process
with tf.GradientTape() as tape:
    loss_here = tf.reduce_mean((output(hidden(x)) - y) ** 2)
here = tape.gradient(loss_here, hidden.trainable_variables + output.trainable_variables)

print("hidden layer, and its gradients:", {t.device for t in [activations, *of_hidden]})
print("output layer, and its gradients:", {t.device for t in [loss, *of_output]})
pairs = zip(of_hidden + of_output, here, strict=True)
largest = max(np.abs(a.numpy() - b.numpy()).max() for a, b in pairs)
print("the gradients are those of one process:", largest < 1e-6)
