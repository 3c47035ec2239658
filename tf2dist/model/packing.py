"""Many tensors in one vector: a transfer costs a call for each tensor, whatever its size."""

import keras
import tensorflow as tf


class Packing:
    """Packs tensors with the shapes of some variables into one float32 vector."""

    def __init__(self, variables: list[keras.Variable]) -> None:
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
        self.sizes = [tf.TensorShape(shape).num_elements() for shape in self._shapes]
        self.size = sum(self.sizes)

    def pack(self, tensors: list[tf.Tensor], *more: tf.Tensor) -> tf.Tensor:
        """One vector: the `size` elements of the tensors, followed by the vectors `more`."""
        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
        return tf.concat([*flat, *more], axis=0)

    def unpack(self, vector: tf.Tensor, *more: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors in their shapes and types, and the vectors of `more` elements each that follow."""
        parts = tf.split(vector, [*self.sizes, *more])
        own, others = parts[: len(self.sizes)], parts[len(self.sizes) :]
        shaped = zip(own, self._shapes, self._dtypes, strict=True)
        return [_to(dtype, tf.reshape(part, shape)) for part, shape, dtype in shaped], others


def _to(dtype: tf.DType, tensor: tf.Tensor) -> tf.Tensor:
    """Casts a tensor; for an integer type it is rounded first."""
    # A whole number that was added up from weighted parts is inexact in float32, and a cast cuts 2.9999998 to 2.
    return tf.cast(tf.round(tensor) if dtype.is_integer else tensor, dtype)
