"""How the training set of a run is cut into batches, from its configuration and its plan."""

from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Splits
from tf2dist.data.passes import AggregatedSharding, Sharding
from tf2dist.data.stream import StreamSharding
from tf2dist.model.plan import EpochPlan


def sharding_of(
    config: RunConfig, mode: str, splits: Splits, plan: EpochPlan | None, num_shards: int, batch_size: int
) -> Sharding:
    """How the training set is cut into batches, or how the batches of streams are counted; see `Sharding`.

    Args:
        mode: of the loop that takes the batches.
        num_shards: workers, or with mode=sync replicas.
        batch_size: of a shard.
    """
    shuffle = plan is None or plan.shuffle
    if mode == "sync_replicas":
        replicas = config.sync_replicas.replicas_to_aggregate or num_shards
        return AggregatedSharding.of(len(splits.train), batch_size, num_shards, config.seed, shuffle, replicas)
    is_sync = mode == "sync"
    if splits.stream:
        assert plan, "streams come from a call of `fit`"
        return StreamSharding.of(plan.steps_per_epoch, batch_size, num_shards, config.seed, is_sync)
    return Sharding(len(splits.train), batch_size, num_shards, config.seed, is_sync, shuffle)
