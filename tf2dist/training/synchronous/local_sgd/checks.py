"""What cannot be trained with local steps and exactly, refused before the first step."""

import keras

from tf2dist.checkpoint.state import finalizes
from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Splits
from tf2dist.errors import ConfigError
from tf2dist.model.checks import check_aggregation, check_unsynchronized
from tf2dist.model.step import ModelStep
from tf2dist.training.synchronous.local_sgd.slots import slots_of
from tf2dist.training.synchronous.workers import Workers

MAX_EXAMPLES = 1 << 24  # up to here float32, in which workers add up what they have seen, holds every whole number


def check(
    name: str, config: RunConfig, workers: Workers, splits: Splits, step: ModelStep, optimizer: keras.Optimizer
) -> None:
    """Refuses what cannot be trained in rounds of local steps.

    Args:
        name: of the model.
        optimizer: already built for `step.trainable`.

    Raises:
        ConfigError: says what, and the way out.
    """
    if workers.num_replicas > workers.count:
        raise ConfigError(
            "algorithm (local_sgd): the GPUs of a worker share its variables and cannot take steps of their own; use a "
            "worker for each GPU"
        )
    _check_length(config, workers.count)
    if workers.count > 1:
        check_aggregation(name, step, "algorithm=local_sgd")
    check_unsynchronized(name, step.model, "algorithm=local_sgd", "algorithm=plain")
    # What the sum over the batches of a step is, a worker can estimate from its own only if it knows the others' sizes.
    if splits.stream and step.sums_losses:
        raise ConfigError(
            f"model ({name}): has a loss with reduction=sum, and with algorithm=local_sgd no worker knows how large "
            "the batches of the others' streams are; use sum_over_batch_size, or algorithm=plain"
        )
    _check_optimizer(config, optimizer)


def _check_length(config: RunConfig, num_workers: int) -> None:
    length = config.algorithm.local_steps
    most = MAX_EXAMPLES // (config.train.batch_size_per_worker * num_workers)
    if length > most:
        raise ConfigError(
            f"algorithm.local_steps ({length}): a round would have more than {MAX_EXAMPLES:,} examples, up to which "
            f"they are counted exactly; give at most {most:,}"
        )


def _check_optimizer(config: RunConfig, optimizer: keras.Optimizer) -> None:
    kind = type(optimizer).__name__
    # What workers add up are differences, and these types have no negative ones.
    odd = [slot for slot in slots_of(optimizer) if slot.dtype == "bool" or slot.dtype.startswith("uint")]
    if odd:
        raise ConfigError(
            f"optimizer ({kind}): {odd[0].path} is of type {odd[0].dtype}, of which several workers have no mean; make "
            "it float32 or int32, or use algorithm=plain"
        )
    if config.algorithm.has_outer_steps and finalizes(optimizer):
        raise ConfigError(
            f"optimizer ({kind}): its final weights are averages over the steps of the workers, which leave out those "
            "of the outer optimizer; leave out algorithm.outer_momentum and algorithm.outer_learning_rate"
        )
