"""Hooks in another process of this host: the calls of the leader go to the caller of `fit`, and its answers come back.

Arrays travel as files in the job's folder, which both processes see.
"""

import itertools
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tf2dist.messages import HookAnswer, ToLauncher
from tf2dist.process.inbox import Inbox
from tf2dist.training.hooks import Change, NamedArrays

TELL_EVERY_SECS = 30.0


class LauncherHooks:
    """Calls the caller of `fit` through the launcher.

    Args:
        folder: of the job, which the caller's process sees too.
    """

    def __init__(self, to_launcher: ToLauncher, inbox: Inbox, folder: Path) -> None:
        self._to_launcher, self._inbox, self._folder = to_launcher, inbox, folder
        # Beyond the numbers of this task's earlier lives: an answer to one of theirs may still come.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._number = 0
        self._posted_at = self._told_at = 0.0

    def wanted(self) -> bool:
        """Whether a pause is wanted since the last one."""
        return self._inbox.pause_wanted.is_set()

    def post(
        self,
        kind: str,
        epoch: int,
        step: int,
        logs: dict[str, Any],
        learning_rate: float,
        arrays: Callable[[], NamedArrays],
        state: NamedArrays,
    ) -> None:
        """Calls; see `hooks.Hooks`."""
        self._number, self._posted_at = next(self._numbers), time.monotonic()
        self._told_at = self._posted_at
        if kind == "pause":
            self._inbox.pause_wanted.clear()
        files = self._write("arrays", arrays()), self._write("state", state if kind == "begin" else {})
        self._to_launcher.hook_call(self._number, kind, epoch, step, logs, learning_rate, *files)

    def _write(self, name: str, arrays: NamedArrays) -> str:
        return write_arrays(self._folder / f"call-{self._number}-{name}.npz", arrays) if arrays else ""

    def answer(self, timeout_secs: float) -> Change | None:
        """The answer to the last call, or None if it has not come within `timeout_secs`.

        Raises:
            OSError, ValueError: its files cannot be read.
        """
        deadline = time.monotonic() + timeout_secs
        while (left := deadline - time.monotonic()) >= 0:
            try:
                answer = self._inbox.answers.get(timeout=left)
            except queue.Empty:
                break
            if answer.number == self._number:
                return _change_of(answer)
        self._tell()
        return None

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_SECS:
            self._told_at = now
            self._to_launcher.status(f"waiting for the callbacks, {now - self._posted_at:.0f} s")


def _change_of(answer: HookAnswer) -> Change:
    arrays = take_arrays(answer.arrays) if answer.arrays else {}
    state = take_arrays(answer.state) if answer.state else None
    return Change(answer.stop, learning_rate=answer.learning_rate, arrays=arrays, state=state)


def write_arrays(path: Path, arrays: NamedArrays) -> str:
    """Writes arrays of numbers by name into a new file; returns its name.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "xb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return str(path)


def take_arrays(path: str) -> NamedArrays:
    """Reads the arrays that another process of this job has written, and removes the file.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    with np.load(path, allow_pickle=False) as arrays:
        found = dict(arrays)
    os.unlink(path)
    return found
