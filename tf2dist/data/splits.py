"""The data of a run: what a data function returns, and the check of it."""

from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from tf2dist.data.arrays import MASKED, ZERO_END, Arrays, Layout, encoded, in_native_order, leaves_of
from tf2dist.data.stream import Stream
from tf2dist.errors import DataError, kind_of


@dataclass(frozen=True)
class NoiselessLabels:
    """The origin of made-up test examples: `y` without noise, and the standard deviation of the normal noise in it."""

    y: np.ndarray
    noise: float


@dataclass(frozen=True)
class Splits:
    """The data of a run: what a data function returns.

    Attributes:
        train: the examples to train on.
        validation: the examples of the evaluations during the run and at its end; None, or without examples, for none.
        test: the examples of the evaluation at the end; None, or without examples, for none.
        num_classes: of a classification, whose `y` holds integers from 0 to `num_classes` - 1: by default the 10 of
            digits. Give None for all other data, such as those of a regression.
    """

    train: Arrays
    validation: Arrays | None = None
    test: Arrays | None = None
    num_classes: int | None = 10

    @property
    def stream(self) -> Stream | None:
        """The training set in batches, for data that do not fit into memory; `train` has no examples then."""
        return None

    @property
    def validation_stream(self) -> Stream | None:
        """The validation set likewise, instead of `validation`."""
        return None

    @property
    def truth(self) -> NoiselessLabels | None:
        """The origin of a test set that is made up; `python -m tf2dist.predict` draws it."""
        return None

    @property
    def note(self) -> str:
        """A line about the data that the user is told when a run begins."""
        return ""

    @property
    def input_shape(self) -> Any:
        """The shape of one example's x, or a tree of such shapes."""
        return keras.tree.map_structure(lambda array: tuple(array.shape[1:]), self.train.x)

    @property
    def layout(self) -> Layout:
        """The layout of the training set."""
        return self.stream.layout if self.stream else self.train.layout

    @property
    def evaluated_layout(self) -> Layout:
        """The layout of splits that are evaluated; beside the weights of the examples it is that of the training."""
        if self.validation_stream:
            return self.validation_stream.layout
        # A split without examples, which is false, says nothing.
        return next((arrays.layout for arrays in (self.validation, self.test) if arrays), self.layout)

    @property
    def evaluated(self) -> list[str]:
        """The names of the splits that can be evaluated."""
        return [*self.sizes(), *(["validation"] if self.validation_stream else [])]

    def sizes(self) -> dict[str, int]:
        """The number of examples in each split of arrays that can be evaluated."""
        splits = {"validation": self.validation, "test": self.test}
        return {name: len(arrays) for name, arrays in splits.items() if arrays is not None and len(arrays)}


@dataclass(frozen=True)
class OwnSplits(Splits):
    """Data with parts that a user's data function cannot return: the streams of `fit`, and facts about made-up data."""

    stream: Stream | None = None
    validation_stream: Stream | None = None
    truth: NoiselessLabels | None = None
    note: str = ""


def streamed(stream: Stream, validation: Arrays | None, validation_stream: Stream | None = None) -> Splits:
    """The data of a run, without arrays to train on."""
    train = Arrays(*stream.layout.pack(stream.no_examples()))
    return OwnSplits(train, validation, num_classes=None, stream=stream, validation_stream=validation_stream)


def checked(name: str, splits: Splits) -> Splits:
    """The data as the tasks use it: contiguous arrays, floats of Keras' default type.

    Args:
        name: of the data, for messages.
    """
    num_classes = splits.num_classes
    train = _checked(f"{name}: train", splits.train, num_classes)
    others: dict[str, Arrays | None] = {"validation": splits.validation, "test": splits.test}
    for split, arrays in others.items():
        if arrays is None:
            continue
        others[split] = result = _checked(f"{name}: {split}", arrays, num_classes)
        # A split without examples says nothing, and its empty arrays may have any shape.
        if len(result) and result.layout != train.layout:
            raise DataError(f"{name}: {split} is {result.layout}, and train is {train.layout}; give both the same kind")
    return replace(splits, train=train, validation=others["validation"], test=others["test"])


def _checked(name: str, arrays: Arrays, num_classes: int | None) -> Arrays:
    if not isinstance(arrays, Arrays):
        raise DataError(f"{name} is {kind_of(arrays)}, and must be tf2dist.data.Arrays of x and y")
    if not leaves_of(arrays.x):
        raise DataError(f"{name} x ({kind_of(arrays.x)}): must be an array of numbers or strings [n, ...]")
    leaves = [_standard(f"{name} {path}", leaf) for path, leaf in _paths(arrays)]
    if len({len(leaf) for leaf in leaves}) > 1:
        shown = ", ".join(f"{path}: {len(leaf)}" for (path, _), leaf in zip(_paths(arrays), leaves, strict=True))
        raise DataError(f"{name} has arrays of several lengths ({shown}); give each one the same number of examples")
    # The tree again with the converted arrays. None has its place in it, but not among the leaves.
    left = iter(leaves)
    tree = (arrays.x, arrays.y, arrays.sample_weight)
    standard = Arrays(*keras.tree.map_structure(lambda leaf: None if leaf is None else next(left), tree))
    y = standard.y
    # Only a vector can hold the numbers of classes. A one-hot matrix is left to the loss, which knows what it wants.
    if num_classes and isinstance(y, np.ndarray) and y.ndim == 1 and len(y):
        if not np.issubdtype(y.dtype, np.integer):
            raise DataError(
                f"{name} y ({y.dtype} {y.shape}): must be integers [{len(y)}], the classes; if it is something "
                "else, give Splits num_classes=None"
            )
        if not 0 <= y.min() <= y.max() < num_classes:
            raise DataError(f"{name} y ({y.min()} to {y.max()}): must be from 0 to {num_classes - 1}")
        return Arrays(standard.x, y.astype(np.int32), standard.sample_weight)
    return standard


def _paths(arrays: Arrays) -> list[tuple[str, Any]]:
    """Each leaf with its name for messages, such as "x[1]"; the number counts the leaves of its part."""
    paths = []
    for part in ("x", "y", "sample_weight"):
        leaves = leaves_of(getattr(arrays, part))
        names = [part] if len(leaves) == 1 else [f"{part}[{number}]" for number in range(len(leaves))]
        paths += list(zip(names, leaves, strict=True))
    return paths


def _standard(name: str, leaf: Any) -> np.ndarray:
    """A contiguous array; floats as Keras' floatx, strings as bytes, as in TensorFlow."""
    if np.ma.is_masked(leaf):
        raise DataError(f"{name} {MASKED}")
    # Subclasses stay what they are: an array that is mapped from a file must not become a copy in memory.
    array = in_native_order(np.asanyarray(leaf))
    if array.ndim < 1 or array.dtype.kind not in "biufSUO":
        raise DataError(f"{name} ({array.dtype} {array.shape}): must be an array of numbers or strings [n, ...]")
    if array.dtype.kind == "f":
        array = array.astype(keras.config.floatx(), copy=False)
    elif array.dtype.kind in "UO":
        # The strings of a pandas table come in an object array, which may hold anything else, too.
        if array.dtype.kind == "O" and not all(isinstance(word, str | bytes) for word in array.flat):
            raise DataError(f"{name} ({array.dtype} {array.shape}): must hold numbers or strings")
        array = encoded(array, DataError(f"{name} {ZERO_END}"))
    return np.ascontiguousarray(array) if not array.flags.c_contiguous else array
