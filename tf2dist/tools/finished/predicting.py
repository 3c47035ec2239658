"""Evaluates the model of a run on a data set, and predicts files, or the test set, with it."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Arrays, as_keras_takes
from tf2dist.errors import DataError, NotFiniteError, first_line, reason_of
from tf2dist.files import path_of, raising
from tf2dist.launch.console import show_lines
from tf2dist.tf_internals.keras import inputs_of
from tf2dist.tools.finished.opening import data_of, model_of, split_of
from tf2dist.tools.finished.shell import CommandLine

BATCH_SIZE = 256
MOST_CLASSES = 30  # with more the printed matrix is too wide for a terminal
CHANNELS = (1, 3)
# Keras's losses of classes, by the names of their classes or functions in lower case and without underscores.
MANY = ("categoricalcrossentropy", "sparsecategoricalcrossentropy", "categoricalfocalcrossentropy")
TWO = ("binarycrossentropy", "binaryfocalcrossentropy")


class Classifier:
    """A model with one output for each class, or with a single output for two classes.

    Args:
        of_logits: whether its outputs are logits rather than probabilities.
        of_two: whether it has a single output, for the second of two classes.
    """

    def __init__(self, of_logits: bool, of_two: bool) -> None:
        self._of_logits, self._of_two = of_logits, of_two

    @classmethod
    def of(cls, model: keras.Model, outputs: Any) -> "Classifier | None":
        """The classifier that a compiled model with these outputs is; None if it is no classifier."""
        loss = keras.losses.get(model.loss) if isinstance(model.loss, str) else model.loss
        # By the outputs: a subclass of keras.Model has no `output_shape`.
        if not callable(loss) or not isinstance(outputs, np.ndarray) or outputs.ndim != 2:
            return None
        name = getattr(loss, "__name__", type(loss).__name__).replace("_", "").lower()
        # Only a loss object can have from_logits=True; a function by its name takes probabilities.
        settings: dict[str, Any] = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
        of_two = name in TWO and outputs.shape[1] == 1
        if of_two or (name in MANY and outputs.shape[1] > 1):
            return cls(bool(settings.get("from_logits", False)), of_two)
        return None

    def probabilities(self, outputs: np.ndarray) -> np.ndarray:
        """The probability of each class, [n, classes], from a model's outputs, [n, classes] or [n, 1]."""
        # In float64 `exp` does not overflow for any float32 logit that a model gives in practice.
        outputs = np.asarray(outputs, np.float64)
        if self._of_two:
            second = 1 / (1 + np.exp(-outputs)) if self._of_logits else outputs
            return np.concatenate([1 - second, second], axis=1)
        if not self._of_logits:
            return outputs
        # Less the largest logit, so that no power overflows; the quotients stay the same.
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def evaluate(line: CommandLine) -> None:
    """Prints the loss and each metric in a line of its own, and then the number of examples."""
    split = line.options.get("split", "test")
    # The model first: that runs the plugins, which may register the data.
    model = model_of(line)
    name, splits = data_of(line)
    arrays = split_of(name, splits, split)
    results = _results(model, name, arrays)
    width = max(map(len, results), default=0)
    for key, value in results.items():
        show_lines(f"{key:{width}}  {np.array2string(np.asarray(value), precision=6)}")
    show_lines(f"{len(arrays):,} examples of {name}, {split}")
    # After the figures are printed: which metric is not finite may tell the reason.
    if not math.isfinite(results.get("loss", 0.0)):
        raise NotFiniteError(f"the loss is {results['loss']}; look for NaN in the weights and in the data")


def _results(model: keras.Model, name: str, arrays: Arrays) -> dict[str, float]:
    """The loss and the metrics by name, the loss first; a `test_step` of the model's own may return no loss."""
    with _fitting(f"data ({name})", "choose another one with data=NAME"):
        x, y, sample_weight = as_keras_takes((arrays.x, arrays.y, arrays.sample_weight))
        metrics: dict[str, float] = model.evaluate(
            x, y, BATCH_SIZE, verbose=0, sample_weight=sample_weight, return_dict=True
        )
    return dict(sorted(metrics.items(), key=lambda item: item[0] != "loss"))


def print_predictions(line: CommandLine) -> None:
    """Prints the predictions; those of the test set are drawn, too."""
    model = model_of(line)
    # File by file, so that many large ones need not fit into memory, and lines come before a later file fails.
    if line.operands:
        for operand in line.operands:
            path = path_of("FILE", operand)
            examples, names = read(path, model)
            outputs = _outputs(model, examples, str(path))
            _print(Classifier.of(model, outputs), outputs, names)
        return
    name, splits = data_of(line)
    test = split_of(name, splits, "test")
    outputs = _outputs(model, test.x, f"data ({name})")
    classifier = Classifier.of(model, outputs)
    if classifier is None:
        _print(None, outputs, [f"{name}[{number}]" for number in range(len(test))])
        columns = [test.x, test.y, outputs]
        # Text has no place on an axis.
        are_arrays = all(isinstance(column, np.ndarray) and column.dtype.kind != "S" for column in columns)
        if are_arrays and all(column.size == len(test) for column in columns):
            # Imports matplotlib, which `evaluate` does not need.
            from tf2dist.tools.finished.pictures import drawn, regression_figure

            x, y, predicted = map(np.ravel, columns)
            figure = partial(regression_figure, line.run_dir, x, y, predicted, truth=splits.truth)
            show_lines(drawn(line.run_dir / "regression.png", figure))
    else:
        _show(line.run_dir, test, classifier.probabilities(outputs))


def _outputs(model: keras.Model, x: Any, source: str) -> Any:
    """The model's outputs, in the structure in which it returns them."""
    with _fitting(source, "give data like those that this run was trained on"):
        return model.predict(as_keras_takes(x), BATCH_SIZE, verbose=0)


@contextlib.contextmanager
def _fitting(source: str, advice: str) -> Iterator[None]:
    """Says of examples that they do not fit the model."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:  # what Keras raises for other shapes, types and structures
        raise DataError(f"{source}: does not fit the model ({reason_of(error)}); {advice}") from None


def _print(classifier: Classifier | None, outputs: Any, names: list[str]) -> None:
    """Prints a line for each example: class, probability and name, or all outputs and the name."""
    if classifier:
        probabilities = classifier.probabilities(outputs)
        best = probabilities.argmax(axis=1)
        fields = [[str(index), f"{row[index]:.4f}"] for index, row in zip(best, probabilities, strict=True)]
    else:
        # Several outputs stand one after the other in a line, in the order in which Keras flattens them.
        leaves = [np.asarray(leaf).reshape(len(names), -1) for leaf in keras.tree.flatten(outputs)]
        fields = [[f"{value:.6g}" for value in row] for row in np.concatenate(leaves, axis=1)]
    for values, name in zip(fields, names, strict=True):
        show_lines("\t".join([*values, name]))


def _show(run_dir: Path, test: Arrays, probabilities: np.ndarray) -> None:
    """Prints the accuracy and the confusion matrix, a row for each true class, and draws the matrix and images."""
    from tf2dist.tools.finished import pictures  # imports matplotlib, which `evaluate` does not need

    true, predicted = class_numbers(test.y), probabilities.argmax(axis=1)
    num_classes = probabilities.shape[1]
    # Labels are indices of the matrix: a negative one would count in the wrong row without an error.
    if true.min() < 0 or true.max() >= num_classes:
        raise DataError(
            f"data: has labels from {true.min()} to {true.max()}, but the model has {num_classes} classes; choose "
            "another one with data=NAME"
        )
    counts = tf.math.confusion_matrix(true, predicted, num_classes, dtype=tf.int64).numpy()
    show_lines(f"accuracy {np.mean(true == predicted):.4f} over {len(true):,} examples")
    if num_classes <= MOST_CLASSES:
        show_lines(confusion_text(counts))
    show_lines(pictures.drawn(run_dir / "confusion.png", partial(pictures.confusion_figure, run_dir, counts)))
    if isinstance(test.x, np.ndarray) and pictures.are_images(test.x):
        confidence = probabilities.max(axis=1)
        figure = partial(pictures.predictions_figure, run_dir, test.x, true, predicted, confidence)
        show_lines(pictures.drawn(run_dir / "predictions.png", figure))


def class_numbers(labels: np.ndarray) -> np.ndarray:
    """The class numbers, [n], of labels that are numbers, [n] or [n, 1], or one-hot, [n, classes]."""
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] > 1:
        return np.asarray(labels.argmax(axis=1))
    return np.asarray(labels.reshape(len(labels)).astype(np.int64))


def confusion_text(counts: np.ndarray) -> str:
    """The confusion matrix as lines of text, with a heading for each row and column."""
    width = max(len(f"{counts.max():,}"), len(str(len(counts) - 1))) + 1
    lines = ["true\\predicted" + "".join(f"{number:>{width}}" for number in range(len(counts)))]
    lines += [f"{number:>14}" + "".join(f"{count:>{width},}" for count in row) for number, row in enumerate(counts)]
    return "\n".join(lines)


def read(path: Path, model: keras.Model) -> tuple[np.ndarray, list[str]]:
    """The examples in a file, float32 [n, ...], and a name for each of them."""
    shape = shape_of(model)
    with raising(f"{path}: cannot be read", "name an image or a .npy file", DataError):
        examples = _array(path, shape) if path.suffix == ".npy" else _image(path, path.read_bytes(), shape)[None]
    return examples, [f"{path}[{number}]" for number in range(len(examples))] if len(examples) != 1 else [str(path)]


def shape_of(model: keras.Model) -> tuple[int | None, ...]:
    """The shape of one example; None for a dimension of any size."""
    inputs = inputs_of(model)
    if len(inputs) != 1:
        raise DataError(f"FILE: this model has {len(inputs)} inputs, but a file gives one; leave the files out")
    return tuple(inputs[0].shape[1:])


def _array(path: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    try:
        # A pickled array could run any code when it is read.
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):  # numpy goes by the content, and a .npz may have been renamed
            raise ValueError("it holds several arrays")
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: is no numpy array ({first_line(str(error))}); save one with numpy.save") from None
    if not array.size:
        raise DataError(f"{path}: is {array.dtype} {list(array.shape)}, without any examples; save one at least")
    # Several examples or one, both also without the last dimension, as grey images often are.
    for examples in (array, array[None], array[..., None], array[None, ..., None]):
        fits = examples.ndim and tf.TensorShape(shape).is_compatible_with(examples.shape[1:])
        if fits and array.dtype.kind in "biuf":
            return np.asarray(examples, np.float32)
    dims = ["n", *("any" if size is None else str(size) for size in shape)]
    raise DataError(
        f"{path}: is {array.dtype} {list(array.shape)}, but the model takes numbers [{', '.join(dims)}]; save an "
        "array of that shape"
    )


def _image(path: Path, content: bytes, shape: tuple[int | None, ...]) -> np.ndarray:
    """The picture in the model's height, width and channels, with values from 0 to 255."""
    height, width, channels = (*shape, 1) if len(shape) == 2 else shape if len(shape) == 3 else (None, None, None)
    if channels not in CHANNELS:
        raise DataError(f"{path}: the model takes {list(shape)}, not images; give a .npy file of that shape")
    try:
        image = _decoded(content, channels)
    except tf.errors.OpError:
        raise DataError(
            f"{path}: is no image that can be decoded; give a PNG, JPEG, BMP or GIF file, or a .npy file"
        ) from None
    # With antialias, since the strokes of a large drawing would otherwise fall between the pixels that are kept.
    if height is not None and width is not None and tuple(image.shape[:2]) != (height, width):
        image = tf.image.resize(image, [height, width], antialias=True)
    array: np.ndarray = tf.cast(image, tf.float32).numpy()
    return array[..., 0] if len(shape) == 2 else array


def _decoded(content: bytes, channels: int) -> tf.Tensor:
    """The picture, in grey for one channel."""
    try:
        return tf.io.decode_image(content, channels, expand_animations=False)
    except tf.errors.InvalidArgumentError:  # TensorFlow does not decode BMP and GIF files into one channel
        return tf.image.rgb_to_grayscale(tf.io.decode_image(content, 3, expand_animations=False))
