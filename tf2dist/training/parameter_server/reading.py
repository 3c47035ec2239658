"""Reading all variables of a run: small ones at once, since a call to a ps costs a millisecond; large ones later.

Tables of which a training updates rows are read piece by piece, into a file: they may be larger than the memory here.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.state import Named, infinite_in, savable, values
from tf2dist.model.packing import Packing
from tf2dist.model.shards import parts_of, read_piece
from tf2dist.process import heartbeat
from tf2dist.tf_internals.variables import PartitionedVariable
from tf2dist.training.parameter_server.server import ModelPart

MAX_PACKED_BYTES = 64 << 20  # of a ps; above, nothing is packed: a packed vector is a copy on the ps, and takes time

Arrays = dict[str, np.ndarray]


class PackedRead:
    """Reads the variables of a run as they are at a moment when no task trains.

    The functions are made in the constructor: on many hosts none may be made during the training, not even those of
    TensorFlow that would take a vector apart. So numpy does that.

    Args:
        by_row: the names of those that are read piece by piece; see `names_by_row`.
        folder: for files, which have no names and end with their arrays; None for that of temporary files.
    """

    def __init__(
        self, named: Named, servers: Sequence[ModelPart], by_row: Collection[str] = (), folder: str | None = None
    ) -> None:
        self._names, self._by_row, self._folder = list(named), by_row, folder
        self._infinite = infinite_in(named)
        for name in by_row:
            read_piece(named[name][0], 0, 1)
        self._packed: list[tuple[dict[str, tuple[int, ...]], Packing, Any]] = []
        self._kept: list[tuple[list[tuple[str, int]], Any]] = []
        others = {name: variables for name, variables in named.items() if name not in by_row}
        on_servers = [(server, _parts_on(others, server.device)) for server in servers]
        if any(_num_bytes(parts) > MAX_PACKED_BYTES for _, parts in on_servers):
            for server, parts in on_servers:
                self._kept.append((list(parts), server.on_device(_reader(list(parts.values())))))
        else:
            for server, parts in on_servers:
                self._pack(server, {name: v for (name, _), v in parts.items() if len(parts_of(named[name][0])) == 1})
        read = {name for keys, _ in self._kept for name, _ in keys}
        read |= {name for shapes, _, _ in self._packed for name in shapes}
        self._rest = {name: variables for name, variables in named.items() if name not in read}
        self._wholes = {name: named[name][0].value for keys, _ in self._kept for name, _ in keys}

    def freeze(self) -> Callable[[], Arrays]:
        """Keeps what the variables hold now; the result returns it by name, once, in the order of the run's names.

        It may be called from any thread, and while tasks train: a ps that changes a variable leaves the memory alone
        that somebody still has to read, and takes other memory for the new value. Of a table this would be a copy of
        all its rows on the ps, so tables are fetched at once.
        """
        arrays = values(self._rest, self._by_row, self._folder, heartbeat.progress)
        for shapes, packing, read in self._packed:
            parts = np.split(read().numpy(), np.cumsum(packing.sizes)[:-1])
            whole = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
            arrays |= savable(whole, self._infinite)
        kept: dict[str, dict[int, tf.Tensor]] = {}
        for keys, read in self._kept:
            for (name, number), tensor in zip(keys, read(), strict=True):
                kept.setdefault(name, {})[number] = tensor

        def fetch() -> Arrays:
            # One after the other, so that the ps can free each, and no part is in memory with all of the whole.
            for name in list(kept):
                arrays.update(savable({name: _joined(kept.pop(name), self._wholes[name])}, self._infinite))
            # The order of the names decides the order of the arrays in a checkpoint.
            return {name: arrays[name] for name in self._names}

        return fetch

    def _pack(self, server: ModelPart, variables: dict[str, keras.Variable]) -> None:
        if not variables:
            return
        read, shapes = list(variables.values()), {name: tuple(v.shape) for name, v in variables.items()}
        packing = Packing(read)

        def pack() -> tf.Tensor:
            return packing.pack([variable.value.read_value() for variable in read])

        self._packed.append((shapes, packing, server.on_device(pack)))


def _parts_on(named: Named, device: str) -> dict[tuple[str, int], keras.Variable]:
    """Variables on a ps, by the name of the variable and the number of the part."""
    # Of several variables with one name, which every ps has of its own, the first counts, as in `values`. The packed
    # vector is float32, which holds neither large whole numbers nor float64 exactly.
    return {
        (name, number): part
        for name, (first, *_) in named.items()
        for number, part in enumerate(parts_of(first))
        if part.dtype == "float32" and part.value.device == device
    }


def _num_bytes(variables: dict[Any, keras.Variable]) -> int:
    return 4 * sum(int(np.prod(variable.shape)) for variable in variables.values())


def _joined(parts: dict[int, tf.Tensor], whole: tf.Variable | PartitionedVariable) -> np.ndarray:
    """The value of a variable from those of its parts on the ps."""
    array = np.empty(whole.shape.as_list(), np.float32)
    rows: list[Any] = whole.rows if isinstance(whole, PartitionedVariable) else [...]
    for number in sorted(parts):
        # Copied by an operation first: `numpy` holds Python's lock until it has the value.
        with tf.device("CPU:0"):
            local = tf.identity(parts.pop(number))
        array[rows[number]] = local.numpy()
    return array


def _reader(variables: list[keras.Variable]) -> Any:
    def read() -> list[tf.Tensor]:
        return [variable.value.read_value() for variable in variables]

    return read
