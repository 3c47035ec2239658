"""``profile=true``: a profile of two seconds of the training, for TensorBoard.

The leader chooses the time. In mode async it signals the first worker and the first ps by a file in
their in-memory file systems, which is also how it announces the end of the run. Each task writes
its profile into the run directory on its own host.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import first_line

RAM_FILE = "ram://tf2dist/profile"
AFTER_SECS = 4.0  # by then the number of steps in a call is chosen
SECS = 2.0
JOIN_SECS = 10.0  # the thread may be in a call to a lost task, which must not keep the run from ending


def folder_of(run_dir: Path, task: Task) -> Path:
    """The folder of a task's profile."""
    # The profiler names its file after the host and the second, so tasks of one host would overwrite each other's.
    return run_dir / "tensorboard" / str(task)


@contextmanager
def of_run(cluster: Cluster, task: Task, run_dir: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """On the leader: profiles two seconds of the block, here and on one task of each kind.

    Args:
        warn: takes a line for the user if there is no profile.
    """
    ended = threading.Event()
    # Synchronous workers all do the same work, so the leader's profile stands for them.
    profiled = [Task("worker", 0), Task("ps", 0)] if cluster.has_coordinator else []
    arguments = (profiled, folder_of(run_dir, task), ended, warn)
    # In a thread, since the training must go on meanwhile.
    thread = threading.Thread(target=_run, args=arguments, name="profile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(JOIN_SECS)


def _run(profiled: list[Task], folder: Path, ended: threading.Event, warn: Callable[[str], None]) -> None:
    if ended.wait(AFTER_SECS):
        warn(f"profile: not made, since the training took less than {AFTER_SECS:.0f} s")
        return
    for other in profiled:
        try:
            # The operation runs in the process of that task, so it writes into the memory there.
            with tf.device(f"/job:{other.job}/replica:0/task:{other.index}/device:CPU:0"):
                tf.io.write_file(RAM_FILE, "")
        except tf.errors.OpError as error:
            warn(f"profile: not made of {other} ({first_line(str(error))})")
    record(folder, ended)


def record(folder: Path, ended: threading.Event) -> None:
    """Profiles this process for `SECS`, or until `ended` is set."""
    tf.profiler.experimental.start(str(folder))
    ended.wait(SECS)
    tf.profiler.experimental.stop()


class Responder:
    """On a ps or worker that serves the coordinator: makes a profile when the coordinator asks for one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended = folder, threading.Event()
        self._thread: threading.Thread | None = None

    def poll(self) -> None:
        """Starts the profile if it has been asked for; cheap enough to be called several times a second."""
        if self._thread is None and tf.io.gfile.exists(RAM_FILE):
            arguments = (self._folder, self._ended)
            self._thread = threading.Thread(target=record, args=arguments, name="profile", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Ends a profile in progress, and waits until it is written."""
        self._ended.set()
        if self._thread:
            self._thread.join(JOIN_SECS)
