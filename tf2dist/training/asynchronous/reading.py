"""Reading all variables of a run at once: a call to a ps costs a millisecond, and Adam keeps two more a weight."""

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.state import Named, finite, values
from tf2dist.model.packing import Packing

MAX_PACKED_BYTES = 64 << 20  # of a ps; above, variables are read one by one, since a packed vector is a copy on the ps


class OnDevice(Protocol):
    """What has variables on one ps, and can place functions there."""

    device: str

    def on_device(self, function: Any, *signature: tf.TensorSpec) -> Any: ...


class PackedRead:
    """Reads the variables of a run while no task trains.

    The functions are made in the constructor: on many hosts none may be made during the training, not even those of
    TensorFlow that would take a vector apart. So numpy does that.
    """

    def __init__(self, named: Named, servers: Sequence[OnDevice]) -> None:
        self._names = list(named)
        self._rest = dict(named)
        self._parts: list[tuple[dict[str, tuple[int, ...]], Packing, Any]] = []
        for server in servers:
            # Of several variables with one name, which every ps has of its own, the first counts, as in `values`.
            own = {name: found[0] for name, found in named.items() if _is_packed(found[0], server.device)}
            packing = Packing(list(own.values()))
            if not own or 4 * packing.size > MAX_PACKED_BYTES:
                continue
            shapes = {name: tuple(variable.shape) for name, variable in own.items()}
            self._parts.append((shapes, packing, server.on_device(_packer(packing, list(own.values())))))
            for name in own:
                del self._rest[name]

    def arrays(self) -> dict[str, np.ndarray]:
        """The values of all variables by name, in the order of their names in the run.

        Raises:
            NotFiniteError: one is not finite.
        """
        found = values(self._rest)
        for shapes, packing, read in self._parts:
            parts = np.split(read().numpy(), np.cumsum(packing.sizes)[:-1])
            found |= finite({name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)})
        # The order of the names decides the order of the arrays in a checkpoint.
        return {name: found[name] for name in self._names}


def _is_packed(variable: keras.Variable, device: str) -> bool:
    # The packed vector is float32, which holds neither large whole numbers nor float64 exactly.
    return bool(variable.dtype == "float32" and variable.value.device == device)


def _packer(packing: Packing, variables: list[keras.Variable]) -> Any:
    def read() -> tf.Tensor:
        return packing.pack([variable.value.read_value() for variable in variables])

    return read
