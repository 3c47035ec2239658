"""Where an asynchronous run begins: its counts, and where each worker's input goes on."""

from dataclasses import dataclass

import numpy as np

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import input_positions
from tf2dist.data.pipeline import Sharding
from tf2dist.training.asynchronous.counters import MAX_STALENESS, TOTALS, Counts

TOTALS_ARRAY, STALENESS_ARRAY = "async_counts", "async_staleness"  # the names of these arrays in a snapshot


@dataclass(frozen=True)
class Origin:
    """Where a run begins.

    Attributes:
        counts: what the counters of the ps begin with; the totals are 0 if the snapshot has none for as many workers.
        offsets: for each worker, its position in its input less the steps in its totals, int [workers].
        earlier_steps, earlier_examples: those of the run that are not in the totals.
    """

    counts: Counts
    offsets: np.ndarray
    earlier_steps: int
    earlier_examples: int

    @classmethod
    def of(cls, start: Snapshot | None, sharding: Sharding, num_metrics: int) -> "Origin":
        step, examples = (start.step, start.facts.examples) if start else (0, 0)
        totals = np.zeros((sharding.num_shards, len(TOTALS)))
        staleness = np.zeros(MAX_STALENESS + 1, np.int64)
        shapes = {TOTALS_ARRAY: totals.shape, STALENESS_ARRAY: staleness.shape}
        if start and all(start.arrays.get(name, np.empty(0)).shape == shape for name, shape in shapes.items()):
            totals, staleness = start.arrays[TOTALS_ARRAY], start.arrays[STALENESS_ARRAY]
        counts = Counts(step, totals, np.zeros(num_metrics), staleness)
        offsets = np.array(input_positions(start, sharding)) - counts.steps
        return cls(counts, offsets, step - int(counts.steps.sum()), examples - counts.examples)
