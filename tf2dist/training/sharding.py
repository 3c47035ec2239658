"""How the training set of a run is cut into batches, from its configuration and its plan."""

from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Splits
from tf2dist.data.pipeline import AggregatedSharding, Sharding
from tf2dist.data.stream import StreamSharding
from tf2dist.model.plan import EpochPlan


def sharding_of(
    splits: Splits,
    plan: EpochPlan | None,
    batch_size: int,
    num_shards: int,
    seed: int,
    *,
    whole_batch_loss: bool,
) -> Sharding:
    """How the training set is cut into batches, or how the batches of streams are counted; see `Sharding`."""
    if splits.stream:
        # A stream has no known end, so `fit` demands or finds the steps of an epoch before it makes a plan.
        assert plan, "streams come from a call of `fit`"
        assert plan.steps_per_epoch, "`fit` gives a plan for streams the steps of an epoch"
        return StreamSharding.of(plan.steps_per_epoch, batch_size, num_shards, seed, whole_batch_loss)
    shuffle = plan is None or plan.shuffle
    return Sharding(len(splits.train), batch_size, num_shards, seed, whole_batch_loss, shuffle)


def aggregated_sharding_of(
    config: RunConfig, splits: Splits, plan: EpochPlan | None, num_workers: int
) -> AggregatedSharding:
    """How the training set is cut with mode=sync_replicas; see `AggregatedSharding`."""
    shuffle = plan is None or plan.shuffle
    replicas = config.sync_replicas.replicas_to_aggregate or num_workers
    batch_size = config.train.batch_size_per_worker
    return AggregatedSharding.of(len(splits.train), batch_size, num_workers, config.seed, shuffle, replicas)
