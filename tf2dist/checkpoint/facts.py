"""The facts of a run beside its arrays: what a checkpoint must say for a run to go on from it."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from tf2dist.config.schema import KerasConfig
from tf2dist.declared import UndeclaredError, made

WHOLE_NUMBERS = range(2**63)  # what TensorFlow's integers hold
Count = Annotated[int, WHOLE_NUMBERS]
Size = Annotated[int, WHOLE_NUMBERS[1:]]


@dataclass(frozen=True)
class ShardingFacts:
    """How the training set was cut into batches; see `pipeline.Sharding`."""

    num_examples: Size
    batch_size: Size
    num_shards: Size
    seed: int
    whole_batch_loss: bool
    shuffle: bool = True  # older checkpoints do not say it


@dataclass(frozen=True)
class InputFacts:
    """Where the input stood.

    Attributes:
        positions: the local step at which each shard goes on.
    """

    sharding: ShardingFacts
    positions: tuple[Count, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run says of itself at one step, in the order of the file.

    Attributes:
        local_steps: steps of each worker that are part of the global step.
        target_step: at which the run ends; the first checkpoints did not have it.
        examples: seen by all workers, in the whole run.
        data: the name of the data set.
        model, optimizer: name and arguments.
        keras: its settings; older checkpoints have none.
    """

    mode: str
    local_steps: tuple[Count, ...]
    target_step: Count | None = None
    examples: Count
    input: InputFacts
    data: str
    model: dict[str, Any]
    optimizer: dict[str, Any]
    seed: int
    keras: KerasConfig | None = None

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> "Facts":
        """Of what `to_json` gave, in this version or another; what else is there is left out.

        Raises:
            ValueError: names the first fact that is missing or of another kind.
        """
        try:
            facts = made(cls, found, is_open=True)
            if len(facts.input.positions) != facts.input.sharding.num_shards:
                raise UndeclaredError("input.positions", repr(facts.input.positions))
        except UndeclaredError as error:
            raise ValueError(f"does not say what it must ({error.where})") from None
        return facts

    @property
    def epochs(self) -> float:
        """Passes over the training set."""
        return self.examples / self.input.sharding.num_examples

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold; without what is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def is_whole(value: Any) -> bool:
    """Whether it can count something; True cannot, although Python takes it for 1."""
    return type(value) is int and value in WHOLE_NUMBERS
