"""What an algorithm of synchronous training needs: its checks, its input and its graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tf2dist.config.algorithms import AlgorithmConfig
from tf2dist.training.synchronous.feeds import Feed, feed_of
from tf2dist.training.synchronous.local_sgd.checks import check as check_local_sgd
from tf2dist.training.synchronous.local_sgd.feeds import own_feed_of
from tf2dist.training.synchronous.local_sgd.step import LocalSgdStep
from tf2dist.training.synchronous.step import SyncStep


@dataclass(frozen=True)
class Twin:
    """The parts of one algorithm.

    Attributes:
        check: refuses what the algorithm cannot train; see `local_sgd.checks.check`.
        feed_of: makes the input of a worker; see `feeds.feed_of`.
        make_graphs: makes the graph of the steps.
    """

    check: Callable[..., None]
    feed_of: Callable[..., Feed]
    make_graphs: type[SyncStep]


def _check_nothing(*_: Any) -> None:
    """Plain training has no rules beside those of all synchronous training."""


PLAIN = Twin(_check_nothing, feed_of, SyncStep)
LOCAL_SGD = Twin(check_local_sgd, own_feed_of, LocalSgdStep)


def twin_for(algorithm: AlgorithmConfig) -> Twin:
    """With rounds of one step and no outer optimizer, local SGD is plain training, with any optimizer."""
    is_local = algorithm.kind == "local_sgd" and (algorithm.local_steps > 1 or algorithm.has_outer_steps)
    return LOCAL_SGD if is_local else PLAIN
