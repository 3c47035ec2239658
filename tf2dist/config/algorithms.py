"""The options of the algorithms: how updates are applied, or how and when workers wait for each other."""

from dataclasses import dataclass

from tf2dist.config.option import COUNT, POSITIVE, Must, between, choice, one_of, option

# Of mode=async; plain is for all modes.
ALGORITHMS = ("plain", "staleness_aware", "delay_compensated", "bounded", "downpour")
SYNC_ALGORITHMS = ("local_sgd",)  # of mode=sync
MAX_PUSH = 1000  # batches of an update, whose examples a worker holds in memory all together
MAX_PUSHES = 50  # from one fetch to the next, unrolled in one call
IS_MOMENTUM = Must(lambda value: 0 <= value < 1, "must be at least 0 and less than 1, such as 0.9")


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """How the parameter servers apply updates, or how and when workers wait for each other."""

    kind: str = choice("plain", one_of(*ALGORITHMS, *SYNC_ALGORITHMS))
    strength: float = option(0.04, POSITIVE, help="algorithm=delay_compensated: the factor lambda of the correction")
    bound: int = option(
        4, *COUNT, help="algorithm=bounded: how many of its own steps a worker may be ahead of the slowest"
    )
    n_push: int = option(
        4, between(1, MAX_PUSH), help="algorithm=downpour: the batches that a worker takes for each push"
    )
    n_fetch: int | None = option(
        None,
        *COUNT,
        help="algorithm=downpour: the batches that it takes from one fetch to the next, a multiple of "
        "algorithm.n_push; null: as many as that",
    )
    local_steps: int = option(
        8, *COUNT, help="algorithm=local_sgd: how many steps a worker takes on its own between two averages"
    )
    outer_momentum: float = option(
        0.0, IS_MOMENTUM, help="algorithm=local_sgd: Nesterov momentum of the steps from one average to the next"
    )
    outer_learning_rate: float = option(
        1.0, POSITIVE, help="algorithm=local_sgd: the factor of these steps; 1 without momentum: the average itself"
    )

    @property
    def batches_per_update(self) -> int:
        """How many batches of a worker make an update."""
        return self.n_push if self.kind == "downpour" else 1

    @property
    def updates_per_fetch(self) -> int:
        """algorithm=downpour: how many pushes a worker makes from one fetch to the next."""
        return (self.n_fetch or self.n_push) // self.n_push

    @property
    def has_outer_steps(self) -> bool:
        return self.outer_momentum > 0 or self.outer_learning_rate != 1
