"""The table of algorithms: how updates are applied, or how and when workers wait for each other; and their options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tf2dist.config.option import COUNT, POSITIVE, Constraint, Rule, between, choice, one_of, option

if TYPE_CHECKING:
    from tf2dist.config.schema import RunConfig

MAX_PUSH = 1000  # batches of an update, whose examples a worker holds in memory all together
MAX_PUSHES = 50  # from one fetch to the next, unrolled in one call
IS_MOMENTUM = Constraint(lambda value: 0 <= value < 1, "must be at least 0 and less than 1, such as 0.9")


@dataclass(frozen=True)
class AlgorithmEntry:
    """One row of the table.

    Attributes:
        implementation: the class, as `pkgutil.resolve_name` takes it: what reads options does not import TensorFlow.
        mode: for which it is; plain is for all modes.
        options: those that no other algorithm has.
        rules: about several options together.
        cuts_examples: whether a step gets the examples of several batches, which only arrays can give.
        sends_sums: whether workers send sums, or values on which they go on computing: rounding them would add up.
    """

    implementation: str
    mode: str = "async"
    options: tuple[str, ...] = ()
    rules: Callable[["RunConfig"], list[Rule]] = lambda config: []
    sends_sums: bool = False
    cuts_examples: bool = False


def _downpour_rules(config: "RunConfig") -> list[Rule]:
    n_push, n_fetch, size = config.algorithm.n_push, config.algorithm.n_fetch, config.train.steps_per_execution
    if n_push < 1 or n_fetch == 0:  # another rule says so
        return []
    updates, remainder = divmod(n_fetch or n_push, n_push)
    is_whole = "must be a multiple of algorithm.n_push, which is {}: the gradients of a push come from one fetch"
    # The steps between two fetches are unrolled in one call, since each call begins with a fetch.
    is_short = f"must be at most {MAX_PUSHES} times algorithm.n_push, which is {n_push}"
    fits = size is None or remainder > 0 or updates == 0 or size % updates == 0
    must = f"must be a multiple of {updates}, the steps from one fetch to the next, since each call begins with a fetch"
    return [
        ("algorithm.n_fetch", n_fetch, not remainder, is_whole.format(n_push)),
        ("algorithm.n_fetch", n_fetch, updates <= MAX_PUSHES, is_short),
        ("train.steps_per_execution", size, fits, must),
    ]


_ROOM = "tf2dist.training.parameter_server.algorithms"
ALGORITHMS = {
    "plain": AlgorithmEntry(f"{_ROOM}.plain:Algorithm"),
    "staleness_aware": AlgorithmEntry(f"{_ROOM}.staleness_aware:StalenessAware"),
    "delay_compensated": AlgorithmEntry(f"{_ROOM}.delay_compensated:DelayCompensated", options=("strength",)),
    "bounded": AlgorithmEntry(f"{_ROOM}.bounded:Bounded", options=("bound",)),
    "downpour": AlgorithmEntry(
        f"{_ROOM}.downpour:Downpour",
        options=("n_push", "n_fetch"),
        rules=_downpour_rules,
        sends_sums=True,
        cuts_examples=True,
    ),
    "local_sgd": AlgorithmEntry(
        "tf2dist.training.synchronous.local_sgd:LocalSgdStep",
        mode="sync",
        options=("local_steps", "outer_momentum", "outer_learning_rate"),
        sends_sums=True,
    ),
}


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """How the parameter servers apply updates, or how and when workers wait for each other."""

    kind: str = choice("plain", one_of(*ALGORITHMS))
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
        return self.n_push if ALGORITHMS[self.kind].cuts_examples else 1

    @property
    def updates_per_fetch(self) -> int:
        """algorithm=downpour: how many pushes a worker makes from one fetch to the next."""
        return (self.n_fetch or self.n_push) // self.n_push

    @property
    def has_outer_steps(self) -> bool:
        return self.outer_momentum > 0 or self.outer_learning_rate != 1
