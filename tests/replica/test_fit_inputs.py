"""The data that `fit` accepts, compared with what `keras.Model.fit` passes to the model."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import run_config
from tf2dist.data.pipeline import of_arrays
from tf2dist.errors import ConfigError, FitError
from tf2dist.fitting import inputs
from tf2dist.fitting.request import FitArguments, checked, data_of, training_set, validation_set
from tf2dist.tf_internals.keras import fresh_names

pandas = pytest.importorskip("pandas")
N = 12
NUMBERS = np.arange(N * 3).reshape(N, 3)


def seen_by_keras(x: Any, y: Any = None, **weights: Any) -> tuple[Any, Any, Any]:
    """The first batch that reaches `train_step` of `keras.Model.fit`, as numpy."""
    batches = []

    class Model(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            batches.append(keras.tree.map_structure(lambda each: each.numpy(), data, none_is_leaf=False))
            return {"loss": tf.constant(0.0)}

    with fresh_names():
        model = Model()
    model.compile("sgd", run_eagerly=True)
    model.fit(x, y, batch_size=N, shuffle=False, verbose=0, **weights)
    result: tuple[Any, Any, Any] = keras.utils.unpack_x_y_sample_weight(batches[0])
    return result


KINDS: dict[str, Callable[[], Any]] = {
    "float64": lambda: NUMBERS / 7,
    "float16": lambda: (NUMBERS / 7).astype("float16"),
    "float32": lambda: (NUMBERS / 7).astype("float32"),
    "int64": lambda: NUMBERS,
    "uint8": lambda: NUMBERS.astype("uint8"),
    "bool": lambda: NUMBERS % 2 == 0,
    "objects": lambda: np.array(["é", "b c"] * (N // 2), object),
    "tensor": lambda: tf.constant(NUMBERS / 7),
    "tensor of texts": lambda: tf.constant([["é"], ["b c"]] * (N // 2)),
    "keras tensor": lambda: keras.ops.convert_to_tensor(NUMBERS.astype("float32")),
    "table": lambda: pandas.DataFrame(NUMBERS / 7, columns=list("abc")),
    "mixed table": lambda: pandas.DataFrame({"a": NUMBERS[:, 0], "b": NUMBERS[:, 1] / 7}),
    "column": lambda: pandas.Series(NUMBERS[:, 0] / 7),
    "dict": lambda: {"b": NUMBERS / 7, "a": [NUMBERS, NUMBERS[:, 0]]},
    "list": lambda: [NUMBERS / 7, NUMBERS],
    "array of bfloat16": lambda: tf.cast(NUMBERS, tf.bfloat16),
    "other byte order": lambda: [NUMBERS.astype(kind) / 1 for kind in (">f4", ">f8", ">f2")],
    "integers in other byte order": lambda: [NUMBERS.astype(kind) for kind in (">i4", ">i8", ">u2")],
    "complex": lambda: [NUMBERS.astype(kind) for kind in ("c8", ">c16")],
    "views": lambda: [NUMBERS[::-1, ::-1], (NUMBERS / 7).T.copy().T, np.broadcast_to(NUMBERS[:1], NUMBERS.shape)],
    "no columns": lambda: np.zeros((N, 0)),
    "subclasses": lambda: [np.matrix(NUMBERS), np.ma.masked_array(NUMBERS / 7)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_reach_the_tasks_as_keras_converts_them(kind: str, tmp_path: Path) -> None:
    x = KINDS[kind]()
    expected, _, _ = seen_by_keras(x)
    mapped = inputs.load(inputs.store(training_set(x, None, None, None), tmp_path, "train"))
    keras.tree.assert_same_structure(mapped.x, x)  # Keras converts lists to tuples, and accepts both
    batch = of_arrays(mapped)(tf.range(N))
    for mine, spec, theirs in zip(batch, mapped.layout.specs, keras.tree.flatten(expected), strict=True):
        assert mine.dtype == spec.dtype == tf.convert_to_tensor(theirs).dtype
        assert np.array_equal(mine.numpy(), theirs)


def test_a_mapped_file_in_the_other_byte_order_is_converted(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", NUMBERS.astype(">i4"))
    examples = training_set(np.load(tmp_path / "x.npy", mmap_mode="r"), None, None, None)
    assert examples.x.dtype.isnative
    assert inputs.store(examples, tmp_path, "train")["x"] == {"file": str(tmp_path / "train-x.npy")}


LABELS = {
    "numbers": np.arange(N) % 3,
    "column": (np.arange(N) % 3)[:, None],
    "floats": np.arange(N) % 3 + 0.0,
    "one-hot": np.eye(3)[np.arange(N) % 3],
}


@pytest.mark.parametrize("labels", LABELS)
def test_class_weights_become_the_sample_weights_of_keras(labels: str) -> None:
    class_weight = {0: 1.5, 2: 0.25}
    _, _, expected = seen_by_keras(NUMBERS, LABELS[labels], class_weight=class_weight)
    result = training_set(NUMBERS, LABELS[labels], None, class_weight).sample_weight
    assert np.array_equal(result, expected)
    assert result.dtype == np.float32


def test_one_array_of_weights_applies_to_each_output() -> None:
    outputs = {"a": NUMBERS, "b": NUMBERS[:, 0]}
    weights = np.arange(N) / 5
    _, _, expected = seen_by_keras(NUMBERS, outputs, sample_weight=weights)
    result = training_set(NUMBERS, outputs, weights, None).sample_weight
    assert set(result) == set(expected) == {"a", "b"}
    assert all(np.array_equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("weighted", ["train", "validation", "split"])
def test_sample_weights_of_one_set_do_not_affect_the_other(weighted: str) -> None:
    y, weights = NUMBERS[:, 0], np.arange(1.0, N + 1)
    by_class = {int(each): 9.0 for each in y}
    train = training_set(NUMBERS, y, None, None if weighted == "validation" else by_class)
    data = None if weighted == "split" else (NUMBERS, y, weights) if weighted == "validation" else (NUMBERS, y)
    train, validation = validation_set(train, data, 0.25 if weighted == "split" else 0.0, weighted != "validation")
    assert validation is not None
    if weighted == "validation":
        assert train.sample_weight is None
        assert np.array_equal(validation.sample_weight, weights)
    else:
        assert set(train.sample_weight) == {9.0}
        assert validation.sample_weight is None


WEIGHTS = np.ones(N, np.float32)


@pytest.mark.parametrize("of_train", [None, [WEIGHTS, None]])
@pytest.mark.parametrize("of_validation", [None, [WEIGHTS, None], [None, WEIGHTS]])
def test_weights_of_some_outputs_alone(of_train: Any, of_validation: Any) -> None:
    y = [NUMBERS, NUMBERS]
    train, validation = validation_set(training_set(NUMBERS, y, of_train, None), (NUMBERS, y, of_validation), 0.0)
    assert validation is not None
    for examples, given in ((train, of_train), (validation, of_validation)):
        assert [each is None for each in examples.sample_weight or ()] == [each is None for each in given or ()]


def test_validation_split_takes_the_last_part_of_the_data() -> None:
    validations = []

    class NoteValidation(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            validations.append(logs)

    train, validation = validation_set(training_set(NUMBERS, NUMBERS[:, 0], None, None), None, 0.3)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = model.fit(NUMBERS, NUMBERS[:, 0], validation_split=0.3, verbose=0, callbacks=[NoteValidation()]).history
    assert validation
    assert (len(train), len(validation)) == (8, 4)
    assert validations
    assert history["val_loss"][0] == pytest.approx(float(model.evaluate(validation.x, validation.y, verbose=0)))
    assert np.array_equal(np.concatenate([train.x, validation.x]), NUMBERS)


@pytest.mark.parametrize("data", [(NUMBERS, NUMBERS), (NUMBERS, NUMBERS, np.ones(N)), [NUMBERS, NUMBERS]])
def test_validation_data_of_two_or_three_parts(data: Any) -> None:
    train = training_set(NUMBERS, NUMBERS, None, None)
    _, validation = validation_set(train, data, 0.5)
    assert validation is not None
    assert np.array_equal(validation.x, NUMBERS), "validation_data must override validation_split"
    assert (validation.sample_weight is not None) == (len(data) == 3)


Arguments = dict[str, Any]
# Functions make what would run an op.
REFUSED: dict[str, tuple[Arguments | Callable[[], Arguments], str]] = {
    "nothing": ({"x": None}, "x: is None"),
    "a list of numbers": ({"x": [1, 2, 3]}, "x: has an int in place of an array"),
    "a number": ({"x": np.array(1.0)}, "x: is a single number"),
    "lengths": ({"x": NUMBERS, "y": NUMBERS[1:]}, "same number of examples, but have x 12, y 11"),
    "no examples": ({"x": NUMBERS[:0]}, "x: has no examples"),
    "no arrays": ({"x": []}, "x: contains no array"),
    "dates": ({"x": np.zeros(3, "datetime64[s]")}, "datetime64"),
    "complex": ({"x": np.zeros(3, np.clongdouble)}, "x (complex256): is neither numbers nor text"),
    "records": ({"x": np.zeros(3, [("a", "f4")])}, "is neither numbers nor text"),
    "masks": ({"x": np.ma.masked_equal(NUMBERS, 4)}, "x: has masked values, which would be trained on like the"),
    "masks of weights": ({"x": NUMBERS, "sample_weight": np.ma.masked_equal(NUMBERS[:, 0], 3)}, "sample_weight: has m"),
    "a zero byte": (lambda: {"x": tf.constant([b"a\0"])}, "x: has text that ends with a zero byte, which numpy"),
    "objects": ({"x": np.array([{}, []], object)}, "must hold only strings or only numbers"),
    "sparse": (lambda: {"x": tf.sparse.from_dense(NUMBERS)}, "is sparse or ragged"),
    "ragged": (lambda: {"x": tf.ragged.constant([[1], [1, 2]])}, "is sparse or ragged"),
    "both weights": ({"x": NUMBERS, "y": LABELS["numbers"], "sample_weight": np.ones(N), "class_weight": {0: 1.0}},
                     "class_weight: cannot be given together with sample_weight"),
    "a list of classes": ({"x": NUMBERS, "y": LABELS["numbers"], "class_weight": [1.0, 2.0]},
                          "class_weight: is a list; give a dict of classes, such as {0: 1.0, 1: 2.5}"),
    "classes of texts": ({"x": NUMBERS, "y": np.array(["a"] * N), "class_weight": {0: 1.0}},
                         "class_weight: y is text, but must be the numbers of classes; give sample_weight"),
    "classes of two outputs": ({"x": NUMBERS, "y": [NUMBERS, NUMBERS], "class_weight": {0: 1.0}}, "single output"),
    "wide weights": ({"x": NUMBERS, "y": [NUMBERS, NUMBERS], "sample_weight": NUMBERS}, "must be [n]"),
    "other weights": ({"x": NUMBERS, "y": [NUMBERS], "sample_weight": {"a": NUMBERS}}, "another structure than y"),
    "a dataset": (lambda: {"x": tf.data.Dataset.from_tensors(NUMBERS)}, "made in this process and cannot be sent"),
    "a generator": ({"x": (each for each in NUMBERS)}, "made in this process"),
    "a function": ({"x": lambda shard: None}, "x: is a function"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_data_that_cannot_be_sent_is_refused_by_name(what: str) -> None:
    arguments, words = REFUSED[what]
    given = arguments() if callable(arguments) else arguments
    passed = {"y": None, "sample_weight": None, "class_weight": None, **given}
    with pytest.raises(FitError) as raised:
        training_set(**passed)
    assert words in str(raised.value)
    assert isinstance(raised.value, ConfigError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("data", "split", "words"),
    [
        ((NUMBERS,) * 4, 0.0, "validation_data: is a tuple of 4"),
        ((NUMBERS[:, :2], NUMBERS), 0.0, "but the training data is"),
        (({"x": NUMBERS}, NUMBERS), 0.0, "validation_data: is ({'x': 'int64 [n, 3]'}, "),
        *((data, 0.0, "validation_data: has no y, and") for data in (NUMBERS, [NUMBERS], (NUMBERS, None))),
        ((NUMBERS, np.ma.masked_equal(NUMBERS, 4)), 0.0, "validation_data y: has masked values"),
        (None, 1.0, "validation_split (1.0)"),
        (None, -0.5, "validation_split (-0.5)"),
        (None, "0.1", "validation_split (0.1)"),
        (None, [0.1, 0.2], "validation_split ([0.1, 0.2])"),
        (None, 0.99, "one part would be empty"),
        (lambda: tf.data.Dataset.from_tensors(NUMBERS), 0.0, "validation_data: is a _TensorDataset"),
    ],
)
def test_an_invalid_validation_set_is_refused(data: Any, split: Any, words: str) -> None:
    given = data() if callable(data) else data
    with pytest.raises(FitError) as raised:
        validation_set(training_set(NUMBERS, NUMBERS, None, None), given, split)
    assert words in str(raised.value)


@pytest.mark.parametrize(("passed", "steps_per_epoch", "batches_a_step", "expected"), [
    (None, None, 1, 32), (7, None, 1, 7), (None, 5, 1, 20), (None, 5, 3, 7), (7, 5, 3, 7),
])  # fmt: skip
def test_the_batch_size_is_that_of_keras(
    passed: int | None, steps_per_epoch: int | None, batches_a_step: int, expected: int
) -> None:
    assert inputs.batch_size_of(passed, 100, steps_per_epoch, batches_a_step) == expected


def test_arrays_that_are_written_and_mapped_are_unchanged(tmp_path: Path) -> None:
    texts = np.array(["é", "b c"] * (N // 2))
    x = {"numbers": [NUMBERS / 7, (NUMBERS,)], "texts": texts, "again": NUMBERS}
    examples = training_set(x, NUMBERS, np.ones(N), None)
    result = inputs.load(inputs.store(examples, tmp_path, "train"))
    for mapped, original in zip(result.leaves, examples.leaves, strict=True):
        assert isinstance(mapped, np.memmap)
        assert mapped.dtype == original.dtype
        assert np.array_equal(mapped, original)
    keras.tree.assert_same_structure(result.x, examples.x)
    assert isinstance(result.x["numbers"][1], tuple)
    assert len(list(tmp_path.iterdir())) < len(result.leaves), "an array that occurs twice must be written once"


def test_a_mapped_file_is_passed_on_and_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", NUMBERS.astype("float32"))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    job = tmp_path / "job"
    job.mkdir()
    stored = inputs.store(training_set(mapped, None, None, None), job, "train")
    assert stored["x"] == {"file": str(tmp_path / "x.npy")}
    assert os.listdir(job) == []


@pytest.mark.parametrize(
    "view", [lambda a: a[1:], lambda a: a[:, :2], lambda a: a.T, lambda a: a[::-1], lambda a: a + 1]
)
def test_a_part_of_a_mapped_file_is_not_taken_for_the_whole(view: Callable[[Any], Any], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", NUMBERS.astype("float32"))
    part = view(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert inputs.mapped_file(part) == ""
    assert inputs.mapped_file(np.load(tmp_path / "x.npy", mmap_mode="c")) == "", (
        "the mapping may have been changed in memory"
    )


@pytest.mark.skipif(not hasattr(keras.config, "max_epochs"), reason="Keras has no such limits yet")
def test_the_limits_of_keras_hold() -> None:
    def plan_of(**given: Any) -> tuple[Any, ...]:
        arguments = checked(FitArguments(print, NUMBERS, NUMBERS, batch_size=2, validation_split=0.5, **given))
        _, plan = data_of(arguments, run_config(), 1)
        return plan.epochs, plan.steps_per_epoch, plan.validation_steps

    keras.config.set_max_epochs(3)
    keras.config.set_max_steps_per_epoch(2)
    try:
        with pytest.warns(UserWarning, match="Limiting steps_per_epoch to 2"):
            assert plan_of(epochs=2) == (2, 2, 2)
        with pytest.warns(UserWarning, match="Limiting epochs to 3"):
            assert plan_of(epochs=4, steps_per_epoch=1, validation_steps=1) == (3, 1, 1)
        with pytest.raises(FitError, match=r"max_steps_per_epoch \(2\): cannot limit a validation on a function"):
            checked(FitArguments(print, NUMBERS, NUMBERS, validation_data=print))
        keras.config.set_max_steps_per_epoch(5)  # beyond a pass of 3 steps
        with pytest.warns(UserWarning, match="Limiting steps_per_epoch to 5"):
            assert plan_of() == (1, None, 5)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
