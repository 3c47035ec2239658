"""Many tensors as few: a transfer costs a call for each tensor, and packing it copies it at either end."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tf2dist.model import eight_bits

# Two copies of so many bytes take about as long as a call, a few tenths of a millisecond.
LARGE_BYTES = 1 << 20


class Shaped(Protocol):
    """What a tensor is packed like: a Keras variable, or another thing with a shape and a type."""

    shape: Any
    dtype: Any


def is_large(one: Shaped) -> bool:
    """Whether a tensor like this one travels alone."""
    return bool(tf.TensorShape(one.shape).num_elements() * tf.as_dtype(one.dtype).size >= LARGE_BYTES)


class Rounded:
    """Floats that travel rounded to a narrower type."""

    def __init__(self, dtype: tf.DType) -> None:
        self._dtype = dtype

    def suits(self, dtype: tf.DType) -> bool:
        """Whether variables of this type travel so."""
        return bool(dtype.is_floating and dtype.size > self._dtype.size)

    def spec(self, own: tf.TensorSpec) -> tf.TensorSpec:
        """The type in which a tensor of this type travels."""
        return tf.TensorSpec(own.shape, self._dtype)

    def encode(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor as it travels."""
        return tf.cast(tensor, self._dtype)

    def decode(self, travelled: tf.Tensor, own: tf.TensorSpec) -> tf.Tensor:
        """The tensor, of its own type."""
        return tf.cast(travelled, own.dtype)


class InEightBits(Rounded):
    """Floats that travel in eight bits; see `eight_bits`."""

    def __init__(self) -> None:
        super().__init__(tf.int8)

    def spec(self, own: tf.TensorSpec) -> tf.TensorSpec:
        return eight_bits.encoded_spec(own)

    def encode(self, tensor: tf.Tensor) -> tf.Tensor:
        return eight_bits.encode(tensor)

    def decode(self, travelled: tf.Tensor, own: tf.TensorSpec) -> tf.Tensor:
        return eight_bits.decode(travelled, own)


class Transfers(NamedTuple):
    """How large floats travel; None for as they are.

    Attributes:
        gradients: how gradients do.
        values: how values of variables do, and everything else.
    """

    gradients: Rounded | None = None
    values: Rounded | None = None


NOT_NARROWED = Transfers()


def transfers_of(name: str) -> Transfers:
    """What the option cluster.transfer_dtype asks for."""
    if name == "float32":
        return NOT_NARROWED
    if name == "int8":  # of weights the digits of eight bits are too few
        return Transfers(InEightBits(), Rounded(tf.bfloat16))
    rounded = Rounded(tf.as_dtype(name))
    return Transfers(rounded, rounded)


class Packing:
    """Packs tensors with the shapes of some variables into one float32 vector."""

    def __init__(self, variables: Sequence[Shaped]) -> None:
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


class Large(NamedTuple):
    """How one large tensor travels.

    Attributes:
        own: its own type.
        travelling: the type in which it travels.
        narrowed: by what it is narrowed; None if it is not.
    """

    own: tf.TensorSpec
    travelling: tf.TensorSpec
    narrowed: Rounded | None

    @classmethod
    def of(cls, own: tf.TensorSpec, dtype: tf.DType | None, narrowed: Rounded | None) -> "Large":
        """See `Buckets`."""
        if narrowed and narrowed.suits(own.dtype):
            return cls(own, narrowed.spec(own), narrowed)
        return cls(own, tf.TensorSpec(own.shape, dtype or own.dtype), None)

    def pack(self, tensor: tf.Tensor) -> tf.Tensor:
        # The gradient of a look-up in a table may come as those rows alone that are not 0, and that of a function
        # outside of TensorFlow without a shape.
        dense = tf.ensure_shape(tf.convert_to_tensor(tensor), self.own.shape)
        return self.narrowed.encode(dense) if self.narrowed else tf.cast(dense, self.travelling.dtype)

    def unpack(self, bucket: tf.Tensor) -> tf.Tensor:
        own = self.narrowed.decode(bucket, self.own) if self.narrowed else _to(self.own.dtype, bucket)
        # Copies nothing. In the branch of a condition Keras' optimizers take only what was made in that branch.
        return tf.identity(own)


class Buckets:
    """Packs tensors with the shapes of some variables into buckets: the small ones into one, each large one alone.

    Attributes:
        specs: the types of the buckets: a float32 vector with the small tensors and what is added to it, then the large
            tensors as they travel.

    Args:
        gradients: the variables of which the first tensors are the gradients.
        others: the variables of those that follow.
        num_more: how many numbers are added to the first bucket.
        dtype: in which the large tensors travel that are not narrowed; None for the types of their variables.
        transfers: how large floats are narrowed.
    """

    def __init__(
        self,
        gradients: Sequence[Shaped],
        others: Sequence[Shaped],
        num_more: int,
        dtype: tf.DType | None = None,
        transfers: Transfers = NOT_NARROWED,
    ) -> None:
        variables = [*gradients, *others]
        types = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        self._is_large = list(map(is_large, variables))
        self._packing = Packing([v for v, alone in zip(variables, self._is_large, strict=True) if not alone])
        narrowed = [transfers.gradients] * len(gradients) + [transfers.values] * len(others)
        ways = zip(types, narrowed, self._is_large, strict=True)
        self._large = [Large.of(own, dtype, by) for own, by, is_large in ways if is_large]
        first = tf.TensorSpec([self._packing.size + num_more], tf.float32)
        self.specs = [first, *(one.travelling for one in self._large)]

    def pack(self, tensors: list[tf.Tensor], *more: tf.Tensor) -> list[tf.Tensor]:
        """The buckets; `more`: the vectors that follow in the first one."""
        pairs = list(zip(tensors, self._is_large, strict=True))
        large = [tensor for tensor, is_large in pairs if is_large]
        packed = [way.pack(tensor) for way, tensor in zip(self._large, large, strict=True)]
        return [self._packing.pack([tensor for tensor, is_large in pairs if not is_large], *more), *packed]

    def unpack(self, buckets: list[tf.Tensor], *more: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors, and the vectors of `more` elements each that followed in the first bucket."""
        first, *rest = buckets
        large = [way.unpack(bucket) for way, bucket in zip(self._large, rest, strict=True)]
        small, others = self._packing.unpack(first, *more)
        return [large.pop(0) if is_large else small.pop(0) for is_large in self._is_large], others


def _to(dtype: tf.DType, tensor: tf.Tensor) -> tf.Tensor:
    """Casts a tensor; a float is rounded first if an integer is wanted."""
    # A whole number that was added up from weighted parts is inexact in float32, and a cast cuts 2.9999998 to 2.
    return tf.cast(tf.round(tensor) if dtype.is_integer and tensor.dtype.is_floating else tensor, dtype)
