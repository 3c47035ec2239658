"""The facts of a run besides its arrays: what a checkpoint must record so that a run can continue from it."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from tf2dist.config.schema import KerasConfig
from tf2dist.declared import UndeclaredError, from_json

WHOLE_NUMBERS = range(2**63)  # what TensorFlow's integers hold
Count = Annotated[int, WHOLE_NUMBERS]
Size = Annotated[int, WHOLE_NUMBERS[1:]]


@dataclass(frozen=True)
class ShardingFacts:
    """How the training set was divided into batches; see `passes.Sharding` and `AggregatedSharding`."""

    num_examples: Size
    batch_size: Size
    num_shards: Size
    seed: int
    whole_batch_loss: bool
    shuffle: bool
    replicas_to_aggregate: Size | None = None


@dataclass(frozen=True)
class InputFacts:
    """The position in the training data.

    Attributes:
        position, unseen: see `passes.InputPosition`. The position is None in checkpoints of streams, and in those of
            tf2dist before it had one.
        positions: the number of the next batch of each worker, where each has its own: that of its stream, or with
            mode=sync_replicas and backup workers that of its part of the arrays.
    """

    sharding: ShardingFacts
    position: Count | None = None
    unseen: tuple[tuple[Count, Count], ...] = ()
    positions: tuple[Count, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run at one step, in the order of the manifest.

    Attributes:
        local_steps: the steps of each worker that are part of the global step.
        target_step: the step at which the run ends.
        examples: how many all workers have seen in the whole run.
        data: the name of the data set.
        model, optimizer: name and arguments.
        keras: Keras's settings.
    """

    mode: str
    local_steps: tuple[Count, ...]
    target_step: Count
    examples: Count
    input: InputFacts
    data: str
    model: dict[str, Any]
    optimizer: dict[str, Any]
    seed: int
    keras: KerasConfig

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Facts":
        """Reads what `to_json` of this or another version has written; unknown fields are ignored.

        Raises:
            ValueError: names the first fact that is missing or of another type.
        """
        try:
            facts = from_json(cls, values, is_open=True)
            # Types alone do not show this, and a worker without a position would fail far from here.
            positions = facts.input.positions
            if len(positions) != facts.input.sharding.num_shards and (positions or facts.input.position is None):
                raise UndeclaredError("input.positions", repr(positions))
        except UndeclaredError as error:
            raise ValueError(f"does not say what it must ({error.where})") from None
        return facts

    @property
    def epochs(self) -> float:
        """Passes over the training set."""
        return self.examples / self.input.sharding.num_examples

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = asdict(self)
        # Left out where it is that of the workers, so that all modes write the same.
        if values["input"]["sharding"]["replicas_to_aggregate"] is None:
            del values["input"]["sharding"]["replicas_to_aggregate"]
        return values
