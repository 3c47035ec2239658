"""What oneDNN keeps from step to step, as tasks of a run have it, changes no result."""

import os
import platform
import subprocess
import sys

import pytest

from tf2dist.launch.launcher import KEPT_PRIMITIVES
from tf2dist.tf_constants import ONEDNN

# Convolutions that differ in one thing alone, and batches of several sizes.
TRAINING = """
import hashlib
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
layers = keras.layers
kinds = [{}, {}, {"strides": 2}, {"dilation_rate": 2}, {"groups": 2}, {"kernel_size": 1}, {"padding": "valid"}, {}]
x = inputs = keras.Input([16, 16, 3])
for kind in kinds:
    x = layers.Conv2D(8, activation="relu", **{"kernel_size": 3, "padding": "same", **kind})(x)
x = layers.SeparableConv2D(8, 3, padding="same")(layers.DepthwiseConv2D(3, padding="same")(x))
x = layers.BatchNormalization()(layers.Conv2DTranspose(8, 3, strides=2)(x))
model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
loss, optimizer = keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.SGD(0.1)

@tf.function(reduce_retracing=True)
def step(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

random = np.random.default_rng(0)
for size in [16, 16, 7, 16, 1, 7, 16]:
    images = random.normal(size=(size, 16, 16, 3)).astype(np.float32)
    step(tf.constant(images), tf.constant(random.integers(0, 10, size)))
print(hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in model.get_weights())).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="TensorFlow computes with oneDNN by choice on x86 alone")
def test_weights_are_the_same_to_the_bit() -> None:
    name, value = KEPT_PRIMITIVES
    found = []
    for setting in ("1", value):
        environment = os.environ | {name: setting, ONEDNN: "1", "KERAS_BACKEND": "tensorflow"}
        done = subprocess.run(
            [sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split()[-1])
    assert found[0] == found[1]
