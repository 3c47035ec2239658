"""Meetings of several participants, each in its own thread, on real sockets."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.process.participants import ASYNC, Healthy, Meetings, all_of, cluster_of, wait_for


@pytest.fixture
def enter() -> Iterator[Meetings]:
    before = {thread for thread in threading.enumerate() if thread.name == "control"}
    files = psutil.Process().num_fds()
    with ThreadPoolExecutor(16) as pool:
        meetings = Meetings(pool)
        try:
            yield meetings
        finally:
            for participant in meetings.participants:
                participant.signum = 15  # ends a join that still waits
                participant.leave()
    wait_for(lambda: {t for t in threading.enumerate() if t.name == "control"} <= before, "threads end")
    wait_for(lambda: psutil.Process().num_fds() <= files, "sockets close")


@pytest.fixture(scope="module")
def healthy() -> Iterator[Healthy]:
    """A meeting of which all tasks have joined; shared by tests that must not disturb it."""
    with ThreadPoolExecutor(16) as pool:
        meetings = Meetings(pool)
        cluster = cluster_of("async", **ASYNC)
        participants = all_of(meetings, cluster)
        yield cluster, list(participants.values())
        for participant in meetings.participants:
            participant.leave()
