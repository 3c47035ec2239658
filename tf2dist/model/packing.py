"""Many tensors as few: a transfer costs a call for each tensor, and packing it copies it at either end."""

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

# Two copies of this size take about as long as a call, a few tenths of a millisecond.
LARGE_BYTES = 1 << 20
# The types of which float32 does not hold all values, such as ids above 2^24.
BITWISE = (tf.int32, tf.int64, tf.uint32, tf.uint64, tf.float64)


class Shaped(Protocol):
    """A shape and a type by which a tensor is packed: a Keras variable, for example."""

    shape: Any
    dtype: Any


def is_large(tensor: Shaped) -> bool:
    """Whether a tensor like this one travels alone."""
    return bool(tf.TensorShape(tensor.shape).num_elements() * tf.as_dtype(tensor.dtype).size >= LARGE_BYTES)


def narrow_dtype(name: str) -> tf.DType | None:
    """The type that the option cluster.transfer_dtype asks for; None if floats travel as they are."""
    return None if name == "float32" else tf.as_dtype(name)


class Packing:
    """Packs tensors with the shapes of some variables into one float32 vector.

    Args:
        exact: whether types that float32 does not hold travel bit by bit, as two elements where they are wider; then
            nothing may be computed with the vector.
    """

    def __init__(self, variables: Sequence[Shaped], exact: bool = False) -> None:
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
        self._are_bits = [exact and dtype in BITWISE for dtype in self._dtypes]
        self.sizes = [
            tf.TensorShape(shape).num_elements() * (dtype.size // tf.float32.size if are_bits else 1)
            for shape, dtype, are_bits in zip(self._shapes, self._dtypes, self._are_bits, strict=True)
        ]
        self.size = sum(self.sizes)

    def pack(self, tensors: list[tf.Tensor], *vectors: tf.Tensor) -> tf.Tensor:
        """One vector: the `size` elements of the tensors, followed by the vectors."""
        pairs = zip(tensors, self._are_bits, strict=True)
        numbers = [(tf.bitcast if are_bits else tf.cast)(tensor, tf.float32) for tensor, are_bits in pairs]
        return tf.concat([*(tf.reshape(one, [-1]) for one in numbers), *vectors], axis=0)

    def unpack(self, vector: tf.Tensor, *sizes: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors in their shapes and types, and the vectors of `sizes` elements that follow."""
        parts = tf.split(vector, [*self.sizes, *sizes])
        tensor_parts, others = parts[: len(self.sizes)], parts[len(self.sizes) :]
        kinds = zip(tensor_parts, self._shapes, self._dtypes, self._are_bits, strict=True)
        return [
            _from_bits(dtype, shape, part) if are_bits else _to(dtype, tf.reshape(part, shape))
            for part, shape, dtype, are_bits in kinds
        ], others


class Buckets:
    """Packs tensors with the shapes of some variables into buckets: the small ones into one, each large one alone.

    Attributes:
        specs: the types of the buckets: a float32 vector with the small tensors and what is added to it, then the large
            tensors as they travel.

    Args:
        num_more: how many numbers are added to the first bucket.
        dtype: in which the large tensors travel; None for the types of their variables.
        narrow: in which those of them travel whose variables have a wider type of floats, such as bfloat16; None for
            no other type than `dtype`.
    """

    def __init__(
        self,
        variables: Sequence[Shaped],
        num_more: int,
        dtype: tf.DType | None = None,
        narrow: tf.DType | None = None,
    ) -> None:
        self._is_large = list(map(is_large, variables))
        small = [v for v, alone in zip(variables, self._is_large, strict=True) if not alone]
        self._packing = Packing(small, exact=dtype is None)
        large = [v for v, alone in zip(variables, self._is_large, strict=True) if alone]
        self._large_dtypes = [tf.as_dtype(variable.dtype) for variable in large]

        def sent_dtype(variable_dtype: tf.DType) -> tf.DType:
            is_wider = narrow and variable_dtype.is_floating and variable_dtype.size > narrow.size
            return narrow if is_wider else dtype or variable_dtype

        sent = [
            tf.TensorSpec(variable.shape, sent_dtype(variable_dtype))
            for variable, variable_dtype in zip(large, self._large_dtypes, strict=True)
        ]
        self.specs = [tf.TensorSpec([self._packing.size + num_more], tf.float32), *sent]

    def pack(self, tensors: list[tf.Tensor], *vectors: tf.Tensor) -> list[tf.Tensor]:
        """The buckets; `vectors`: those that follow in the first one."""
        pairs = list(zip(tensors, self._is_large, strict=True))
        large = [tensor for tensor, is_large in pairs if is_large]
        # The gradient of a function outside of TensorFlow may come without a shape.
        specs = zip(large, self.specs[1:], strict=True)
        travelling = [tf.cast(tf.ensure_shape(tensor, spec.shape), spec.dtype) for tensor, spec in specs]
        return [self._packing.pack([tensor for tensor, is_large in pairs if not is_large], *vectors), *travelling]

    def unpack(self, buckets: list[tf.Tensor], *sizes: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors, and the vectors of `sizes` elements that followed in the first bucket."""
        first, *rest = buckets
        # The identity copies nothing. In the branch of a condition Keras' optimizers take only what was made there.
        large = [tf.identity(_to(dtype, bucket)) for dtype, bucket in zip(self._large_dtypes, rest, strict=True)]
        small, others = self._packing.unpack(first, *sizes)
        return [large.pop(0) if is_large else small.pop(0) for is_large in self._is_large], others


def _to(dtype: tf.DType, tensor: tf.Tensor) -> tf.Tensor:
    """Casts a tensor; a float is rounded first if an integer is wanted."""
    # A whole number that was added up from weighted parts is inexact in float32, and a cast cuts 2.9999998 to 2.
    return tf.cast(tf.round(tensor) if dtype.is_integer and tensor.dtype.is_floating else tensor, dtype)


def _from_bits(dtype: tf.DType, shape: tuple[int, ...], vector: tf.Tensor) -> tf.Tensor:
    """The numbers whose bits are a float32 vector."""
    each = [] if dtype.size == tf.float32.size else [dtype.size // tf.float32.size]
    return tf.bitcast(tf.reshape(vector, [*shape, *each]), dtype)
