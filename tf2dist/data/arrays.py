"""Trees of arrays in memory, as Keras takes them: the types that a data function returns, and the check of its result.

The leaves of a tree have one order everywhere.
"""

import functools
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import TfDistError

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


def _dtype_of(array: Any) -> tf.DType:
    if isinstance(array.dtype, tf.DType):
        return array.dtype
    # numpy's strings of up to 5 bytes have the type S5; TensorFlow knows them as strings of any length.
    return tf.string if array.dtype.kind in "SU" else tf.as_dtype(array.dtype)


MASKED = "has masked values, which would be trained on like the others; fill them with numpy.ma.filled"
ZERO_END = "has text that ends with a zero byte, which numpy drops; encode it, as in base64"


def encoded(texts: np.ndarray, error: TfDistError) -> np.ndarray:
    """An array of strings or bytes as bytes in UTF-8, as in TensorFlow; raises `error` at one with `ZERO_END`."""
    words = [text.encode() if isinstance(text, str) else text for text in texts.ravel().tolist()]
    if any(word.endswith(b"\0") for word in words):
        raise error
    return np.array(words, np.bytes_).reshape(texts.shape)


def as_keras_takes(tree: Tree) -> Tree:
    """The tree with its strings as tensors: Keras takes no bytes of numpy."""
    return keras.tree.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if leaf is not None and leaf.dtype.kind == "S" else leaf, tree
    )


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


def in_native_order(array: np.ndarray) -> np.ndarray:
    """The array with the bytes of its numbers in this machine's order, the only one that TensorFlow knows."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
