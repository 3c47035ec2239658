"""The algorithms of asynchronous training by the names of the option algorithm, each in a file of its own."""

from collections.abc import Callable

from tf2dist.config.algorithms import AlgorithmConfig
from tf2dist.training.parameter_server.algorithms.delay_compensated import DelayCompensated
from tf2dist.training.parameter_server.algorithms.plain import Algorithm
from tf2dist.training.parameter_server.algorithms.staleness_aware import StalenessAware

ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {
    "plain": lambda config: Algorithm(),
    "staleness_aware": lambda config: StalenessAware(),
    "delay_compensated": lambda config: DelayCompensated(config.strength),
    "bounded": lambda config: Algorithm(),  # it changes when a worker pulls, not what a ps does; see `twins`
    "downpour": lambda config: Algorithm(),  # what is pushed is another sum of gradients; see `twins`
}


def algorithm_of(config: AlgorithmConfig) -> Algorithm:
    """The algorithm of one ps; each has its own, since it may change the optimizer of the ps."""
    return ALGORITHMS[config.kind](config)
