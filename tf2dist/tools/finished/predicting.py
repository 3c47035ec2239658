"""Predicts files, or the test set, with the model of a run."""

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tf2dist.data.arrays import Arrays
from tf2dist.errors import DataError, reason_of
from tf2dist.launch.console import print_lines
from tf2dist.tools.finished import pictures
from tf2dist.tools.finished.classes import Classifier, class_numbers, confusion, confusion_text
from tf2dist.tools.finished.inputs import read
from tf2dist.tools.finished.opening import data_of, model_of, split_of
from tf2dist.tools.finished.shell import Request

BATCH_SIZE = 256
MOST_CLASSES = 30  # with more the printed matrix is too wide for a terminal


def print_predictions(request: Request) -> None:
    """Prints the predictions; those of the test set are drawn, too.

    Raises:
        RequestError: the model, a file or the data cannot be loaded, or does not fit the model.
    """
    model = model_of(request)
    classifier = Classifier.of(model)
    # File by file, so that many large ones need not fit into memory, and lines come before a later file fails.
    if request.operands:
        for operand in request.operands:
            path = Path(operand).expanduser()
            examples, names = read(path, model)
            _print(classifier, _outputs(model, examples, str(path)), names)
        return
    name, splits = data_of(request)
    test = split_of(name, splits, "test")
    outputs = _outputs(model, test.x, f"data ({name})")
    if classifier is None:
        _print(None, outputs, [f"{name}[{number}]" for number in range(len(test))])
        columns = [test.x, test.y, outputs]
        if all(isinstance(column, np.ndarray) and column.size == len(test) for column in columns):
            x, y, predicted = map(np.ravel, columns)
            path = pictures.draw_regression(request.run_dir, x, y, predicted, truth=splits.truth)
            print_lines(str(path), sys.stdout)
    else:
        _show(request.run_dir, test, classifier.probabilities(outputs))


def _outputs(model: keras.Model, x: Any, source: str) -> Any:
    """The model's outputs, in the structure in which it returns them.

    Raises:
        DataError: the examples do not fit the model.
    """
    try:
        return model.predict(x, BATCH_SIZE, verbose=0)
    except (ValueError, TypeError, KeyError) as error:  # what Keras raises for other shapes, types and structures
        reason = reason_of(error)
        raise DataError(
            f"{source}: does not fit the model ({reason}); give data like those that this run was trained on"
        ) from None


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
        print_lines("\t".join([*values, name]), sys.stdout)


def _show(run_dir: Path, test: Arrays, probabilities: np.ndarray) -> None:
    """Prints the accuracy and the confusion matrix, and draws the matrix and images.

    Raises:
        DataError: the data has classes that the model does not have.
    """
    true, predicted = class_numbers(test.y), probabilities.argmax(axis=1)
    num_classes = probabilities.shape[1]
    # Labels are indices of the matrix: a negative one would count in the wrong row without an error.
    if true.min() < 0 or true.max() >= num_classes:
        raise DataError(
            f"data: has labels from {true.min()} to {true.max()}, but the model has {num_classes} classes; choose "
            "another one with data=NAME"
        )
    counts = confusion(true, predicted, num_classes)
    print_lines(f"accuracy {np.mean(true == predicted):.4f} over {len(true):,} examples", sys.stdout)
    if num_classes <= MOST_CLASSES:
        print_lines(confusion_text(counts), sys.stdout)
    print_lines(str(pictures.draw_confusion(run_dir, counts)), sys.stdout)
    if isinstance(test.x, np.ndarray) and pictures.are_images(test.x):
        path = pictures.draw_predictions(run_dir, test.x, true, predicted, probabilities.max(axis=1))
        print_lines(str(path), sys.stdout)
