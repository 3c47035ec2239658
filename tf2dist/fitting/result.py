"""What `fit` gives back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

from tf2dist.errors import TfDistError


@dataclass(frozen=True)
class Result:
    """A run at its end.

    Attributes:
        history: as `History.history` of Keras: by metric, a number for each epoch; empty on the hosts without the
            leader.
        summary: what summary.json holds; empty on those hosts, and after `TerminateOnNaN` has ended the run.
        run_dir: the directory of the run, on this host.
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
            TfDistError: it is on another host; the message says on which.
        """
        if self._model is None:
            raise TfDistError(f"the model is not on this host: {self._where}; tf2dist.load_model reads it there")
        return self._model
