"""What ends a training before its last step: train.until_accuracy and train.until_secs."""

from collections.abc import Callable, Collection

from tf2dist.config.schema import TrainConfig
from tf2dist.errors import ConfigError
from tf2dist.model.evaluate import Evaluation


class Goal:
    """Decides after each evaluation on the validation set whether the training ends there.

    Args:
        splits: the names of those that can be evaluated.
        broadcast: see `loop.Loop`. Each worker has a clock of its own, so the leader's decides.

    Raises:
        ConfigError: there is a goal, and no validation set.
    """

    def __init__(self, config: TrainConfig, splits: Collection[str], broadcast: Callable[[bytes], bytes]) -> None:
        self._accuracy, self._secs, self._broadcast = config.until_accuracy, config.until_secs, broadcast
        given = {"train.until_accuracy": self._accuracy, "train.until_secs": self._secs}
        for name, value in given.items():
            if value is not None and "validation" not in splits:
                raise ConfigError(f"{name} ({value}): the data has no validation set; leave it out")

    def reached(self, evaluation: Evaluation, training_secs: float) -> str:
        """The option that ends the training now, "" for none; all tasks that drive the training must call this.

        Raises:
            ConfigError: there is a goal for the accuracy, and the model has none.
        """
        if self._accuracy is not None:
            if "accuracy" not in evaluation.metrics:
                raise ConfigError(
                    f"train.until_accuracy ({self._accuracy}): the model has no accuracy; give train.steps instead"
                )
            if evaluation.metrics["accuracy"] >= self._accuracy:
                return f"train.until_accuracy={self._accuracy}"
        if self._secs is not None and self._broadcast(bytes([training_secs >= self._secs])) == b"\1":
            return f"train.until_secs={self._secs}"
        return ""
