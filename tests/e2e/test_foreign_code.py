"""User code that does what it may: TensorFlow and processes of its own, wherever a plugin runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Command

PLUGIN = """
import multiprocessing

import keras
import numpy as np
import tensorflow as tf

import tf2dist
from tf2dist.data import Arrays, Splits

TWO = tf.constant(1.0) * 2.0
TABLE = tf.Variable(tf.range(10))


def part(seed):
    labels = np.random.default_rng(seed).integers(0, 10, 300)
    images = np.zeros((300, 8, 8, 1), np.uint8)
    images[np.arange(300), labels % 8, labels // 8] = 255
    return images, labels


def parts(seeds):
    with multiprocessing.get_context("fork").Pool(2) as pool:  # whose end is a SIGTERM to its processes
        return pool.map(part, seeds)


assert len(parts([1, 2, 3])) == 3


@tf2dist.register_data("busy")
def busy(config):
    train, *others = (Arrays(tf.image.resize(images, [16, 16], "nearest").numpy(), tf.gather(TABLE, labels).numpy())
                      for images, labels in parts(range(3)))
    blocks = tf.data.Dataset.from_tensor_slices(train.x).map(tf.identity).batch(100).as_numpy_iterator()
    return Splits(Arrays(np.concatenate(list(blocks)), train.y), *others)


@keras.saving.register_keras_serializable()
class Double(keras.layers.Layer):
    def call(self, inputs):
        return inputs * TWO


@tf2dist.register_model("busy")
def model(input_shape, num_classes):
    layers = keras.layers
    scaled = [keras.Input(input_shape), layers.Rescaling(1 / 255)]
    return keras.Sequential([*scaled, Double(), layers.Flatten(), layers.Dense(num_classes)])
"""


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_plugin_uses_tensorflow_and_processes(command: Command, tmp_path: Path, mode: str) -> None:
    (tmp_path / "busy.py").write_text(PLUGIN)
    options = ["cluster=local2", "plugins=[busy.py]", "data=busy", "model=busy", "optimizer=adam"]
    env = {"grpc_proxy": "http://127.0.0.1:9"}  # gRPC asks it for the way to the next process, if it may
    finished = command(f"mode={mode}", *options, "optimizer.learning_rate=0.01", "train.steps=60", env=env)
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == 60
    assert summary["test_accuracy"] > 0.5, "the constant reached the model"
    assert not list(tmp_path.rglob("__pycache__")), "nothing is left beside the user's file"


@pytest.mark.slow
def test_the_first_synchronous_run_decodes_mnist(command: Command, tmp_path: Path, real_data: str) -> None:
    if real_data != "mnist":
        pytest.skip("no MNIST on this machine")
    cache = tmp_path / "cache"
    options = ["mode=sync", "cluster=local2", "model=softmax", "train.steps=10"]
    finished = command(*options, env={"XDG_CACHE_HOME": str(cache)})
    assert finished.code == 0, finished
    assert len(list(cache.rglob("images.npy"))) == 2
