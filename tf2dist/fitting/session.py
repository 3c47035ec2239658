"""Runs the cluster in a thread of its own, while the caller's thread answers the leader and handles Ctrl-C."""

import atexit
import functools
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tf2dist.errors import TfDistError, TrainingError
from tf2dist.files import raising
from tf2dist.fitting.callbacks import Callbacks
from tf2dist.launch.console import Console
from tf2dist.launch.host_run import Send, SessionMessage
from tf2dist.linux import module_path
from tf2dist.messages import HookAnswer, HookCall, PauseWanted, ProgressMessage
from tf2dist.signals import StopRequest, sigterm_raises
from tf2dist.training.hooks import CallbackEffects, NamedArrays, take_arrays, write_arrays

T = TypeVar("T")
# Waits in the caller's thread have this limit: a signal is handled between two of Python's instructions, and one that
# the kernel gives to another thread does not end the wait of this one.
POLL_SECS = 0.5
ENDING_SECS = 30.0  # longer than a program takes to end once its own handlers of its exit are done


def _signal_of(error: BaseException) -> signal.Signals:
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM


def _logs_of(metrics: dict[str, Any]) -> dict[str, Any]:
    # JSON has no arrays: a metric of several numbers comes as a list, and Keras's callbacks expect an array.
    return {name: np.array(value) if isinstance(value, list) else value for name, value in metrics.items()}


class FitSession:
    """The caller's side of one run; see `launch.host_run.Session`.

    The thread of the run puts the leader's messages into a queue. The caller's thread takes them out and calls the
    callbacks; Python raises KeyboardInterrupt only there. Apart from the queue each attribute is written by one thread.

    Args:
        job: the folder with the data and the model.
        callbacks: None on a host without the leader.
    """

    def __init__(self, job: Path, identity: dict[str, Any], callbacks: Callbacks | None, num_epochs: int) -> None:
        self.job, self.identity, self.sys_path = job, identity, module_path()
        self._callbacks, self._num_epochs = callbacks, num_epochs
        self._console: Console | None = None
        self._stop = StopRequest()
        # None says that the run has ended.
        self._messages: queue.SimpleQueue[SessionMessage | None] = queue.SimpleQueue()
        self._send: Send = lambda message: None
        self._is_pause_requested = False
        self._result: list[Any] = []
        self._error: BaseException | None = None
        self._is_program_ending = False
        # Written before the answer that ends the run, and read when the leader calls for the end.
        self._end = ""
        self.step = 0

    # In the thread of the run.

    def connect(self, send: Send) -> None:
        self._send = send

    def on_message(self, message: SessionMessage) -> None:
        # Printed here, since the console belongs to the thread of the run: two threads must not write to it at once.
        if self._console and isinstance(message, HookCall) and message.kind == "epoch":
            self._console.epoch(message.epoch + 1, self._num_epochs, dict(message.logs))
        if self._console and self._end and isinstance(message, HookCall) and message.kind == "end":
            self._console.note(self._end)
        self._messages.put(message)

    def _run(self, run: Callable[[StopRequest], Any]) -> None:
        try:
            self._result.append(run(self._stop))
        except BaseException as error:
            # Kept for the caller's thread: raised here it would only be printed.
            self._error = error
        finally:
            self._messages.put(None)

    # In the caller's thread.

    @sigterm_raises()
    def follow(self, run: Callable[[StopRequest], T], console: Console) -> T:
        """Calls `run` in another thread and the callbacks in this one, until the run has ended.

        A signal, or an error of a callback, is raised after the run has saved and ended.

        Args:
            run: gets the object by which this thread asks it to stop.
            console: gets a line for each epoch.
        """
        self._console = console
        # It must outlive the tasks: a death signal is tied to the thread that started a process, not to its process.
        # It is a daemon so that an interpreter that exits does not wait for a training.
        thread = threading.Thread(target=self._run, args=(run,), name="tf2dist", daemon=True)
        thread.start()
        # If this is not the main thread, Ctrl-C ends the program there without an exception here.
        at_exit = functools.partial(self._stop_at_exit, thread)
        atexit.register(at_exit)
        try:
            self._answer_all()
        except BaseException as error:
            self._stop.ask(_signal_of(error))
            self._wait_for_end(thread)
            # The user should see the error of the callback itself. At which step the run was saved goes with it.
            if isinstance(self._error, TfDistError):
                self._tell(error, f"tf2dist: {self._error}")
            raise
        finally:
            atexit.unregister(at_exit)
            if self._is_program_ending:
                # TensorFlow aborts a process that ends while a thread calls it. A handler may wait for this thread.
                threading.Event().wait(ENDING_SECS)
        thread.join()
        if self._error:
            raise self._error
        result: T = self._result[0]
        return result

    @staticmethod
    def _tell(error: BaseException, text: str) -> None:
        # A notebook shows no notes, and Ctrl-C has no text of its own. Nothing at all is shown of a SystemExit.
        if isinstance(error, KeyboardInterrupt) and not error.args:
            error.args = (text,)
        elif isinstance(error, SystemExit):
            print(text, file=sys.stderr)
        else:
            error.add_note(text)

    def _stop_at_exit(self, thread: threading.Thread) -> None:
        self._is_program_ending = True
        self._stop.ask(signal.SIGINT)
        self._wait_for_end(thread)
        if self._error:
            print(f"tf2dist: {self._error}", file=sys.stderr)

    def _wait_for_end(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            try:
                thread.join(POLL_SECS)
            except (KeyboardInterrupt, SystemExit) as error:
                # As on the command line, a later signal asks for an end at once.
                self._stop.ask(_signal_of(error))

    def _answer_all(self) -> None:
        while True:
            try:
                message = self._messages.get(timeout=POLL_SECS)
            except queue.Empty:
                continue
            if message is None:
                return
            # Without callbacks the queue must be emptied all the same: only its last entry ends this loop.
            if self._callbacks is None:
                continue
            if isinstance(message, HookCall):
                self._answer(message, self._callbacks)
            else:
                self._on_progress(message, self._callbacks)

    def _answer(self, call: HookCall, callbacks: Callbacks) -> None:
        self.step = call.step
        # A pause answers the request. A leader that begins may be a new one, which never got it.
        if call.kind in ("begin", "pause"):
            self._is_pause_requested = False
        arrays, state = (self._read(path) for path in (call.arrays, call.state))
        logs = _logs_of(call.logs)
        put = arrays, call.learning_rates, call.step
        match call.kind:
            case "begin":
                effects = callbacks.begin(call.epoch, *put, state)
            case "epoch":
                effects = callbacks.after_epoch(call.epoch, logs, *put)
            case "not finite":
                callbacks.note_not_finite(logs)
                return
            case "pause":
                effects = callbacks.pause(logs, *put)
            case _:
                effects = callbacks.after_last_step(*put)
        if effects.stop and call.epoch + 1 < self._num_epochs:
            self._end = f"{callbacks.ended_by()} ended the run in epoch {call.epoch + 1} of {self._num_epochs}"
        self._send(self._packed(call.number, effects))
        # Set by `on_epoch_begin`: Keras then takes one more step before it ends the epoch, so the stop comes with a
        # pause, which the leader grants after a step at the earliest.
        if callbacks.wants_to_stop and not effects.stop and call.kind != "end":
            self._request_pause()

    def _read(self, path: str) -> NamedArrays:
        with raising(f"{path}: the leader's variables cannot be read", kind=TrainingError, also=(ValueError,)):
            return take_arrays(path) if path else {}

    def _packed(self, number: int, effects: CallbackEffects) -> HookAnswer:
        # Arrays go by file, since a packet to a task holds 128 KiB. The leader removes the files when it has read them.
        with raising(f"{self.job}: the answer of the callbacks cannot be written", "make room", TrainingError):
            files = [
                write_arrays(self.job / f"answer-{number}-{name}.npz", arrays) if arrays else ""
                for name, arrays in (("arrays", effects.arrays), ("state", effects.state))
            ]
        return HookAnswer(number, effects.stop, effects.learning_rates, *files)

    def _on_progress(self, progress: ProgressMessage, callbacks: Callbacks) -> None:
        self.step = progress.step
        # Hooks that may read or change weights wait for the pause, which brings the weights of one step. The others
        # are called right here, so the cluster does not pause for them.
        if callbacks.needs_pauses:
            if not self._is_pause_requested:
                self._request_pause()
        elif callbacks.has_batch_hooks:
            callbacks.on_progress(progress.step, _logs_of(progress.metrics))

    def _request_pause(self) -> None:
        self._is_pause_requested = True
        self._send(PauseWanted())
