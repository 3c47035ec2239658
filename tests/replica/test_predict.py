"""What `tf2dist.predict` refuses before anything is started, and the files of its ranges."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.conftest import leave_free
from tf2dist.errors import TrainingError
from tf2dist.fitting.ranges import RangeCallback, Ranges, predict_part, range_size, rows_of
from tf2dist.launch import single_run

X = np.arange(120.0).reshape(40, 3)
Make = Callable[[], Any]


def model(*layers: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input([3]), *(layers or [keras.layers.Dense(1)])])


def stateful() -> keras.Model:
    return keras.Sequential([keras.Input(batch_shape=[4, 3, 1]), keras.layers.LSTM(2, stateful=True)])


class Noise(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed_generator)


class Counter(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.calls = tf.Variable(0)

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1)
        return inputs


def words() -> keras.Model:
    return keras.Sequential([
        keras.Input([3], dtype="int32"),
        keras.layers.StringLookup(vocabulary=["a", "b"], invert=True),
    ])  # fmt: skip


class Unbuilt(keras.Model):
    pass


# The model, the other arguments, and what is said.
REFUSED: dict[str, tuple[Make, dict[str, Any], str]] = {
    "no examples": (model, {"x": X[:0]}, "x: has no examples"),
    "no x": (model, {"x": None}, "x: is None"),
    "different lengths": (model, {"x": {"a": X, "b": X[1:]}}, "x: the arrays must have the same number of examples"),
    "a generator": (model, {"x": (row for row in X)}, "x: is a generator, whose batches are made in this process"),
    "a function": (model, {"x": print}, "x: is a function; give arrays"),
    "x of another shape": (model, {"x": X[:, :2]}, "or its predict_step fails (Input 0 with name"),
    "batch_size": (model, {"batch_size": 0}, "batch_size (0): must be a whole number"),
    "verbose": (model, {"verbose": 3}, "verbose (3): must be"),
    "cluster": (model, {"cluster": "local"}, "cluster: is a str; give tf2dist.Local"),
    "no such option": (model, {"options": {"wacthdog_secs": 9}}, "wacthdog_secs means nothing in a prediction"),
    "an option of training": (model, {"options": ["checkpoint.keep=1"]}, "checkpoint.keep means nothing in a predict"),
    "an option of steps": (model, {"options": {"cluster.all_reduce": "nccl"}}, "cluster.all_reduce means nothing"),
    "a wrong value": (model, {"options": {"watchdog_secs": -1}}, "watchdog_secs (-1"),
    "no model": (
        lambda: 5,
        {},
        "model: is an int; give a keras.Model with its weights, a function",
    ),
    "a function of nothing": (lambda: lambda: None, {}, "model: is None; give a keras.Model"),
    "no weights": (Unbuilt, {}, "has no weights yet; train it, load them, or give the directory of a run"),
    "no run": (lambda: "nowhere", {}, "run_dir (nowhere): there is no such folder"),
    "a stateful layer": (stateful, {"x": np.ones([8, 3, 1])}, "its prediction changes the states of a layer, so a"),
    "a random layer": (lambda: model(Noise()), {}, "seed_generator_state, so a batch depends on those before it"),
    "a variable of TensorFlow": (lambda: model(Counter()), {}, "its prediction changes the states of a layer, so"),
    "text": (words, {"x": np.ones([4, 3], int)}, "its prediction gives text, and must give dense numbers"),
}


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(single_run, "run_host", lambda *args: pytest.fail("a wrong call is run"))
    return tmp_path


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_call_is_refused(what: str, nothing_starts: Path) -> None:
    make, arguments, words = REFUSED[what]
    with pytest.raises(tf2dist.ConfigError) as told:
        tf2dist.predict(make(), **{"x": X, **arguments})
    assert words in str(told.value)
    assert len(str(told.value).splitlines()) == 1
    assert list(nothing_starts.iterdir()) == []


def test_a_run_without_a_model_is_refused(nothing_starts: Path) -> None:
    with pytest.raises(tf2dist.CheckpointError, match=r"holds neither model.keras nor a checkpoint"):
        tf2dist.predict(nothing_starts, X)


@pytest.mark.parametrize(
    ("job", "said"),
    [("ps", "TF_CONFIG: job ps: a prediction has workers alone"), ("evaluator", "takes no part in a prediction")],
)
def test_who_has_no_part_is_refused(job: str, said: str, nothing_starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["a:1"], job: ["b:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}}))
    with pytest.raises(tf2dist.ConfigError, match=said):
        tf2dist.predict(model(), X, run_dir="run")


def test_hosts_need_a_directory(nothing_starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": task}))
    with pytest.raises(tf2dist.ConfigError, match=r"run_dir \(None\): must be given on many hosts"):
        tf2dist.predict(model(), X)


def begin(net: Any, x: Any, **arguments: Any) -> None:
    """Makes the call up to where its processes would be started."""
    with pytest.raises(pytest.fail.Exception, match="a wrong call is run"):
        tf2dist.predict(net, x, run_dir="run", verbose=0, **arguments)


def test_a_directory_belongs_to_one_model_and_one_data_set(nothing_starts: Path) -> None:
    net = model()
    begin(net, X)
    # The same weights under other names, as of a script that is run again in a notebook, and another cluster.
    again = model(keras.layers.Dense(1, name="dense_77"))
    again.set_weights(net.get_weights())
    begin(again, X, cluster=tf2dist.Local(workers=1))
    others: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model(), X, {}, "another model, or other weights"),
        (net, X + 1, {}, "other examples"),
        (net, X[1:], {}, "other examples"),
        (net, X, {"batch_size": 8}, "another batch_size"),
    ]
    for other, x, arguments, said in others:
        with pytest.raises(tf2dist.ConfigError, match=said):
            tf2dist.predict(other, x, run_dir="run", **arguments)


def test_another_activation_is_another_model(nothing_starts: Path) -> None:
    net = model()
    begin(net, X)
    other = model(keras.layers.Dense(1, "relu"))
    other.set_weights(net.get_weights())
    with pytest.raises(tf2dist.ConfigError, match="another model"):
        tf2dist.predict(other, X, run_dir="run")


def test_a_function_builds_another_model_with_the_same_weights(nothing_starts: Path) -> None:
    def build(activation: str | None = None) -> keras.Model:
        # The seed of the first layer is another one in each model, as in each process.
        layers = [keras.layers.RandomFlip("horizontal"), keras.layers.Flatten(), keras.layers.Dense(2, activation)]
        net = keras.Sequential([keras.Input([1, 1, 3]), *layers])
        net.set_weights([np.ones([3, 2]), np.zeros(2)])
        return net

    x = X.reshape(40, 1, 1, 3)
    begin(build, x)
    begin(build, x)
    with pytest.raises(tf2dist.ConfigError, match="another model"):
        tf2dist.predict(lambda: build("softmax"), x, run_dir="run")


def test_a_model_without_a_configuration_is_known_by_its_weights(nothing_starts: Path) -> None:
    class Doubling(keras.Model):  # type: ignore[misc]
        def __init__(self, units: int) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(units, kernel_initializer="ones")

        def call(self, x: Any) -> Any:
            return 2 * self.dense(x)

        def get_config(self) -> Any:
            raise NotImplementedError

    def build(units: int) -> keras.Model:
        net = Doubling(units)
        net(X)
        return net

    begin(lambda: build(2), X)
    begin(lambda: build(2), X)
    with pytest.raises(tf2dist.ConfigError, match="another model"):
        tf2dist.predict(lambda: build(3), X, run_dir="run")


def test_the_directory_of_a_training_is_refused(nothing_starts: Path) -> None:
    (nothing_starts / "run" / "logs").mkdir(parents=True)
    (nothing_starts / "run" / "config.yaml").write_text("mode: sync")
    with pytest.raises(tf2dist.ConfigError, match="is that of a training; name another for the predictions"):
        tf2dist.predict(model(), X, run_dir="run")


@pytest.mark.parametrize("num_examples", [1, 31, 32, 33, 5_000, 3_000_000, 90_000_000])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_ranges_are_whole_batches(num_examples: int, num_workers: int) -> None:
    size = range_size(num_examples, 32, num_workers)
    ranges = Ranges(Path(), num_examples, size)
    assert size % 32 == 0
    assert 1 <= len(ranges) <= 10_000
    assert len(ranges) >= min(16 * num_workers, -(-num_examples // 32)) / 2, "each worker has some"
    parts = [ranges.examples(number) for number in range(len(ranges))]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, num_examples)


def test_every_worker_would_do_all_and_begins_with_its_own() -> None:
    ranges = Ranges(Path(), 100, 10)
    orders = [ranges.order(index, 3) for index in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert [order[:3] for order in orders] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def saved(folder: Path) -> Ranges:
    ranges = Ranges(folder, 25, 10)
    for number in range(3):
        rows = np.arange(25)[ranges.examples(number)]
        ranges.save(number, [rows, np.stack([rows, rows], 1).astype("float32")], "worker-0")
    return ranges


def test_ranges_are_joined_in_order_and_then_removed(tmp_path: Path) -> None:
    ranges = saved(tmp_path)
    assert ranges.is_complete()
    for _ in range(2):
        numbers, pairs = ranges.join()
        assert numbers.tolist() == list(range(25))
        assert (pairs.dtype.name, pairs.shape, pairs[-1].tolist()) == ("float32", (25, 2), [24, 24])
        numbers[0] = 9  # of no effect on the file
    assert [path.name for path in tmp_path.iterdir()] == ["predictions"]
    assert ranges.has(0), "a worker of another host begins nothing again"


def test_a_damaged_or_missing_range_is_named(tmp_path: Path) -> None:
    ranges = saved(tmp_path)
    ranges.path(1).write_bytes(ranges.path(1).read_bytes()[:100])
    with pytest.raises(TrainingError, match=r"000001.npz: cannot be read .*; remove it, and the same call predicts"):
        ranges.join()
    ranges.path(1).unlink()
    assert not ranges.is_complete()
    with pytest.raises(TrainingError, match=r"000001.npz: cannot be read"):
        ranges.join()


def test_a_full_disk(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=1m")
    ranges = Ranges(disk, 25, 10)
    for number in range(3):
        ranges.save(number, [np.ones([ranges.examples(number).stop - 10 * number, 1000], "float32")], "worker-0")
    for free_kb in (0, 4, 8, 64):
        fill = leave_free(disk, free_kb << 10)
        with pytest.raises(
            TrainingError, match=r"predictions: cannot be written \(No space left on device\); make room"
        ):
            ranges.join()
    fill.unlink()
    assert ranges.join()[0].sum() == 25_000


def test_outputs_of_several_shapes_are_refused(tmp_path: Path) -> None:
    ranges = Ranges(tmp_path, 20, 10)
    ranges.save(0, [np.ones([10, 3])], "worker-0")
    ranges.save(1, [np.ones([10, 1])], "worker-1")
    with pytest.raises(tf2dist.ConfigError, match=r"gives outputs of \[3\] and of \[1\]"):
        ranges.join()


def test_an_output_without_a_row_for_each_example_is_refused() -> None:
    assert [len(rows) for rows in rows_of({"a": X, "b": [X]}, 40, "m")] == [40, 40]
    with pytest.raises(tf2dist.ConfigError, match=r"model \(m\): its predict gives 2 rows for 40 examples"):
        rows_of([X, X[:2]], 40, "m")


@pytest.mark.skipif(not hasattr(keras.config, "max_epochs"), reason="Keras has no such limits yet")
def test_a_limit_of_keras_is_that_of_the_whole_prediction(
    nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    keras.config.set_max_steps_per_epoch(2)
    try:
        begin(net, X, batch_size=8)
        assert "Limiting steps_per_epoch to 2" in capsys.readouterr().err
        assert len(net.predict(X, 8, verbose=0)) == 16
        assert len(predict_part(net, X, 8, RangeCallback(Ranges(nothing_starts, 40, 40), 0))) == 40
    finally:
        keras.config.set_max_steps_per_epoch(None)
    with pytest.raises(tf2dist.ConfigError, match="other examples"):
        tf2dist.predict(net, X, 8, run_dir="run")
    begin(net, X[:16], batch_size=8)
