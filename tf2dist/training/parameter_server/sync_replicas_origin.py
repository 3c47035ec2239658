"""Where a run of mode=sync_replicas begins: its counts, and the position of each worker's input."""

from dataclasses import dataclass

import numpy as np

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import input_positions
from tf2dist.data.pipeline import Sharding

GRADIENTS_ARRAY = "replicas_gradients"  # the name in a snapshot: those of each worker, aggregated and dropped


@dataclass(frozen=True)
class Origin:
    """Where a run begins.

    Attributes:
        step, examples: those of the run so far.
        aggregated, dropped: the gradients of each worker, int64 [workers]; 0 if the snapshot has none for as many.
        offsets: for each worker, the number of its next batch less its gradients.
    """

    step: int
    examples: int
    aggregated: np.ndarray
    dropped: np.ndarray
    offsets: list[int]

    @classmethod
    def of(cls, start: Snapshot | None, sharding: Sharding) -> "Origin":
        gradients = np.zeros((2, sharding.num_shards), np.int64)
        if start and start.arrays.get(GRADIENTS_ARRAY, np.empty(0)).shape == gradients.shape:
            gradients = start.arrays[GRADIENTS_ARRAY]
        offsets = np.array(input_positions(start, sharding)) - gradients.sum(0)
        step, examples = (start.step, start.facts.examples) if start else (0, 0)
        return cls(step, examples, gradients[0], gradients[1], list(map(int, offsets)))
