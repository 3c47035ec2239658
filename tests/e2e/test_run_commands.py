"""The commands for finished runs, export, predict and evaluate, as a user types them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.conftest import Command, Finished, slowness
from tf2dist import data, evaluate, export
from tf2dist.config.schema import DataConfig
from tf2dist.errors import ConfigError, DataError, InstallationError, RequestError
from tf2dist.tools.finished import predict_command as predict

# A plugin with a layer of the user's own, tabular data, and a loss without classes.
PLUGIN = """
import keras
import numpy as np

import tf2dist
from tf2dist.data import Arrays, Splits


class Half(keras.layers.Layer):
    def call(self, inputs):
        return inputs / 2


@tf2dist.register_data("table")
def table(config, size=300):
    x = np.random.default_rng(0).normal(size=(size, 4)).astype(np.float32)
    arrays = Arrays(x, x.sum(axis=1, keepdims=True))
    return Splits(arrays, None, arrays, num_classes=None)


@tf2dist.register_model("table")
def model(input_shape, num_classes):
    model = keras.Sequential([keras.Input(input_shape), Half(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with a model of this package."""
    command = Command(tmp_path_factory.mktemp("digits"))
    finished = command("mode=sync", "cluster=local1", "data=digits", "model=softmax", "train.steps=200")
    assert finished.code == 0, finished
    return finished.run_dir


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with the model and data of the plugin."""
    command = Command(tmp_path_factory.mktemp("table"))
    (command.folder / "mine.py").write_text(PLUGIN)
    options = ["plugins=[mine.py]", "data=table", "model=table", "train.steps=50"]
    finished = command("mode=async", "cluster=local1", *options)
    assert finished.code == 0, finished
    return finished.run_dir


@pytest.fixture(scope="module")
def test_set() -> data.Arrays:
    arrays = data.load(DataConfig(name="digits", num_validation=180)).test
    assert arrays is not None
    return arrays


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def typed(module: str, *arguments: str | Path, folder: Path) -> Finished:
    """``python -m tf2dist.MODULE ...`` as a user types it."""
    command = [sys.executable, "-m", f"tf2dist.{module}", *map(str, arguments)]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120 * slowness())
    return Finished(completed.returncode, completed.stdout, completed.stderr, folder)


# Export.

ALONE = """
import sys
import numpy as np
import tensorflow as tf

folder, examples, outputs = sys.argv[1:]
model = tf.saved_model.load(folder)
np.save(outputs, model.serve(tf.constant(np.load(examples), tf.float32)).numpy())
assert "tf2dist" not in sys.modules
"""


@pytest.mark.slow
def test_a_saved_model_gives_the_outputs_of_the_trained_one(
    digits: Path, test_set: data.Arrays, tmp_path: Path
) -> None:
    finished = typed("export", digits, tmp_path / "out", folder=tmp_path)
    told = f"export: loading the model of {digits}\n"
    assert (finished.code, finished.stdout, finished.stderr) == (0, f"{tmp_path / 'out'}\n", told)
    np.save(tmp_path / "x.npy", test_set.x)
    command = [sys.executable, "-c", ALONE, *(str(tmp_path / name) for name in ("out", "x.npy", "y.npy"))]
    subprocess.run(command, check=True, timeout=120 * slowness(), capture_output=True)
    outputs = np.load(tmp_path / "y.npy")
    expected = tf2dist.load_model(digits).predict(test_set.x, verbose=0)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    assert np.mean(outputs.argmax(axis=1) == test_set.y) == pytest.approx(summary_of(digits)["test_accuracy"])


def test_the_default_path_and_the_weights_of_a_step(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export.run([str(digits), "step=200"])
    assert capsys.readouterr().out == f"{digits / 'saved_model'}\n"
    with pytest.raises(ConfigError, match=r"OUT \(.*saved_model\): exists"):
        export.run([str(digits)])
    with pytest.raises(RequestError, match=r"step \(7\): there is no such checkpoint; choose one of 200"):
        export.run([str(digits), "step=7", "format=litert"])


def test_litert(digits: Path, test_set: data.Arrays, tmp_path: Path) -> None:
    (tmp_path / "empty.tflite").touch()
    export.run([str(digits), str(tmp_path / "empty.tflite"), "format=litert"])
    interpreter = pytest.importorskip("ai_edge_litert.interpreter", reason="the extra litert").Interpreter
    runner = interpreter(str(tmp_path / "empty.tflite")).get_signature_runner()
    (name,) = runner.get_input_details()
    (outputs,) = runner(**{name: test_set.x[:5].astype(np.float32)}).values()
    expected = tf2dist.load_model(digits).predict(test_set.x[:5], verbose=0)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)


def test_onnx(digits: Path, test_set: data.Arrays, tmp_path: Path) -> None:
    pytest.importorskip("tf2onnx", reason="the extra onnx")
    runtime = pytest.importorskip("onnxruntime")
    export.run([str(digits), str(tmp_path / "m.onnx"), "format=onnx"])
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    (outputs,) = session.run(None, {session.get_inputs()[0].name: test_set.x[:5].astype(np.float32)})
    expected = tf2dist.load_model(digits).predict(test_set.x[:5], verbose=0)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)


def test_a_missing_extra_is_refused_in_one_line(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InstallationError, match=r"format \(onnx\): needs tf2onnx, .*; pip install '\.\[onnx\]'"):
        export.run([str(digits), str(tmp_path / "out"), "format=onnx"])


def test_a_failed_export_leaves_nothing_behind(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(model: Any, path: Path, **_: Any) -> None:
        path.mkdir()
        (path / "half").write_text("half")
        raise ValueError("a layer that no converter knows")

    monkeypatch.setattr("keras.Model.export", half)
    with pytest.raises(Exception, match=r"format \(saved_model\): the model cannot be exported \(ValueError: a layer"):
        export.run([str(digits), str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


# Predict.


def test_images_and_arrays_in_many_formats(
    digits: Path, test_set: data.Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A digit has the same class in grey and small as in colour and larger; an array has a line for each example."""
    first = test_set.x[0]
    large = tf.cast(tf.repeat(tf.image.resize(first, [84, 112], "nearest"), 3, -1), tf.uint8)
    (tmp_path / "small.png").write_bytes(tf.io.encode_png(first).numpy())
    (tmp_path / "large.png").write_bytes(tf.io.encode_png(large).numpy())
    (tmp_path / "large.jpg").write_bytes(tf.io.encode_jpeg(large, quality=100).numpy())
    np.save(tmp_path / "one.npy", first[..., 0])
    np.save(tmp_path / "two.npy", test_set.x[:2])
    files = [str(tmp_path / name) for name in ("small.png", "large.png", "large.jpg", "one.npy", "two.npy")]
    predict.run([str(digits), *files])
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in lines] == [*files[:4], f"{files[4]}[0]", f"{files[4]}[1]"]
    assert {line[0] for line in lines[:5]} == {str(test_set.y[0])}
    exact = {lines[number][1] for number in (0, 3, 4)}
    assert len(exact) == 1, "files that need no conversion give equal probabilities"
    assert float(exact.pop()) > 0.5


def test_predictions_of_the_test_set_are_printed_and_drawn(digits: Path, tmp_path: Path) -> None:
    finished = typed("predict", digits, folder=tmp_path)
    assert (finished.code, finished.stderr) == (0, f"predict: loading the model of {digits}\n"), finished
    first, _, *rows, confusion, predictions = finished.stdout.splitlines()
    accuracy = summary_of(digits)["test_accuracy"]
    assert first == f"accuracy {accuracy:.4f} over 360 examples"
    counts = np.array([[int(word.replace(",", "")) for word in row.split()[1:]] for row in rows])
    assert counts.shape == (10, 10)
    assert counts.sum() == 360
    assert counts.trace() / 360 == pytest.approx(accuracy)
    for line, name in ((confusion, "confusion.png"), (predictions, "predictions.png")):
        assert line == str(digits / name)
        height, width, _ = tf.io.decode_png((digits / name).read_bytes()).shape
        assert height > 500
        assert width > 500


@pytest.mark.thorough
def test_a_reader_that_leaves_is_no_error(digits: Path, test_set: data.Arrays, tmp_path: Path) -> None:
    np.save(tmp_path / "many.npy", np.repeat(test_set.x, 30, axis=0))
    command = f"{sys.executable} -m tf2dist.predict {digits} {tmp_path}/many.npy | head -n 1; echo ${{PIPESTATUS[0]}}"
    completed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120 * slowness())
    assert completed.stderr == f"predict: loading the model of {digits}\n"
    assert completed.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"no image", "is no image that can be decoded"),
        (np.zeros((3, 5)), "is float64 [3, 5], but the model takes numbers [n, 28, 28, 1]"),
        (np.array([{}]), "is no numpy array"),
        ({"first": np.zeros(3)}, "is no numpy array (it holds several arrays)"),
    ],
)
def test_unusable_files_are_refused(digits: Path, tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / ("it.npy" if isinstance(content, np.ndarray | dict) else "it.png")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        with open(path, "wb") as file:
            np.savez(file, **content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(DataError, match=re.escape(words)):
        predict.run([str(digits), str(path)])


# Evaluate.


def test_evaluating_the_run_s_own_data_gives_its_summary(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """test_old_runs.py has the command."""
    evaluate.run([str(digits)])
    printed = capsys.readouterr()
    assert printed.err == f"evaluate: loading the model of {digits}\n"
    *metrics, last = printed.out.splitlines()
    summary = summary_of(digits)
    assert [line.split()[0] for line in metrics] == ["loss", "accuracy"]
    for line in metrics:
        name, value = line.split()
        assert float(value) == pytest.approx(summary[f"test_{name}"], rel=1e-4)
    assert last == "360 examples of digits, test"


def test_another_data_set_and_another_split(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate.run([str(digits), "data=digits", "data.num_validation=50", "split=validation"])
    assert capsys.readouterr().out.splitlines()[-1] == "50 examples of digits, validation"
    with pytest.raises(DataError, match=r"split \(validation\): data=digits has none"):
        evaluate.run([str(digits), "data=digits", "data.num_validation=0", "split=validation"])


# Code of the user's own.


def test_a_run_s_own_code_is_executed_only_if_it_is_named(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With plugins= the commands work, here on a model that is no classifier."""
    plugin = table.parent / "mine.py"
    for command in (export, predict, evaluate):
        words = rf"plugins: .* needs the class Half, .*; give plugins=\[{plugin}\]"
        with pytest.raises(ConfigError, match=words):
            command.run([str(table)])
    evaluate.run([str(table), f"plugins=[{plugin}]"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:-1]] == ["loss", "mae"]
    assert float(printed[0].split()[1]) == pytest.approx(summary_of(table)["test_loss"], rel=1e-4)
    assert printed[-1] == "300 examples of table, test"
    predict.run([str(table), f"plugins={plugin}", "data=table", "+data.size=4"])
    printed = capsys.readouterr().out.splitlines()
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    assert [float(line.split("\t")[0]) for line in printed] == pytest.approx(x.sum(axis=1), abs=0.5)
    assert printed[3].endswith("\ttable[3]")
