"""Where an asynchronous run begins: its counts, and the position of each worker's input."""

from dataclasses import dataclass

import numpy as np

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import input_positions
from tf2dist.data.pipeline import Sharding
from tf2dist.training.parameter_server.counters import MAX_STALENESS, TOTALS, Counts

TOTALS_ARRAY, STALENESS_ARRAY = "async_counts", "async_staleness"  # the names of these arrays in a snapshot


@dataclass(frozen=True)
class Origin:
    """Where a run begins.

    Attributes:
        counts: the first values of the ps's counters; the totals are 0 if the snapshot has none for as many workers.
        offsets: for each worker, the number of its next batch less the steps in its totals, int [workers].
        earlier_steps, earlier_examples: those of the run that the totals do not contain.
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
        # The snapshot of another number of workers, or of another mode, does not say which worker took which step.
        shapes = {TOTALS_ARRAY: totals.shape, STALENESS_ARRAY: staleness.shape}
        if start and all(start.arrays.get(name, np.empty(0)).shape == shape for name, shape in shapes.items()):
            totals, staleness = start.arrays[TOTALS_ARRAY], start.arrays[STALENESS_ARRAY]
        # The sums of the metrics begin at 0 in every process; an epoch that is cut keeps its own in the snapshot.
        counts = Counts(step, totals, np.zeros(num_metrics), staleness)
        offsets = np.array(input_positions(start, sharding)) - counts.steps
        return cls(counts, offsets, step - int(counts.steps.sum()), examples - counts.examples)
