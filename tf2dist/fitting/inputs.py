"""The data of `fit`: checked and converted as `keras.Model.fit` does it, and written to files for the tasks.

A tree is an array, or a dict, list or tuple of trees. All arrays of a data set have the same first dimension: [n, ...].
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tf2dist.data.arrays import MASKED, ZERO_END, Arrays, Tree, encoded, in_native_order, leaves_of
from tf2dist.errors import FitError, kind_of

DEFAULT_BATCH_SIZE = 32  # Keras's
SPARSE = "is sparse or ragged, but only dense arrays can be sent; use its to_tensor(), or tf.sparse.to_dense"


def training_examples(x: Tree, y: Tree, sample_weight: Tree, class_weight: Mapping[int, float] | None) -> Arrays:
    """The training set, with class weights turned into a weight for each example, as Keras does."""
    if x is None:
        raise FitError("x: is None; give arrays with one example in each row, or a dict, list or tuple of them")
    x, y, sample_weight = (
        converted(tree, name) for tree, name in ((x, "x"), (y, "y"), (sample_weight, "sample_weight"))
    )
    if sample_weight is not None and class_weight is not None:
        raise FitError("class_weight: cannot be given together with sample_weight; multiply the two into one")
    if sample_weight is not None:
        sample_weight = _for_each_output(y, sample_weight)
    if class_weight is not None:
        sample_weight = _of_classes(y, class_weight)
    return _checked(Arrays(x, y, sample_weight), "x")


def validation_examples(validation_data: Any) -> Arrays:
    """The validation set: x, (x,), (x, y) or (x, y, sample_weight)."""
    try:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
    except ValueError:
        raise FitError(
            f"validation_data: is {kind_of(validation_data)} of {len(validation_data)}; give (x, y) or "
            "(x, y, sample_weight)"
        ) from None
    names = "validation_data x", "validation_data y", "validation_data sample_weight"
    x, y, sample_weight = (converted(tree, name) for tree, name in zip((x, y, sample_weight), names, strict=True))
    if sample_weight is not None:
        sample_weight = _for_each_output(y, sample_weight)
    return _checked(Arrays(x, y, sample_weight), "validation_data")


def split_off(examples: Arrays, share: float) -> tuple[Arrays, Arrays]:
    """Splits the examples, in the order given, into a training set and a validation set, which is the last part."""
    if not isinstance(share, int | float | np.number) or not 0 < share < 1:
        raise FitError(f"validation_split ({share}): must be at least 0 and less than 1, such as 0.2")
    total = len(examples)
    # This rounding is Keras's, in floating point too: one example more or less would be another history.
    at = math.floor(total * (1.0 - share))
    if at in (0, total):
        raise FitError(
            f"validation_split ({share}): of {total} examples one part would be empty; give more examples, or another "
            "share"
        )
    return examples[:at], examples[at:]


def converted(tree: Tree, name: str) -> Tree:
    """The tree with arrays as Keras converts them: floats to its floatx; integers, bools and strings unchanged."""
    if tree is None:
        return None
    return keras.tree.map_structure(lambda leaf: None if leaf is None else _as_numpy(leaf, name), tree)


def _as_numpy(leaf: Any, name: str) -> np.ndarray:
    # By their names, so that these packages need not be installed.
    package = type(leaf).__module__.partition(".")[0]
    if package == "scipy" or type(leaf).__name__ in ("SparseTensor", "RaggedTensor", "BCOO"):
        raise FitError(f"{name}: {SPARSE}")
    if isinstance(leaf, str | bytes | int | float) or not hasattr(leaf, "__array__"):
        raise FitError(f"{name}: has {kind_of(leaf)} in place of an array; convert it with numpy.array")
    if np.ma.is_masked(leaf):
        raise FitError(f"{name}: {MASKED}")
    # numpy cannot read a tensor of PyTorch that has a gradient or lies on a GPU.
    if package == "torch":
        leaf = leaf.detach().cpu()
    # `asarray` would make a plain array of it, which does not know its file, so that it would be copied for the tasks.
    if isinstance(leaf, np.memmap):
        array: np.ndarray = leaf
    elif package == "pandas":
        array = leaf.to_numpy()
        # Keras makes [n, 1] of a Series.
        array = array[:, None] if array.ndim == 1 else array
    else:
        array = np.asarray(leaf)
    if array.ndim == 0:
        raise FitError(f"{name}: is a single number; give an array with one example in each row")
    return _of_known_type(in_native_order(array), name)


def _of_known_type(array: np.ndarray, name: str) -> np.ndarray:
    floatx = keras.config.floatx()
    # numpy knows bfloat16 only by its name: its kind is "V", that of unknown types.
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        return array if array.dtype.name == floatx else array.astype(floatx)
    # TensorFlow's strings are bytes, and numpy's "U" takes four bytes for each character.
    if array.dtype.kind == "U":
        return np.char.encode(array, "utf-8")
    if array.dtype == object:
        return _of_objects(array, name)
    if array.dtype.kind not in "biuSc" or array.dtype == np.clongdouble:
        raise FitError(f"{name} ({array.dtype}): is neither numbers nor text; convert it with astype")
    return array


def _of_objects(array: np.ndarray, name: str) -> np.ndarray:
    """Strings as bytes in UTF-8, or numbers as Keras's floatx."""
    # pandas gives such arrays for columns of strings, and for tables whose columns are of several types. As objects
    # they could be sent only by pickle.
    if all(isinstance(item, str | bytes) for item in array.flat):
        return encoded(array, FitError(f"{name}: {ZERO_END}"))
    if all(isinstance(item, bool | int | float | np.number | np.bool_) for item in array.flat):
        return array.astype(keras.config.floatx())
    raise FitError(f"{name} (object): must hold only strings or only numbers; convert it with astype")


def _for_each_output(y: Tree, weights: Tree) -> Tree:
    """One array of weights for each output, as Keras has it."""
    if not keras.tree.is_nested(y):
        return weights
    if keras.tree.is_nested(weights):
        try:
            keras.tree.assert_same_structure(y, weights)
        except ValueError:
            raise FitError("sample_weight: has another structure than y; give one array for each output") from None
        return weights
    # Weights for each step of a sequence, [n, steps], belong to one output, so Keras refuses them for several.
    if not (weights.ndim == 1 or (weights.ndim == 2 and weights.shape[1] == 1)):
        raise FitError(
            f"sample_weight ({list(weights.shape)}): a single array for several outputs must be [n]; give one array "
            "for each output"
        )
    return keras.tree.map_structure(lambda _: weights, y)


def _of_classes(y: Tree, class_weight: Mapping[int, float]) -> np.ndarray:
    """A weight for each example: that of its class, or 1 for a class without one."""
    if not isinstance(class_weight, Mapping):
        raise FitError(f"class_weight: is {kind_of(class_weight)}; give a dict of classes, such as {{0: 1.0, 1: 2.5}}")
    if keras.tree.is_nested(y) or y is None:
        raise FitError("class_weight: is for a model with a single output; give sample_weight")
    classes = y
    # As Keras: labels are class numbers, [n] or [n, 1], or one-hot, [n, classes].
    if y.ndim > 1:
        classes = y.argmax(-1) if y.shape[-1] != 1 else y[..., 0]
    if classes.ndim != 1:
        raise FitError(
            f"class_weight: y is {list(y.shape)}, but must be [n], [n, 1] or [n, classes]; give sample_weight instead"
        )
    if classes.dtype.kind == "S":
        raise FitError("class_weight: y is text, but must be the numbers of classes; give sample_weight instead")
    # One look-up in the dict for each class instead of one for each example.
    labels, indices = np.unique(np.round(classes).astype(np.int32), return_inverse=True)
    weights = np.array([class_weight.get(int(label), 1.0) for label in labels], keras.config.floatx())
    return weights[indices]


def _checked(examples: Arrays, name: str) -> Arrays:
    if not leaves_of(examples.x):
        raise FitError(f"{name}: contains no array; give arrays with one example in each row")
    lengths = {part: sorted({len(leaf) for leaf in leaves_of(tree)}) for part, tree in _parts(examples)}
    if len({length for part_lengths in lengths.values() for length in part_lengths}) > 1:
        listed = ", ".join(f"{part} {' and '.join(map(str, sizes))}" for part, sizes in lengths.items() if sizes)
        raise FitError(f"{name}: the arrays must have the same number of examples, but have {listed}")
    if not len(examples):
        raise FitError(f"{name}: has no examples")
    return examples


def _parts(examples: Arrays) -> Iterator[tuple[str, Tree]]:
    return zip(("x", "y", "sample_weight"), (examples.x, examples.y, examples.sample_weight), strict=True)


def batch_size_of(batch_size: int | None, num_examples: int, steps: int | None, batches_a_step: int) -> int:
    """The batch size of a worker; if none is given, Keras's: 32, or the size with which the `steps` see all.

    Args:
        steps: of an epoch, or of a validation.
        batches_a_step: how many batches the cluster takes in one step.
    """
    if batch_size is not None:
        return batch_size
    return math.ceil(num_examples / (steps * batches_a_step)) if steps else DEFAULT_BATCH_SIZE


# Files for the tasks: each array as .npy, which the tasks map into their memory, and the trees as JSON. So all tasks of
# a host share one copy, in the kernel's cache of files.


def store(examples: Arrays, folder: Path, prefix: str) -> dict[str, Any]:
    """Writes the arrays into `folder`; returns what `load` needs, as a value of JSON."""
    # By the identity of the array: one that stands in several places is written once.
    paths: dict[int, str] = {}
    return {part: _stored(tree, folder, f"{prefix}-{part}", paths) for part, tree in _parts(examples)}


def _stored(tree: Tree, folder: Path, name: str, paths: dict[int, str]) -> Any:
    if tree is None:
        return None
    # Pairs, since the keys of an object in JSON are strings; numbers as names, since keys may not be names of files.
    if isinstance(tree, dict):
        return {"dict": [[key, _stored(tree[key], folder, f"{name}-{n}", paths)] for n, key in enumerate(tree)]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_stored(item, folder, f"{name}-{n}", paths) for n, item in enumerate(tree)]}
    if id(tree) not in paths:
        paths[id(tree)] = mapped_file(tree) or _written(folder / f"{name}.npy", tree)
    return {"file": paths[id(tree)]}


def _written(path: Path, array: np.ndarray) -> str:
    with open(path, "xb") as file:
        np.save(file, array, allow_pickle=False)
    return str(path)


def mapped_file(array: np.ndarray) -> str:
    """The path of the .npy file that the array maps as a whole and read-only; "" for any other array."""
    # A file that was mapped "c" (copy on write) may differ from what this process has written into the array, and
    # one that was mapped "r+" may still change.
    if not isinstance(array, np.memmap) or array.mode != "r" or array.filename is None:
        return ""
    # A view of a part is a memmap too, and has the name of the file: only an equal layout in memory makes it the whole.
    try:
        whole = np.load(array.filename, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return ""
    if not isinstance(whole, np.memmap):
        return ""
    layout = (whole.shape, whole.dtype, whole.strides, whole.offset)
    is_whole = layout == (array.shape, array.dtype, array.strides, array.offset)
    return str(Path(array.filename).absolute()) if is_whole else ""


def load(stored: dict[str, Any]) -> Arrays:
    """The examples that `store` has written, mapped into memory without being read."""
    return Arrays(*(_loaded(stored[part]) for part in ("x", "y", "sample_weight")))


def _loaded(stored: Any) -> Tree:
    if stored is None:
        return None
    ((kind, content),) = stored.items()
    if kind == "file":
        return np.load(content, mmap_mode="r", allow_pickle=False)
    if kind == "dict":
        return {key: _loaded(item) for key, item in content}
    return [*map(_loaded, content)] if kind == "list" else tuple(map(_loaded, content))
