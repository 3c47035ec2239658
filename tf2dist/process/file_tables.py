"""Large tables of embeddings in files that a process maps, for models that look rows up and are not trained.

The kernel reads the pages of a mapped file when their rows are looked up, and takes the memory back when it is needed.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.process.parts import row_pieces
from tf2dist.process.tf_internals import dataset_of, table_of

LARGE_BYTES = 16 << 20  # of a table; smaller ones stay in memory
NOT_FILLED = 0x7FC0AB1E  # the bits of the first number of a table that has no values yet, a NaN
METHODS = ("add_weight", "load_own_variables", "save_own_variables")  # of an Embedding, all of them public


class Tables:
    """The files of large tables, each with a number.

    Args:
        folder: where they are; it is made if it is missing. A file may be removed once it is mapped.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._made: dict[int, tuple[keras.Variable, Any]] = {}  # each with its initializer, by id
        self._numbers: dict[int, tuple[keras.Variable, int]] = {}  # by id

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A block in which this thread makes, loads and saves models with large tables in files.

        A model that is made has them in files, which are filled when it is loaded. What is saved of a large table, of
        any model, is the number of its file, which only `Tables` of the same folder understand.
        """
        token = _used.set(self)
        own = {name: vars(keras.layers.Embedding).get(name) for name in METHODS}
        try:
            for name in METHODS:
                setattr(keras.layers.Embedding, name, _method(name, getattr(keras.layers.Embedding, name)))
            yield
            self._draw_rest()
        finally:
            for name, method in own.items():
                if method:
                    setattr(keras.layers.Embedding, name, method)
                else:  # inherited
                    delattr(keras.layers.Embedding, name)
            _used.reset(token)

    def has(self, variable: keras.Variable) -> bool:
        return id(variable) in self._made

    def put(self, table: keras.Variable, rows: Any) -> None:
        """Gives a table its values, piece by piece.

        Args:
            rows: an array in the table's shape, or a dataset in a file.

        Raises:
            OSError: the file cannot be written.
        """
        self._map(table, self._write(table, rows))

    # In place of the methods of an Embedding; `original` is bound to it.

    def add_weight(self, original: Callable[..., Any], layer: Any, *args: Any, **options: Any) -> Any:
        dtype = options.get("dtype") or layer.variable_dtype
        if options.get("name") != "embeddings" or not _is_large(options["shape"], dtype):
            return original(*args, **options)
        # It would draw the whole table in memory, for values that are overwritten.
        initializer = keras.initializers.get(options["initializer"])
        variable = original(*args, **options | {"initializer": lambda shape, dtype: self._not_filled(shape)})
        self._made[id(variable)] = variable, initializer
        return variable

    def load_own_variables(self, original: Callable[..., Any], layer: Any, store: Any) -> None:
        table, saved = table_of(layer), dataset_of(store, "0")
        if table is None or saved is None or not self.has(table) or len(store.keys()) != 1:
            original(store)
        elif saved.shape == ():
            self._map(table, int(saved[()]))
        elif saved.shape == tuple(table.shape) and saved.dtype == np.float32:
            self.put(table, saved)
        else:  # of another model, which Keras reports
            original(store)

    def save_own_variables(self, original: Callable[..., Any], layer: Any, store: Any) -> None:
        table = table_of(layer)
        if table is None or not _is_large(table.shape, table.dtype):
            original(store)
            return
        if id(table) not in self._numbers:
            # Neither `numpy()` nor a tensor of Keras, which make a copy.
            number = self._write(table, np.asarray(tf.convert_to_tensor(table)))
            self._numbers[id(table)] = table, number
        store["0"] = np.array(self._numbers[id(table)][1], np.int64)

    def _not_filled(self, shape: Any) -> tf.Tensor:
        # A file without content takes neither memory nor room on the disk, whatever its size.
        with tempfile.TemporaryFile(dir=self.folder) as file:
            array = np.memmap(file, np.float32, "w+", shape=tuple(shape))
        array.view(np.uint32)[0, 0] = NOT_FILLED
        return _tensor_over(array)

    def _draw_rest(self) -> None:
        """Draws tables that a model has, but not the file from which it was loaded, as Keras does."""
        for table, initializer in self._made.values():
            # Not `sparse_read`, after which TensorFlow copies a variable whenever it is read.
            first = tf.convert_to_tensor(table)[0, :1].numpy()
            if first.view(np.uint32)[0] == NOT_FILLED:
                table.assign(initializer(tuple(table.shape), dtype="float32"))

    def _write(self, table: keras.Variable, rows: Any) -> int:
        number = sum(1 for _ in self.folder.glob("*.table"))
        # Written and then mapped: on a full disk a write into a mapping would end the process.
        with open(self._path(number), "xb") as file:
            for first, last in row_pieces(table):
                file.write(np.ascontiguousarray(rows[first:last], np.float32).data)
        return number

    def _map(self, table: keras.Variable, number: int) -> None:
        path, shape = self._path(number), tuple(table.shape)
        if path.stat().st_size != 4 * np.prod(shape):  # numpy would make a file longer
            raise ValueError(f"{path} does not have the size of a table of {shape}")
        table.assign(_tensor_over(np.memmap(path, np.float32, "r+", shape=shape)))
        self._numbers[id(table)] = table, number

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.table"


def put(variable: keras.Variable, rows: np.ndarray) -> bool:
    """Gives a variable its value if it is a table in a file; otherwise returns False.

    Raises:
        OSError: the file cannot be written.
    """
    tables = _used.get()
    if tables is None or not tables.has(variable):
        return False
    tables.put(variable, rows)
    return True


# Those in use in this thread.
_used: ContextVar[Tables | None] = ContextVar("tables", default=None)


def _method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Embedding that calls the one of this name of the tables in use, or else the original one."""

    @functools.wraps(original)
    def method(layer: Any, *args: Any, **options: Any) -> Any:
        tables = _used.get()
        # A subclass may do anything with its table.
        if tables is None or type(layer) is not keras.layers.Embedding:
            return original(layer, *args, **options)
        return getattr(tables, name)(functools.partial(original, layer), layer, *args, **options)

    return method


def _is_large(shape: Any, dtype: str) -> bool:
    return dtype == "float32" and 4 * int(np.prod(tuple(shape))) >= LARGE_BYTES


def _tensor_over(array: np.ndarray) -> tf.Tensor:
    """A tensor in the memory of an array; a variable to which it is assigned has its values there, too."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
