"""The interface to what follows a run, and may change it between two steps: the callbacks of `fit`.

They run in another process of this host: the leader's calls go through the launcher to the process that has called
`fit`, and back. Arrays travel as files in the job's folder, which both processes can read: they are too large for
messages.
"""

import functools
import itertools
import math
import os
import queue
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tf2dist.checkpoint.snapshot import pack, read_arrays, unpack
from tf2dist.cluster.reachability import Wait
from tf2dist.messages import HookCall, ToLauncher
from tf2dist.process.inbox import Inbox

NamedArrays = dict[str, np.ndarray]
CALLS = ("begin", "epoch", "pause", "end")  # the kinds of calls; see `Hooks.post`
TELL_EVERY_SECS = 30.0  # how often the user is told that callbacks are still running


@dataclass(frozen=True)
class CallbackEffects:
    """Effects that callbacks want to have on the run.

    Attributes:
        stop: whether the run ends here.
        is_interrupted: whether a signal came while the callbacks ran; then the run is saved and stopped.
        learning_rates: the new ones, of each inner optimizer; empty to leave them.
        arrays: new values of variables, by name, such as "model/hidden1/kernel".
        state: the state of the callbacks, which the next checkpoints keep; None to leave it.
    """

    stop: bool = False
    is_interrupted: bool = False
    learning_rates: tuple[float, ...] = ()
    arrays: NamedArrays = field(default_factory=dict)
    state: NamedArrays | None = None

    def to_bytes(self) -> bytes:
        """For the other synchronous workers, which save no checkpoints and so need no state of the callbacks."""
        return pack([self.stop, self.is_interrupted, self.learning_rates], self.arrays)

    @classmethod
    def from_bytes(cls, packed: bytes) -> "CallbackEffects":
        (stop, is_interrupted, learning_rates), arrays = unpack(packed)
        return cls(stop, is_interrupted, tuple(learning_rates), arrays)


class Hooks:
    """Calls the callbacks in the process that has called `fit`, through the launcher. Only the leader does.

    Args:
        folder: of the job, which that process can read and write, too.
        with_weights: the kinds of calls in which callbacks may see or change the weights, or what optimizers keep.
        reads_progress: whether callbacks get the metrics that come with the progress, arrays among them.
    """

    def __init__(
        self,
        to_launcher: ToLauncher,
        inbox: Inbox,
        folder: Path,
        with_weights: Collection[str] = CALLS,
        reads_progress: bool = False,
    ) -> None:
        self._to_launcher, self._inbox, self._folder = to_launcher, inbox, folder
        self._with_weights, self.reads_progress = with_weights, reads_progress
        # Numbers from a clock are beyond those that this task used before a restart, to which answers may still come.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._number = 0
        self._new_wait = functools.partial(Wait, math.inf, to_launcher.status, every_secs=TELL_EVERY_SECS)
        self._wait = self._new_wait()

    def wanted(self) -> bool:
        """Whether a callback has asked for a pause since the last one."""
        return self._inbox.pause_wanted.is_set()

    def post(
        self,
        kind: str,
        epoch: int,
        step: int,
        logs: dict[str, Any],
        learning_rates: tuple[float, ...],
        arrays: Callable[[bool], NamedArrays],
        state: NamedArrays,
    ) -> None:
        """Calls the callbacks without waiting for them; `answer` returns what they want.

        Args:
            kind: "begin" before the first step, "epoch" at the end of an epoch, "pause" after `wanted`, "end" after
                the last step, with the weights that are evaluated; "not finite", which has no answer.
            epoch: counted from 0; for "begin" the epoch that comes.
            step: the global step.
            logs: the metrics of the epoch by name, as in Keras.
            arrays: returns values by name: the states of random generators, of the variables those that are not the
                model's and the counts of a LossScaleOptimizer, and if its argument is true all others.
            state: the state of the callbacks in the checkpoint that the run continues from; for "begin" only.
        """
        self._number, self._wait = next(self._numbers), self._new_wait()
        # Before the call, not after the answer: a callback that asks again meanwhile gets another pause.
        if kind == "pause":
            self._inbox.pause_wanted.clear()
        given = arrays(kind in self._with_weights)
        files = self._write("arrays", given), self._write("state", state if kind == "begin" else {})
        self._to_launcher.send(HookCall(self._number, kind, epoch, step, logs, learning_rates, *files))

    def _write(self, name: str, arrays: NamedArrays) -> str:
        return write_arrays(self._folder / f"call-{self._number}-{name}.npz", arrays) if arrays else ""

    def answer(self, timeout_secs: float) -> CallbackEffects | None:
        """The effects that the callbacks want; None if they are not done within `timeout_secs`."""
        deadline = time.monotonic() + timeout_secs
        while (left := deadline - time.monotonic()) >= 0:
            try:
                answer = self._inbox.answers.get(timeout=left)
            except queue.Empty:
                break
            # Any other answer is one to an earlier call, which an interrupted or restarted run no longer waits for.
            if answer.number == self._number:
                arrays = take_arrays(answer.arrays) if answer.arrays else {}
                state = take_arrays(answer.state) if answer.state else None
                return CallbackEffects(answer.stop, learning_rates=answer.learning_rates, arrays=arrays, state=state)
        self._wait.notify("the callbacks")
        return None


def write_arrays(path: Path, arrays: NamedArrays) -> str:
    """Writes arrays of numbers by name into a new file; returns its name."""
    # A file object: to a bare name numpy would add ".npz", and would overwrite what is there.
    with open(path, "xb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return str(path)


def take_arrays(path: str) -> NamedArrays:
    """Reads the arrays that another process of this job has written, and removes the file; large ones stay mapped."""
    arrays = read_arrays(Path(path))
    os.unlink(path)
    return arrays
