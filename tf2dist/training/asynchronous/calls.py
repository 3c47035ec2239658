"""Waiting for the calls that asynchronous workers were given, when all workers may be away.

TensorFlow waits for ever: it calls a lost worker until that is back. A stop cannot, and need not: all
that was applied is on the parameter servers.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tf2dist.errors import TaskLostError
from tf2dist.training.asynchronous.server import ParameterServer
from tf2dist.training.loop import PauseRequest, PauseRequests, WorkersAway

POLL_SECS = 0.005
SETTLE_SECS, SETTLE_POLL_SECS = 2.0, 0.05  # an update that was admitted is applied in less, or its worker was lost
QUIET_SECS, QUIET_STEPS = 2.0, 2.0


class Patience:
    """Waits as long as workers work, or may come back; after a request to stop only for a while.

    Args:
        pause_request: asked all the time.
        progress: gives what changes while workers work.
        quiet_secs: how long that may stay as it is before a stop no longer waits.
    """

    def __init__(self, pause_request: PauseRequests, progress: Callable[[], Any], quiet_secs: float) -> None:
        self._pause_request, self._progress, self._quiet_secs = pause_request, progress, quiet_secs
        self._seen, self._since = None, 0.0
        self.requested = PauseRequest.NOTHING

    def look(self) -> None:
        """Raises WorkersAway if a stop is requested, and nothing has come of the workers for `quiet_secs`."""
        self.requested |= self._pause_request()
        if PauseRequest.STOP not in self.requested:
            return
        now, found = time.monotonic(), self._progress()
        if self._seen is None or found != self._seen:
            self._seen, self._since = found, now
        elif now - self._since > self._quiet_secs:
            raise WorkersAway


def quiet_secs(steps_per_sec: float, num_workers: int, grace_secs: float) -> float:
    """How long nothing may come of workers before a stop takes them for lost: longer than a step, if there is time.

    Args:
        steps_per_sec: of the whole cluster; 0 if not known yet.
        grace_secs: what a stop has for everything.
    """
    longest = grace_secs / 2
    return min(longest, max(QUIET_SECS, QUIET_STEPS * num_workers / steps_per_sec)) if steps_per_sec else longest


def wait_for_calls(
    coordinator: Any, pause_request: PauseRequests, progress: Callable[[], Any], quiet_secs: float
) -> PauseRequest:
    """Waits until all calls are done; returns what was requested for meanwhile. See `Patience`.

    Raises:
        WorkersAway: a stop is requested, and the calls are not done.
        Exception: what a worker has raised.
    """
    patience = Patience(pause_request, progress, quiet_secs)
    while not coordinator.done():
        patience.look()
        time.sleep(POLL_SECS)
    return patience.requested


def counts_of(servers: list[ParameterServer]) -> list[tuple[int, int]]:
    """The updates that each ps has admitted, and those that it has applied."""
    counts = [server.counts().numpy() for server in servers]
    return [(int(count[0]), int(count[1])) for count in counts]


def shut(servers: list[ParameterServer], limit: int) -> None:
    """Makes the ps keep what they have, though calls are in flight: a worker that comes back pushes in vain.

    Args:
        limit: of the updates that the calls in flight may bring.

    Raises:
        TaskLostError: the last push has reached some ps only, and nobody is there to bring it to the others.
    """
    admitted = [min(server.refuse_all(), limit) for server in servers]
    give_up_at = time.monotonic() + SETTLE_SECS
    while True:
        applied = [count for _, count in counts_of(servers)]
        if applied == admitted or time.monotonic() > give_up_at:
            break
        time.sleep(SETTLE_POLL_SECS)
    if len(set(applied)) > 1:
        raise TaskLostError(f"no worker is there, and the ps have applied {applied} updates: this cannot be saved")


def results(coordinator: Any, values: list[Any], pause_request: PauseRequests, quiet_secs: float) -> Iterator[Any]:
    """The values that calls return, in order, as soon as they are there. See `Patience`.

    Raises:
        WorkersAway: a stop is requested, and a value does not come.
        Exception: what a worker has raised.
    """
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def fetch() -> None:
        for value in values:
            try:
                found.put((coordinator.fetch(value), None))
            except Exception as error:
                found.put((None, error))
                return

    threading.Thread(target=fetch, name="results", daemon=True).start()
    for number in range(len(values)):
        patience = Patience(pause_request, functools.partial(int, number), quiet_secs)
        while True:
            try:
                value, error = found.get(timeout=POLL_SECS)
                break
            except queue.Empty:
                patience.look()
        if error:
            raise error
        yield value
