"""The table of algorithms: how updates are applied, or how often workers communicate; and their options."""

from dataclasses import dataclass

from tf2dist.config.option import COUNT, POSITIVE, Constraint, choice, one_of, option

IS_MOMENTUM = Constraint(lambda value: 0 <= value < 1, "must be at least 0 and less than 1, such as 0.9")


@dataclass(frozen=True)
class AlgorithmEntry:
    """One row of the table.

    Attributes:
        implementation: the class, as `pkgutil.resolve_name` takes it: what reads options does not import TensorFlow.
        mode: for which it is; plain is for all modes.
        options: those that no other algorithm has.
        sends_weights: whether workers send weights, on which they go on computing: rounding them would add up.
    """

    implementation: str
    mode: str = "async"
    options: tuple[str, ...] = ()
    sends_weights: bool = False


_ROOM = "tf2dist.training.parameter_server.algorithms"
ALGORITHMS = {
    "plain": AlgorithmEntry(f"{_ROOM}.plain:Algorithm"),
    "staleness_aware": AlgorithmEntry(f"{_ROOM}.staleness_aware:StalenessAware"),
    "delay_compensated": AlgorithmEntry(f"{_ROOM}.delay_compensated:DelayCompensated", options=("strength",)),
    "local_sgd": AlgorithmEntry(
        "tf2dist.training.synchronous.local_sgd:LocalSgdStep",
        mode="sync",
        options=("local_steps", "outer_momentum", "outer_learning_rate"),
        sends_weights=True,
    ),
}


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """How the parameter servers apply updates, or how often synchronous workers communicate."""

    kind: str = choice("plain", one_of(*ALGORITHMS))
    strength: float = option(0.04, POSITIVE, help="algorithm=delay_compensated: the factor lambda of the correction")
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
    def has_outer_steps(self) -> bool:
        return self.outer_momentum > 0 or self.outer_learning_rate != 1
