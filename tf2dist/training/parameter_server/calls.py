"""Waiting for the calls that asynchronous workers were given, even if all workers may be lost.

TensorFlow waits without limit until a lost worker is back. A stop cannot wait for that, and need not: all updates that
were applied are on the parameter servers.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tf2dist.errors import TaskLostError
from tf2dist.training.loop import PauseRequest, PauseRequests, WorkersAway
from tf2dist.training.parameter_server.server import ParameterServer

POLL_SECS = 0.005
# An admitted update is applied in less time than this, unless its worker was lost before it had pushed to all ps.
SETTLE_SECS, SETTLE_POLL_SECS = 2.0, 0.05
QUIET_SECS, QUIET_STEPS = 2.0, 2.0  # without progress for so long, and for so many steps' time, workers count as lost


class Patience:
    """Decides how long to wait for workers: without limit, but after a request to stop only while they make progress.

    Args:
        pause_request: called by every `look`.
        progress: returns a value that changes while workers make progress; called only once a stop is requested.
        quiet_secs: how long this value may stay the same after a request to stop.
    """

    def __init__(self, pause_request: PauseRequests, progress: Callable[[], Any], quiet_secs: float) -> None:
        self._pause_request, self._progress, self._quiet_secs = pause_request, progress, quiet_secs
        self._seen, self._since = None, 0.0
        self.requested = PauseRequest.NOTHING

    def look(self) -> None:
        """Raises WorkersAway if a stop is requested, and the workers have made no progress for `quiet_secs`."""
        self.requested |= self._pause_request()
        # Without a stop the launcher restarts lost workers, and a limit here would end a run that could continue.
        if PauseRequest.STOP not in self.requested:
            return
        now, progress = time.monotonic(), self._progress()
        if self._seen is None or progress != self._seen:
            self._seen, self._since = progress, now
        elif now - self._since > self._quiet_secs:
            raise WorkersAway


def quiet_secs(steps_per_sec: float, num_workers: int, grace_secs: float) -> float:
    """How long workers may make no progress before a stop takes them for lost: longer than a step, if time allows.

    Args:
        steps_per_sec: of the whole cluster; 0 if not known yet.
        grace_secs: the time that the whole stop may take.
    """
    longest = grace_secs / 2  # the other half is for the checkpoint
    return min(longest, max(QUIET_SECS, QUIET_STEPS * num_workers / steps_per_sec)) if steps_per_sec else longest


def wait_for_calls(
    coordinator: Any, pause_request: PauseRequests, progress: Callable[[], Any], quiet_secs: float
) -> PauseRequest:
    """Waits until all calls are done; returns what was requested in the meantime. See `Patience`.

    Raises:
        WorkersAway: a stop is requested, and the calls are not done.
        Exception: what a worker has raised.
    """
    patience = Patience(pause_request, progress, quiet_secs)
    # Not `coordinator.join`, which can neither be interrupted nor be given a limit.
    while not coordinator.done():
        patience.look()
        time.sleep(POLL_SECS)
    return patience.requested


def counts_of(servers: Sequence[ParameterServer]) -> list[tuple[int, int]]:
    """For each ps, the updates that it has admitted and those that it has applied."""
    counts = [server.counts().numpy() for server in servers]
    return [(int(count[0]), int(count[1])) for count in counts]


def cut(coordinator: Any, servers: Sequence[ParameterServer], ahead: int, limit: int, quiet_secs: float) -> bool:
    """Makes all ps stop at the same update soon, while calls are in flight.

    Returns:
        Whether they have. If not, no call is in flight.

    Args:
        ahead: how many updates the ps may admit while they are told one after the other.
        limit: the update at which they stop anyway.
        quiet_secs: how long they may apply none.

    Raises:
        WorkersAway: the workers make no progress.
    """
    last = min(limit, max(admitted for admitted, _ in counts_of(servers)) + ahead)
    for server in servers:
        server.stop_at.assign(last)
    seen, since = [-1], time.monotonic()
    while (applied := [count for _, count in counts_of(servers)]) != [last] * len(servers):
        if applied != seen:
            seen, since = applied, time.monotonic()
        elif coordinator.done():
            return False
        elif time.monotonic() - since > quiet_secs:
            raise WorkersAway
        time.sleep(POLL_SECS)
    return True


def shut(servers: Sequence[ParameterServer], limit: int) -> None:
    """Makes all ps refuse further updates while calls are in flight, even from a worker that comes back.

    Args:
        limit: the global step beyond which the ps refuse updates anyway.

    Raises:
        TaskLostError: the last push has reached only some of the ps, and no worker is left to take it to the others.
    """
    # A ps applies an update some time after it has admitted it; a snapshot in between would hold half of it.
    admitted = [min(server.refuse_all(), limit, int(server.stop_at)) for server in servers]
    give_up_at = time.monotonic() + SETTLE_SECS
    while True:
        applied = [count for _, count in counts_of(servers)]
        if applied == admitted or time.monotonic() > give_up_at:
            break
        time.sleep(SETTLE_POLL_SECS)
    # The parts of a model on different ps would belong to different steps.
    if len(set(applied)) > 1:
        raise TaskLostError(f"all workers are lost, and the ps have applied {applied} updates: this cannot be saved")


def results(
    coordinator: Any,
    values: list[Any],
    pause_request: PauseRequests,
    quiet_secs: float,
    watch: Callable[[], Any],
) -> Iterator[Any]:
    """The values that calls return, in order, as soon as each is available. See `Patience`.

    Args:
        watch: is called again and again while a value is awaited.

    Raises:
        WorkersAway: a stop is requested, and a value does not come.
        Exception: what a worker has raised.
    """
    # `fetch` cannot be given a limit, so it waits in a thread of its own, which is left behind if a value never comes.
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def fetch() -> None:
        for value in values:
            try:
                results.put((coordinator.fetch(value), None))
            except Exception as error:
                results.put((None, error))
                return

    threading.Thread(target=fetch, name="results", daemon=True).start()
    for number in range(len(values)):
        # Every value counts as progress, so the wait for each one starts over.
        patience = Patience(pause_request, functools.partial(int, number), quiet_secs)
        while True:
            try:
                value, error = results.get(timeout=POLL_SECS)
                break
            except queue.Empty:
                patience.look()
                watch()
        if error:
            raise error
        yield value
