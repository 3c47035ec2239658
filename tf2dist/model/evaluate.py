"""Exact evaluation: sums over disjoint ranges, added up and checked against the number of examples."""

import math
from dataclasses import dataclass

import numpy as np

from tf2dist.errors import NotFiniteError, TrainingError

MAX_CHUNK = 1000  # examples for each forward pass
MAX_CHUNK_BYTES = 4 << 20  # of their images as float32; a model needs some ten times as much


@dataclass(frozen=True)
class Evaluation:
    accuracy: float
    loss: float
    num_examples: int

    @classmethod
    def of_sums(cls, sums: np.ndarray, num_examples: int) -> "Evaluation":
        """Turns the sums (loss, correct, examples) over a split into means.

        Raises:
            NotFiniteError: the loss is not finite.
            TrainingError: not every example was counted exactly once.
        """
        loss, correct, counted = (float(value) for value in sums)
        if counted != num_examples:
            raise TrainingError(f"evaluation counted {counted:.0f} of {num_examples} examples")
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss is {loss} in the evaluation; try a lower learning rate")
        return cls(correct / counted, loss / counted, num_examples)


def chunk_size(batch_size: int, image_shape: tuple[int, ...]) -> int:
    """Examples for each forward pass: a training step's, which surely fit into memory, or more if they are small."""
    small = MAX_CHUNK_BYTES // (4 * math.prod(image_shape))
    return min(MAX_CHUNK, max(batch_size, small))


def chunks(num_examples: int, size: int, shard: int = 0, num_shards: int = 1) -> list[tuple[int, int]]:
    """The ranges (first, last) that one of `num_shards` workers evaluates; together they cover all."""
    ranges = [(first, min(first + size, num_examples)) for first in range(0, num_examples, size)]
    return ranges[shard::num_shards]
