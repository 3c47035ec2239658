"""Where a synchronous run begins: its counts, and the position of the input of all replicas."""

from dataclasses import dataclass

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import input_positions
from tf2dist.data.pipeline import Sharding


@dataclass(frozen=True)
class Origin:
    """Where a run begins.

    Attributes:
        step: the updates that were applied before.
        examples: the examples that all workers had seen before.
        position: the number of the first batch of each replica's shard.
        earlier_steps: the updates in `step` that were not applied by synchronous workers of this number.
    """

    step: int
    examples: int
    position: int
    earlier_steps: int

    @classmethod
    def of(cls, start: Snapshot | None, sharding: Sharding, num_workers: int) -> "Origin":
        # Synchronous replicas take their steps together, so all of them have the same position.
        position = input_positions(start, sharding)[0]
        if start is None:
            return cls(0, 0, position, 0)
        # The local steps of another mode or number of workers do not belong to the workers of this run.
        local_steps = start.facts.local_steps if start.facts.mode == "sync" else ()
        earlier_steps = start.step - (local_steps[0] if len(local_steps) == num_workers else 0)
        return cls(start.step, start.facts.examples, position, earlier_steps)
