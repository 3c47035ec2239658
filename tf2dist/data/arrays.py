"""Trees of arrays in memory, as Keras takes them: the types that a data function returns, and the check of its result.

The leaves of a tree have one order everywhere.
"""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import DataError, kind_of

if TYPE_CHECKING:
    from tf2dist.data.stream import Stream


Tree = Any  # an array, or dicts, lists and tuples of arrays; None where there is nothing


def leaves_of(tree: Tree) -> list[Any]:
    """The leaves of a tree, without None; those of a dict in the order of its sorted keys, as in Keras."""
    # Keras keeps None as a leaf, where TensorFlow and the transport of batches have nothing.
    return [leaf for leaf in keras.tree.flatten(tree) if leaf is not None]


def have_same_structure(one: Tree, other: Tree) -> bool:
    """Whether two trees have their leaves in the same places; a list is as good as a tuple."""
    try:
        keras.tree.assert_same_structure(*map(keras.tree.lists_to_tuples, (one, other)))
    except ValueError:
        return False
    return True


class Layout:
    """The structure of an example, (x, y, sample_weight), and the shapes and types of its leaves.

    Attributes:
        specs: of each leaf of one example, without the dimension of the batch.

    Args:
        examples: the tree (x, y, sample_weight) of arrays [n, ...], or of the specs of such tensors.
    """

    def __init__(self, examples: tuple[Tree, Tree, Tree]) -> None:
        self._tree = keras.tree.map_structure(lambda leaf: leaf is not None, examples)
        self.specs = [tf.TensorSpec(leaf.shape[1:], _dtype_of(leaf)) for leaf in leaves_of(examples)]

    def pack(self, leaves: list[Any]) -> tuple[Tree, Tree, Tree]:
        """The tree (x, y, sample_weight) with these leaves, given in the order of `specs`."""
        left = iter(leaves)
        x, y, sample_weight = keras.tree.map_structure(lambda is_leaf: next(left) if is_leaf else None, self._tree)
        return x, y, sample_weight

    def batched(self, *shape: int | None) -> list[tf.TensorSpec]:
        """The specs of a batch; `shape`: the dimensions before those of an example."""
        return [tf.TensorSpec([*shape, *spec.shape], spec.dtype) for spec in self.specs]

    def symbolic(self) -> tuple[Tree, Tree, Tree]:
        """A batch of Keras' symbolic tensors."""
        return self.pack([keras.KerasTensor((None, *spec.shape), spec.dtype.name) for spec in self.specs])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self._tree, self.specs) == (other._tree, other.specs)

    def __str__(self) -> str:
        shown = [f"{spec.dtype.name} [{', '.join(map(str, ['n', *spec.shape]))}]" for spec in self.specs]
        return str(self.pack(shown))

    # Equal layouts are equal by their trees, and dicts have no hash.
    __hash__ = None  # type: ignore[assignment]


def _dtype_of(array: Any) -> tf.DType:
    if isinstance(array.dtype, tf.DType):
        return array.dtype
    # numpy's strings of up to 5 bytes have the type S5; TensorFlow knows them as strings of any length.
    return tf.string if array.dtype.kind in "SU" else tf.as_dtype(array.dtype)


MASKED = "has masked values, which would be trained on like the others; fill them with numpy.ma.filled"
ZERO_END = "has text that ends with a zero byte, which numpy drops; encode it, as in base64"


@dataclass(frozen=True)
class Arrays:
    """Examples as `keras.Model.fit` takes them: trees (dicts, lists, tuples) of arrays [n, ...], or one array each.

    Attributes:
        x: what the model is given.
        y: what it should give; None for a model whose losses are its own.
        sample_weight: None if all examples count alike.
    """

    x: Tree
    y: Tree = None
    sample_weight: Tree = None

    @functools.cached_property
    def leaves(self) -> list[np.ndarray]:
        """All arrays, in the order of `layout`."""
        return leaves_of((self.x, self.y, self.sample_weight))

    @functools.cached_property
    def layout(self) -> Layout:
        """The types and shapes of an example, and the tree in which they lie."""
        return Layout((self.x, self.y, self.sample_weight))

    def __len__(self) -> int:
        return len(self.leaves[0])

    def __str__(self) -> str:
        return f"{len(self)} of {self.layout}"

    def __getitem__(self, part: slice) -> "Arrays":
        """A range of the examples, not copied."""
        return Arrays(*self.layout.pack([leaf[part] for leaf in self.leaves]))

    def take(self, index: np.ndarray) -> list[np.ndarray]:
        """The leaves of some examples.

        Args:
            index: the numbers of the examples, integers [k].
        """
        return [leaf.take(index, axis=0) for leaf in self.leaves]


@dataclass(frozen=True)
class Truth:
    """What made-up test examples come from: `y` without noise, and the standard deviation of the normal noise in it."""

    y: np.ndarray
    noise: float


@dataclass(frozen=True)
class Splits:
    """The data of a run.

    Attributes:
        train: has no examples if they come from `stream`.
        validation: None, or without examples, if there is no such split.
        test: likewise.
        num_classes: of a classification; None for other data.
        stream: yields the training set in batches, for data that do not fit into memory.
        validation_stream: likewise, instead of `validation`.
        truth: of the test set of made-up data; `python -m tf2dist.predict` draws it.
        note: a line about the data that the user is told when a run begins.
    """

    train: Arrays
    validation: Arrays | None = None
    test: Arrays | None = None
    num_classes: int | None = 10
    stream: "Stream | None" = None
    validation_stream: "Stream | None" = None
    truth: Truth | None = None
    note: str = ""

    @property
    def input_shape(self) -> Any:
        """The shape of one example's x, or a tree of such shapes."""
        return keras.tree.map_structure(lambda array: tuple(array.shape[1:]), self.train.x)

    @property
    def layout(self) -> Layout:
        """That of the training set."""
        return self.stream.layout if self.stream else self.train.layout

    @property
    def evaluated_layout(self) -> Layout:
        """That of the splits that can be evaluated; beside the weights of the examples it is that of the training."""
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


def checked(name: str, splits: Splits) -> Splits:
    """The data as the tasks use it: contiguous arrays, floats of Keras' default type.

    Args:
        name: of the data, for messages.

    Raises:
        DataError: a split is not as `Arrays` describes it, or has another structure than the training set.
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


def in_native_order(array: np.ndarray) -> np.ndarray:
    """The array with the bytes of its numbers in this machine's order, the only one that TensorFlow knows."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


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
        words = array.ravel().tolist()
        if not all(isinstance(word, str | bytes) for word in words):
            raise DataError(f"{name} ({array.dtype} {array.shape}): must hold numbers or strings")
        as_bytes = [word.encode() if isinstance(word, str) else word for word in words]
        if any(word.endswith(b"\0") for word in as_bytes):
            raise DataError(f"{name} {ZERO_END}")
        array = np.array(as_bytes, np.bytes_).reshape(array.shape)
    return np.ascontiguousarray(array) if not array.flags.c_contiguous else array
