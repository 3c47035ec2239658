"""Large gradients in eight bits: in a graph of TensorFlow, and as numpy adds them up.

SIZE floats share a scale, which is the largest of them divided by 127, and each of them becomes a whole multiple of it:
the one below or the one above, at random, with such probabilities that the mean is the float itself, to within 2^-17
of the scale (Alistarh et al.: QSGD, NeurIPS 2017). So gradients much smaller than the scale are not lost over many
steps. Error feedback reaches the same by adding to the next gradient what was rounded off the last one; but that would
be as large as the model on every worker, and would have to be saved and cut anew for a run that goes on with other
workers. The random numbers here follow from the gradient, so equal gradients are rounded alike: a synchronous run that
is resumed repeats them.
"""

import zlib

import numpy as np
import tensorflow as tf

SIZE = 256
# The part of the largest float of a block that a step between two multiples is: slightly more than 1 / 127, so that the
# highest multiple, to which less than 1 is added before it is rounded down, is never 128.
STEP = 1.000001 / 127
DRAWS = 65536
BLOCK = np.dtype([("scale", "<f4"), ("values", "i1", SIZE)])
SCALE_BYTES = BLOCK.itemsize - SIZE
TINY = np.finfo(np.float32).tiny


def encoded_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
    """The type of what `encode` makes: blocks as bytes, [n, BLOCK.itemsize]."""
    return tf.TensorSpec([-(-spec.shape.num_elements() // SIZE), BLOCK.itemsize], tf.uint8)


def encode(tensor: tf.Tensor) -> tf.Tensor:
    """The blocks of a tensor of floats, of `encoded_spec`; one that is not finite makes its block not finite."""
    flat = tf.reshape(tf.cast(tensor, tf.float32), [-1])
    blocks = tf.reshape(tf.pad(flat, [[0, -flat.shape[0] % SIZE]]), [-1, SIZE])
    # Not by absolute values, which would be another tensor of this size.
    highest = tf.maximum(tf.reduce_max(blocks, 1, keepdims=True), -tf.reduce_min(blocks, 1, keepdims=True))
    sums = tf.reduce_sum(blocks, 1, keepdims=True)
    # The largest of numbers that are no numbers is another one with XLA; a sum is none with either.
    scales = tf.where(tf.math.is_nan(sums), sums, highest * STEP)
    seed = tf.bitcast(tf.stack([tf.reduce_sum(sums), tf.reduce_sum(scales)]), tf.int32)
    up = tf.cast(_draws(seed, blocks.shape[0]), tf.float32) / DRAWS
    multiples = tf.floor(blocks * tf.math.divide_no_nan(1.0, scales) + up)
    values = tf.bitcast(tf.cast(multiples, tf.int8), tf.uint8)
    return tf.concat([tf.reshape(tf.bitcast(scales, tf.uint8), [-1, SCALE_BYTES]), values], axis=1)


def _draws(seed: tf.Tensor, num_blocks: int) -> tf.Tensor:
    """Random whole numbers below DRAWS, uint16 [num_blocks, SIZE]."""
    pairs = tf.random.stateless_uniform([num_blocks, SIZE // 2], seed, minval=None, maxval=None, dtype=tf.uint32)
    return tf.reshape(tf.bitcast(pairs, tf.uint16), [-1, SIZE])


def decode(blocks: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """The tensor of type `spec` from its blocks."""
    scales = tf.bitcast(blocks[:, :SCALE_BYTES], tf.float32)[:, tf.newaxis]
    values = tf.cast(tf.bitcast(blocks[:, SCALE_BYTES:], tf.int8), tf.float32) * scales
    flat = tf.reshape(values, [-1])[: spec.shape.num_elements()]
    return tf.cast(tf.reshape(flat, spec.shape), spec.dtype)


@np.errstate(invalid="ignore", over="ignore")  # of blocks that are not finite
def add(summands: list[np.ndarray], into: np.ndarray, total: np.ndarray, room: np.ndarray) -> None:
    """Adds up blocks in float32, and rounds the sum to blocks.

    Args:
        summands, into: BLOCK [n].
        total, room: float32 [n * SIZE], which are overwritten.
    """
    total, room = total.reshape(-1, SIZE), room.reshape(-1, SIZE)
    first, *others = summands
    _widen(first, total)
    for summand in others:
        _widen(summand, room)
        total += room
    scales = np.maximum(total.max(axis=1), -total.min(axis=1)) * np.float32(STEP)
    scales += np.float32(0)  # makes -0 to 0: which of them is the larger one depends on the processor
    # All workers that add these blocks draw the same numbers.
    draws = np.random.SFC64(zlib.crc32(scales)).random_raw(total.size // 4).view(np.uint16)
    np.divide(draws.reshape(-1, SIZE), np.float32(DRAWS), out=room)
    total *= np.where(scales > 0, 1 / np.maximum(scales, TINY), 0)[:, None]
    total += room
    into["values"] = np.floor(total, out=total)
    into["scale"] = scales


def _widen(blocks: np.ndarray, into: np.ndarray) -> None:
    """The floats of blocks; `into`: float32 [n, SIZE]."""
    np.copyto(into, blocks["values"])
    into *= blocks["scale"][:, None]
