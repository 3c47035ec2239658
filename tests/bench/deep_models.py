"""Models of hundreds of variables on MNIST, padded to 32x32 and repeated in three colours; a plugin.

As a program, ``python -m tests.bench.deep_models NAME ARRAYS``, it trains one by plain Keras and prints the time of
the first step.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tf2dist
from tests.bench.workload import DEEP_BATCH_SIZE, LEARNING_RATE

BUILDERS: dict[str, Callable[..., keras.Model]] = {
    "mobilenet": lambda **options: keras.applications.MobileNetV2(alpha=0.35, **options),  # 158 trainable variables
    "resnet50": lambda **options: keras.applications.ResNet50(**options),  # 214, of 23 million parameters
}


def deep_model(name: str, num_classes: int) -> keras.Model:
    """A model of `BUILDERS` for images [28, 28, 1]; it returns logits."""
    layers = keras.layers
    inputs = keras.Input((28, 28, 1))
    padded = layers.ZeroPadding2D(2)(layers.Rescaling(1 / 127.5, -1)(inputs))
    options = {"input_shape": (32, 32, 3), "weights": None, "classes": num_classes, "classifier_activation": None}
    return keras.Model(inputs, BUILDERS[name](**options)(layers.Concatenate()([padded] * 3)))


@tf2dist.register_model("mobilenet")
def mobilenet(input_shape: Any, num_classes: int) -> keras.Model:
    return deep_model("mobilenet", num_classes)


@tf2dist.register_model("resnet50")
def resnet50(input_shape: Any, num_classes: int) -> keras.Model:
    return deep_model("resnet50", num_classes)


def main() -> None:
    name, arrays = sys.argv[1:]

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == 0:
                print(json.dumps({"first_step_at": time.time()}), flush=True)

    model = deep_model(name, num_classes=10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss, metrics=["accuracy"])
    few = slice(2 * DEEP_BATCH_SIZE)
    images, labels = np.load(f"{arrays}/images.npy", mmap_mode="r"), np.load(f"{arrays}/labels.npy", mmap_mode="r")
    model.fit(images[few], labels[few], batch_size=DEEP_BATCH_SIZE, verbose=0, callbacks=[Watch()])


if __name__ == "__main__":
    main()
