"""A run in a thread of its own, while the caller's thread answers the leader and handles Ctrl-C."""

import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from tf2dist.errors import TfDistError, TrainingError, first_line
from tf2dist.fitting.callbacks import Callbacks
from tf2dist.launch.caller import Heard, Send
from tf2dist.launch.console import Console
from tf2dist.messages import HookAnswer, HookCall, PauseWanted, Progress, metrics_text
from tf2dist.signals import Asked
from tf2dist.training.hooks import Change, NamedArrays
from tf2dist.training.launcher_hooks import take_arrays, write_arrays

T = TypeVar("T")
LOOK_SECS = 0.5


class Conversation(Generic[T]):
    """The caller's side of one run; see `launch.caller.Caller`.

    Args:
        job: the folder with the data and the model.
        callbacks: None on a host without the leader.
    """

    def __init__(
        self,
        job: Path,
        identity: dict[str, Any],
        sys_path: list[str],
        callbacks: Callbacks | None,
        num_epochs: int,
    ) -> None:
        self.job, self.identity, self.sys_path = job, identity, sys_path
        self._callbacks, self._num_epochs = callbacks, num_epochs
        self._console: Console | None = None
        self._asked = Asked()
        self._heard: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._send: Send = lambda message: None
        self._wants_pause = False  # a pause is on its way
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.step = 0
        self._metrics: dict[str, float] = {}  # of the last progress

    # In the thread of the run.

    def connect(self, send: Send) -> None:
        self._send = send

    def hear(self, message: Heard) -> None:
        if self._console and isinstance(message, HookCall) and message.kind == "epoch":
            text = metrics_text(dict(message.logs))
            self._console.note(f"epoch {message.epoch + 1}/{self._num_epochs}: {text}")
        self._heard.put(message)

    def _run(self, run: Callable[[Asked], T]) -> None:
        try:
            self._result.append(run(self._asked))
        except BaseException as error:
            self._error = error
        finally:
            self._heard.put(None)

    # In the caller's thread.

    def follow(self, run: Callable[[Asked], T], console: Console) -> T:
        """Calls `run` in another thread, and the callbacks in this one, to the end of both.

        Args:
            console: takes a line for each epoch.

        The thread lasts as long as the processes that it starts: the kernel kills those when it ends.

        Raises:
            KeyboardInterrupt: the run has been stopped in order.
            Exception: what a callback has raised, after the run has been stopped; or what `run` has raised.
        """
        self._console = console
        thread = threading.Thread(target=self._run, args=(run,), name="tf2dist", daemon=True)
        thread.start()
        try:
            self._answer_all()
        except BaseException as error:
            self._asked.ask(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            self._wait_for_end(thread)
            if isinstance(self._error, TfDistError):
                error.add_note(f"tf2dist: {self._error}")
            raise
        thread.join()
        if self._error:
            raise self._error
        return self._result[0]

    def _wait_for_end(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            try:
                thread.join(LOOK_SECS)
            except KeyboardInterrupt:
                self._asked.ask(signal.SIGINT)

    def _answer_all(self) -> None:
        while True:
            try:
                message = self._heard.get(timeout=LOOK_SECS)
            except queue.Empty:
                continue
            if message is None:
                return
            if self._callbacks is None:
                continue
            if isinstance(message, HookCall):
                self._answer(message, self._callbacks)
            else:
                self._on_progress(message, self._callbacks)

    def _answer(self, call: HookCall, callbacks: Callbacks) -> None:
        self.step = call.step
        if call.kind in ("begin", "pause"):  # a leader that begins again does not know what the one before was asked
            self._wants_pause = False
        arrays, state = (self._read(path) for path in (call.arrays, call.state))
        logs = {name: np.array(value) if isinstance(value, list) else value for name, value in call.logs.items()}
        put = arrays, call.learning_rate, call.step
        match call.kind:
            case "begin":
                change = callbacks.begin(call.epoch, *put, state)
            case "epoch":
                change = callbacks.epoch(call.epoch, logs, *put)
            case "pause":
                change = callbacks.pause(self._metrics, *put)
            case _:
                change = callbacks.last(*put)
        self._send(self._packed(call.number, change))
        if callbacks.wants_to_stop and not change.stop and call.kind != "end":
            self._want_pause()

    def _read(self, path: str) -> NamedArrays:
        try:
            return take_arrays(path) if path else {}
        except (OSError, ValueError) as error:
            raise TrainingError(f"what the leader has sent cannot be read ({first_line(str(error))})") from None

    def _packed(self, number: int, change: Change) -> HookAnswer:
        try:
            files = [
                write_arrays(self.job / f"answer-{number}-{name}.npz", arrays) if arrays else ""
                for name, arrays in (("arrays", change.arrays), ("state", change.state))
            ]
        except OSError as error:
            raise TrainingError(
                f"{self.job}: the answer of the callbacks cannot be written ({error.strerror}); make room"
            ) from None
        return HookAnswer(number, change.stop, change.learning_rate, *files)

    def _on_progress(self, progress: Progress, callbacks: Callbacks) -> None:
        self.step, self._metrics = progress.step, progress.metrics
        if callbacks.wants_pauses:
            if not self._wants_pause:
                self._want_pause()
        elif callbacks.looks_at_batches:
            callbacks.batch(progress.step, progress.metrics)

    def _want_pause(self) -> None:
        self._wants_pause = True
        self._send(PauseWanted())
