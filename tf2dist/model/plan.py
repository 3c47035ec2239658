"""How a run is cut into epochs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The epochs of a run as in `keras.Model.fit`: at the end of each come its metrics, validation and callbacks.

    Attributes:
        epochs: the number of the epoch before which the run ends, counted from 0 like `initial_epoch`.
        steps_per_epoch: global steps; None: one pass over the data by the whole cluster; over streams, to the end of
            the data.
        validation_freq: the number of epochs from one validation to the next, or the numbers of the epochs with a
            validation, counted from 1.
        validation_batch_size: None: as many examples at once as are fast.
        validation_steps: batches to validate on; None: all.
        shuffle: whether every epoch has a permutation of its own.
    """

    epochs: int = 1
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_freq: int | tuple[int, ...] = 1
    validation_batch_size: int | None = None
    validation_steps: int | None = None
    shuffle: bool = True

    def validates(self, epoch: int) -> bool:
        """Whether there is a validation after an epoch, counted from 0."""
        # Keras counts epochs from 1 here, and from 0 everywhere else.
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq
