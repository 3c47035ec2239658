"""Large tables of embeddings in files that a process maps, with what optimizers hold for each of their rows.

They are for models that look rows up and are not trained, and for models that are only written.

The kernel reads the pages of a mapped file when their rows are looked up, and takes the memory back when it is needed.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from tf2dist.linux import process_wide
from tf2dist.model.shards import row_pieces
from tf2dist.tf_internals.keras import dataset_of, table_of

LARGE_BYTES = 16 << 20  # of a table; smaller ones stay in memory
NOT_FILLED = 0x7FC0AB1E  # the bits of the first number of a table that has no values yet, a NaN
# All of them public. Where no `Tables` are in use they do what they did.
METHODS = {
    keras.layers.Embedding: ("add_weight", "load_own_variables", "save_own_variables"),
    keras.Optimizer: ("add_variable_from_reference", "load_own_variables", "save_own_variables"),
}


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
        self._places: dict[str, tuple[keras.Variable, int]] = {}  # by the place of a number in the file of weights

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A block in which this thread makes, loads and saves models with large tables in files.

        A model that is made has them in files, which are filled when it is loaded. What is saved of a large table, of
        any model, is the number of its file, which only `Tables` of the same folder understand.
        """
        with self.left_empty():
            yield
            for variable, _ in self._made.values():
                self._draw_unless_filled(variable)

    @contextlib.contextmanager
    def left_empty(self) -> Iterator[None]:
        """The same, for a model of which nobody asks what its large tables hold: they take neither memory nor time."""
        with process_wide:
            _replace_methods()
        token = _used.set(self)
        try:
            yield
        finally:
            _used.reset(token)

    @property
    def num_made(self) -> int:
        """How many tables were made, with those of optimizers."""
        return len(self._made)

    def has(self, variable: keras.Variable) -> bool:
        return id(variable) in self._made

    def put(self, table: keras.Variable, rows: Any) -> None:
        """Gives a table its values, piece by piece.

        Args:
            rows: an array in the table's shape, or a dataset in a file.
        """
        self._map(table, self._write(table, rows))

    def make_room_in(self, weights: Path) -> list[tuple[int, Path]]:
        """Gives each table a place in the HDF5 file of the model that was saved, where its number is.

        Returns:
            The first byte of each place, in their order, and the file whose bytes belong there. The file of the model
            has a hole there, so that the bytes of a table are written once, by whoever copies it.
        """
        filled = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        filled.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        filled.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        places = []
        with h5py.File(weights, "r+") as file:
            for place, (variable, number) in self._places.items():
                del file[place]
                space = h5py.h5s.create_simple(tuple(variable.shape))
                dataset = h5py.h5d.create(file.id, place.encode(), h5py.h5t.NATIVE_FLOAT, space, filled)
                places.append((dataset.get_offset(), self._path(number)))
        return sorted(places)

    # In place of the methods of an Embedding or an optimizer, the owner; `original` is bound to it.

    def add_weight(self, original: Callable[..., Any], owner: Any, *args: Any, **options: Any) -> Any:
        dtype = options.get("dtype") or owner.variable_dtype
        if options.get("name") != "embeddings" or not _is_large(options["shape"], dtype):
            return original(*args, **options)
        return self._make(options["initializer"], lambda empty: original(*args, **options | {"initializer": empty}))

    def add_variable_from_reference(
        self,
        original: Callable[..., Any],
        owner: Any,
        reference_variable: Any,
        name: Any = None,
        initializer: Any = "zeros",
    ) -> Any:
        if not self.has(reference_variable):
            return original(reference_variable, name, initializer)
        return self._make(initializer, lambda empty: original(reference_variable, name, empty))

    def load_own_variables(self, original: Callable[..., Any], owner: Any, store: Any) -> None:
        variables = _variables_by_key(owner)
        saved = {key: dataset_of(store, key) for key in variables}
        if store.keys() != variables.keys() or not all(_fits(saved[key], variables[key]) for key in variables):
            original(store)  # nothing that Keras would load, or of another model, which it reports
            return
        for key, variable in variables.items():
            if saved[key].shape != tuple(variable.shape):
                self._map(variable, int(saved[key][()]))
            elif self.has(variable):
                self.put(variable, saved[key])
            else:
                variable.assign(store[key])

    def save_own_variables(self, original: Callable[..., Any], owner: Any, store: Any) -> None:
        variables = _variables_by_key(owner)
        is_table = large_table_of(owner) is not None  # perhaps of a model in memory
        in_files = {key for key, variable in variables.items() if is_table or self.has(variable)}
        if not in_files:
            original(store)
            return
        for key, variable in variables.items():
            store[key] = np.array(self._number_of(variable), np.int64) if key in in_files else variable
        self._places |= {dataset_of(store, key).name: self._numbers[id(variables[key])] for key in in_files}

    def _number_of(self, variable: keras.Variable) -> int:
        """The number of the file with the values of a variable, which is written if there is none yet."""
        if id(variable) not in self._numbers:
            self._draw_unless_filled(variable)
            # Neither `numpy()` nor a tensor of Keras, which make a copy.
            number = self._write(variable, np.asarray(tf.convert_to_tensor(variable)))
            self._numbers[id(variable)] = variable, number
        return self._numbers[id(variable)][1]

    def _make(self, initializer: Any, make: Callable[[Callable[..., tf.Tensor]], Any]) -> Any:
        # The initializer would draw the whole table in memory, for values that are overwritten.
        variable = make(lambda shape, dtype: self._not_filled(shape))
        self._made[id(variable)] = variable, keras.initializers.get(initializer)
        return variable

    def _not_filled(self, shape: Any) -> tf.Tensor:
        # What a file has not been given takes neither memory nor room on the disk, whatever its size.
        with tempfile.TemporaryFile(dir=self.folder) as file:
            file.write(np.uint32(NOT_FILLED).tobytes())
            file.flush()
            return _tensor_over(np.memmap(file, np.float32, "r+", shape=tuple(shape)))

    def _draw_unless_filled(self, variable: keras.Variable) -> None:
        """Draws a variable that was not among what its model or optimizer was loaded from, as Keras does."""
        # Not `sparse_read`, after which TensorFlow copies a variable whenever it is read.
        if self.has(variable) and tf.convert_to_tensor(variable)[0, :1].numpy().view(np.uint32)[0] == NOT_FILLED:
            _, initializer = self._made[id(variable)]
            variable.assign(initializer(tuple(variable.shape), dtype="float32"))

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


def large_table_of(layer: keras.Layer) -> keras.Variable | None:
    """The table of a layer that lies in a file if the layer is made while `Tables` are in use; None for others."""
    table = table_of(layer) if type(layer) is keras.layers.Embedding else None
    return table if table is not None and _is_large(table.shape, table.dtype) else None


def put(variable: keras.Variable, rows: np.ndarray) -> bool:
    """Gives a variable its value if it is a table in a file; otherwise returns False."""
    tables = _used.get()
    if tables is None or not tables.has(variable):
        return False
    tables.put(variable, rows)
    return True


# Those in use in this thread.
_used: ContextVar[Tables | None] = ContextVar("tables", default=None)


@functools.cache
def _replace_methods() -> None:
    # For good: threads that each did it for a time would take them from each other.
    for kind, names in METHODS.items():
        for name in names:
            setattr(kind, name, _method(kind, name, getattr(kind, name)))


def _method(kind: type, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the one of this name of the tables in use, or else the original one."""

    @functools.wraps(original)
    def method(owner: Any, *args: Any, **options: Any) -> Any:
        tables = _used.get()
        # A subclass of Embedding may do anything with its table.
        if tables is None or (kind is keras.layers.Embedding and type(owner) is not kind):
            return original(owner, *args, **options)
        return getattr(tables, name)(functools.partial(original, owner), owner, *args, **options)

    return method


def _variables_by_key(owner: Any) -> dict[str, keras.Variable]:
    """Variables that Keras saves of an optimizer or an Embedding, by its keys; none if it does more than look up."""
    if isinstance(owner, keras.Optimizer):
        return {str(number): variable for number, variable in enumerate(owner.variables)}
    table = table_of(owner)
    return {} if table is None else {"0": table}


def _fits(saved: Any, variable: keras.Variable) -> bool:
    """Whether a dataset holds the values of a variable, or the number of their file."""
    if saved is None or saved.shape == ():
        return saved is not None
    return bool(saved.shape == tuple(variable.shape) and saved.dtype == variable.dtype)


def _is_large(shape: Any, dtype: str) -> bool:
    return dtype == "float32" and 4 * int(np.prod(tuple(shape))) >= LARGE_BYTES


def _tensor_over(array: np.ndarray) -> tf.Tensor:
    """A tensor in the memory of an array; a variable to which it is assigned has its values there, too."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
