"""What `fit` returns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from tf2dist.errors import TfDistError
from tf2dist.launch.console import result_lines
from tf2dist.messages import metrics_text


class History(dict[str, list[Any]]):
    """For each metric a list with a number for each epoch."""

    @property
    def history(self) -> "History":
        """The same: `keras.Model.fit` returns an object that has the lists in this attribute."""
        return self


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    Attributes:
        history: as Keras's `History.history`: for each metric a list with a number for each epoch. Empty on hosts
            without the leader. `history.history` is the same.
        summary: the content of summary.json; empty on hosts without the leader, and after `TerminateOnNaN` has ended
            the run.
        run_dir: the directory of the run on this host.
    """

    history: History
    summary: dict[str, Any]
    run_dir: Path
    _model: keras.Model | None
    _where: str = ""

    def __repr__(self) -> str:
        """The result in a few lines, as the command prints it, with the numbers of the last epoch."""
        lines = result_lines(self.summary, "").splitlines() if self.summary else []
        last_epoch = {name: values[-1] for name, values in self.history.items() if values}
        lines += [f"last epoch: {metrics_text(last_epoch)}"] if last_epoch else []
        return "\n".join(["tf2dist.Result", *lines, str(self.run_dir)])

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
