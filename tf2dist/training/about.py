"""What TensorBoard shows of a run beside its curves: its options, its model, its learning rate."""

from dataclasses import asdict, dataclass
from typing import Any

import keras

from tf2dist.config.schema import RunConfig
from tf2dist.tf_internals import counter_of, inner_optimizers, learning_rate_of

SECTIONS = ("mode", "model", "optimizer", "algorithm", "data", "train", "cluster", "seed")
SCHEDULE = keras.optimizers.schedules.LearningRateSchedule


@dataclass(frozen=True)
class About:
    """A run's model as text, and its options by their dotted names."""

    model: str
    hparams: dict[str, bool | float | str]


def summary_of(model: keras.Model) -> str:
    """Keras' own table of the layers."""
    lines: list[str] = []
    model.summary(print_fn=lambda text, **_: lines.append(text))
    return "\n".join(lines)


def hparams_of(config: RunConfig) -> dict[str, bool | float | str]:
    """The options that can change the result, by their dotted names; without those that are not set."""
    options = asdict(config)
    sections = (*SECTIONS, "simulate") if config.simulate.is_on else SECTIONS
    return dict(_leaves({name: options[name] for name in sections}))


def _leaves(options: dict[str, Any], prefix: str = "") -> list[tuple[str, bool | float | str]]:
    leaves: list[tuple[str, bool | float | str]] = []
    for name, value in options.items():
        if isinstance(value, dict):
            leaves += _leaves(value, f"{prefix}{name}.")
        elif value not in (None, []):
            # TensorBoard takes no other types; a list, for instance, is shown as its text.
            leaves.append((prefix + name, value if isinstance(value, bool | int | float | str) else str(value)))
    return leaves


class LearningRates:
    """The learning rate of each inner optimizer at any step, without reading the optimizer's own count of steps.

    With mode=async that count lies on a ps, where each read would cost a remote call.
    """

    def __init__(self, optimizer: keras.Optimizer, earlier_updates: int) -> None:
        self._earlier_updates = earlier_updates
        # It leaves out updates, so the step does not tell their number. It lies in this process, since no ps has one.
        has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._counter = counter_of(optimizer) if has_scale else None
        # `optimizer.learning_rate` would evaluate a schedule at the optimizer's own count and hide the schedule itself.
        # A constant rate is read once: whoever changes it makes a new object of this class.
        self._rates = [
            rate if isinstance(rate := learning_rate_of(inner), SCHEDULE) else _number(inner.learning_rate)
            for inner in inner_optimizers(optimizer)
        ]

    def at(self, step: int) -> tuple[float, ...]:
        count = step + self._earlier_updates if self._counter is None else int(self._counter.numpy())
        return tuple(_number(rate(count)) if isinstance(rate, SCHEDULE) else rate for rate in self._rates)

    def scalars(self, step: int) -> dict[str, float]:
        """By name, for curves; those of several optimizers are numbered as in `MultiOptimizer.optimizers`."""
        rates = self.at(step)
        if len(rates) == 1:
            return {"learning_rate": rates[0]}
        return {f"learning_rate_{number}": rate for number, rate in enumerate(rates)}


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
