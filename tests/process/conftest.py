"""A table at which meetings of several processes take place, here in threads, on real sockets."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.process.parties import ASYNC, Healthy, Table, all_of, cluster_of, wait_for


@pytest.fixture
def table() -> Iterator[Table]:
    before = {thread for thread in threading.enumerate() if thread.name == "control"}
    files = psutil.Process().num_fds()
    with ThreadPoolExecutor(16) as pool:
        made = Table(pool)
        try:
            yield made
        finally:
            for party in made.parties:
                party.signum = 15  # ends a join that still waits
                party.leave()
    wait_for(lambda: {t for t in threading.enumerate() if t.name == "control"} <= before, "threads end")
    wait_for(lambda: psutil.Process().num_fds() <= files, "sockets close")


@pytest.fixture(scope="module")
def healthy() -> Iterator[Healthy]:
    """A meeting that has agreed, for the tests of a file that leave it well."""
    with ThreadPoolExecutor(16) as pool:
        made = Table(pool)
        cluster = cluster_of("async", **ASYNC)
        parties = all_of(made, cluster)
        yield cluster, list(parties.values())
        for party in made.parties:
            party.leave()
