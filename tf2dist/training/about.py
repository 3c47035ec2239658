"""What TensorBoard shows of a run beside its curves: its options, its model, its learning rate."""

from dataclasses import asdict, dataclass
from typing import Any

import keras

from tf2dist.config.schema import RunConfig
from tf2dist.process.tf_internals import learning_rate_of

SECTIONS = ("mode", "model", "optimizer", "algorithm", "data", "train", "cluster", "seed")


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


class LearningRate:
    """The learning rate of an optimizer at any step, without reading the optimizer's own count of steps.

    With mode=async that count lies on a ps, where each read would cost a remote call.
    """

    def __init__(self, optimizer: keras.Optimizer, earlier_updates: int) -> None:
        self._earlier_updates = earlier_updates
        # `optimizer.learning_rate` would evaluate a schedule at the optimizer's own count and hide the schedule itself.
        schedule = learning_rate_of(optimizer)
        is_schedule = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
        self._schedule = schedule if is_schedule else None
        # A constant rate is read once: whoever changes it makes a new object of this class.
        self._constant = 0.0 if is_schedule else _number(optimizer.learning_rate)

    @property
    def is_scheduled(self) -> bool:
        return self._schedule is not None

    def at(self, step: int) -> float:
        return _number(self._schedule(step + self._earlier_updates)) if self._schedule else self._constant


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
