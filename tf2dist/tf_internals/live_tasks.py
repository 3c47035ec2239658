"""Which workers a coordinator works with: they may come late, go, and come back, each for itself.

TensorFlow connects to all tasks of its list at once. When a worker is lost it connects to all of them again, which
succeeds only when all are there: one that stays away keeps all others from coming back. Here its list has the workers
that listen. The thread in which it gives calls to another one waits, as it does for a lost worker.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf2dist.tf_internals.tensorflow import attribute, relying_on, this_context

COORDINATOR = "tensorflow.python.distribute.coordinator.cluster_coordinator"
LOOK_EVERY_SECS = 0.5
Waiter = Callable[..., AbstractContextManager[None]]


class LiveTasks:
    """The workers of one coordinator.

    Args:
        num_workers: that there may be.
        listening: returns which of these workers can be reached now, by their indices.
    """

    def __init__(self, num_workers: int, listening: Callable[[Collection[int]], set[int]]) -> None:
        self._all, self._listening = set(range(num_workers)), listening
        self._context = this_context()
        self._server_def: Any = None  # TensorFlow's list of all tasks
        self._away: set[int] = set()
        self._heard_at: dict[int, float] = {}  # since when a worker that is away listens
        self._changed = threading.Condition()  # holds these two

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """In this block a strategy connects to the workers that listen, and leaves out the others."""
        connect = attribute(tf, self._context, "set_server_def", Callable)

        def set_server_def(server_def: Any) -> None:
            self._server_def = server_def
            self._away = self._all - self._listening(self._all)
            connect(self._only(self._all - self._away))

        self._context.set_server_def = set_server_def
        try:
            yield
        finally:
            del self._context.set_server_def

    def follow(self, coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
        """Takes in the workers of this coordinator when they come, from now on."""
        # That of the class: in tests an earlier coordinator may have put its own here.
        update = attribute(tf, type(self._context), "update_server_def", Callable)
        update = functools.partial(update, self._context)
        self._context.update_server_def = lambda server_def: self._admit(update)
        with relying_on(tf, "ClusterCoordinator._cluster.failure_handler"):
            handler = coordinator._cluster.failure_handler
        wait = attribute(tf, handler, "wait_on_failure", Callable)
        wanted = attribute(tf, handler, "_cluster_due_for_update_or_finish", threading.Event)
        attribute(tf, handler, "_error_from_recovery", type(None))
        handler.wait_on_failure = self._patient(handler, wait, wanted)

    def _only(self, workers: Collection[int]) -> Any:
        """TensorFlow's list with these workers alone; their numbers stay."""
        server_def = type(self._server_def)()
        server_def.CopyFrom(self._server_def)
        for job in server_def.cluster.job:
            if job.name == "worker":
                for index in self._all.difference(workers):
                    job.tasks.pop(index)
        return server_def

    def _admit(self, update: Callable[[Any], None]) -> None:
        """Connects to the workers that have come; stands for `update_server_def` in TensorFlow's own thread.

        Returns at once if none has: TensorFlow holds a lock meanwhile, and calls again when a worker is waited for.
        """
        with self._changed:
            away = set(self._away)
        listening, now = self._listening(away), time.monotonic()
        with self._changed:
            # A process that is just ending may close its connections first. TensorFlow would wait for it without end.
            self._heard_at = {worker: self._heard_at.get(worker, now) for worker in listening}
            come = {worker for worker, since in self._heard_at.items() if now - since >= LOOK_EVERY_SECS}
        if not come:
            return
        gone = (self._all - away) - self._listening(self._all - away)  # TensorFlow has not noticed it yet
        with self._changed:
            self._away |= gone
        try:
            update(self._only(self._all - away - gone | come))
        except Exception:
            time.sleep(LOOK_EVERY_SECS)  # TensorFlow tries again at once
            raise
        with self._changed:
            self._away -= come
            self._heard_at.clear()
            self._changed.notify_all()

    def _patient(self, handler: Any, wait: Waiter, wanted: threading.Event) -> Waiter:
        """TensorFlow's `wait_on_failure`, which lasts until that worker itself has come.

        TensorFlow ends the wait of all workers when one of them has come.
        """

        @contextlib.contextmanager
        def wait_on_failure(
            on_failure_fn: Callable[[Exception], None] | None = None,
            on_transient_failure_fn: Callable[[], None] | None = None,
            on_recovery_fn: Callable[[], None] | None = None,
            worker_device_name: str = "",
        ) -> Iterator[None]:
            worker = int(worker_device_name.rpartition(":")[2])

            def failed(error: Exception) -> None:
                with self._changed:
                    self._away.add(worker)
                    self._heard_at.pop(worker, None)
                if on_failure_fn:
                    on_failure_fn(error)

            def recovered() -> None:
                with self._changed:
                    while worker in self._away:
                        if handler._error_from_recovery:  # a ps is lost
                            raise handler._error_from_recovery
                        wanted.set()
                        self._changed.wait(LOOK_EVERY_SECS)
                if on_recovery_fn:
                    on_recovery_fn()

            with wait(failed, on_transient_failure_fn, recovered, worker_device_name):
                yield

        return wait_on_failure
