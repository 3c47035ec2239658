"""What `fit` returns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

from tf2dist.errors import TfDistError


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        history: as Keras's `History.history`: for each metric a list with a number for each epoch. Empty on hosts
            without the leader.
        summary: the content of summary.json; empty on hosts without the leader, and after `TerminateOnNaN` has ended
            the run.
        run_dir: the directory of the run on this host.
    """

    history: dict[str, list[Any]]
    summary: dict[str, Any]
    run_dir: Path
    _model: keras.Model | None = field(repr=False)
    _where: str = field(default="", repr=False)

    @property
    def model(self) -> keras.Model:
        """The compiled model with the final weights.

        Raises:
            TfDistError: it is on another host, which the message names.
        """
        # Only the leader's process has a mirror of the model. An error here, rather than in `fit`, lets the same script
        # run to its end on every host.
        if self._model is None:
            raise TfDistError(f"the model is not on this host: {self._where}; tf2dist.load_model reads it there")
        return self._model
