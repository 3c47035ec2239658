"""Where a synchronous run begins: its counts, and where the input of all replicas goes on."""

from dataclasses import dataclass

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import input_positions
from tf2dist.data.pipeline import Sharding


@dataclass(frozen=True)
class Origin:
    """Where a run begins.

    Attributes:
        step: updates that were applied before.
        examples: seen before, by all workers.
        position: steps that each replica has taken of its shard before.
        earlier_steps: the updates in `step` that were not applied by this number of synchronous workers.
    """

    step: int
    examples: int
    position: int
    earlier_steps: int

    @classmethod
    def of(cls, start: Snapshot | None, sharding: Sharding, num_workers: int) -> "Origin":
        position = input_positions(start, sharding)[0]
        if start is None:
            return cls(0, 0, position, 0)
        local_steps = start.facts.local_steps if start.facts.mode == "sync" else ()
        earlier_steps = start.step - (local_steps[0] if len(local_steps) == num_workers else 0)
        return cls(start.step, start.facts.examples, position, earlier_steps)
