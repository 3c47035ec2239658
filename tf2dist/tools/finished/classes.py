"""Recognizes a classifier by its loss, and turns its outputs into probabilities."""

from typing import Any

import keras
import numpy as np

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
    def of(cls, model: keras.Model) -> "Classifier | None":
        """The classifier that a compiled model is; None if it is no classifier."""
        loss = keras.losses.get(model.loss) if isinstance(model.loss, str) else model.loss
        shape = model.output_shape
        if not callable(loss) or not isinstance(shape, tuple) or len(shape) != 2:
            return None
        name = getattr(loss, "__name__", type(loss).__name__).replace("_", "").lower()
        # Only a loss object can have from_logits=True; a function by its name takes probabilities.
        settings: dict[str, Any] = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
        of_two = name in TWO and shape[1] == 1
        if of_two or (name in MANY and shape[1] > 1):
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


def class_numbers(labels: np.ndarray) -> np.ndarray:
    """The class numbers, [n], of labels that are numbers, [n] or [n, 1], or one-hot, [n, classes]."""
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] > 1:
        return np.asarray(labels.argmax(axis=1))
    return np.asarray(labels.reshape(len(labels)).astype(np.int64))


def confusion(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """How often each class (row) was predicted as each class (column), [classes, classes]."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    # `counts[true, predicted] += 1` would count a pair that occurs several times only once.
    np.add.at(counts, (true, predicted), 1)
    return counts


def confusion_text(counts: np.ndarray) -> str:
    """The confusion matrix as lines of text, with a heading for each row and column."""
    width = max(len(f"{counts.max():,}"), len(str(len(counts) - 1))) + 1
    lines = ["true\\predicted" + "".join(f"{number:>{width}}" for number in range(len(counts)))]
    lines += [f"{number:>14}" + "".join(f"{count:>{width},}" for count in row) for number, row in enumerate(counts)]
    return "\n".join(lines)
