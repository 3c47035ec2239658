"""The launching processes of separate hosts, without TensorFlow: cut links, lost hosts, wrong hosts."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.hosts import Host, Hosts, hosts
from tests.process.meet import Agreed, Failed, Listening, Said, Told
from tf2dist.hosts.protocol import Lost, Stop
from tf2dist.messages import unpack

pytestmark = pytest.mark.slow

PORT = 2222
WAIT_SECS = 30.0
CUT_SECS = 10.0
FOREIGN = """
from tf2dist.cluster import reachability
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError
try:
    reachability.check_own_address(Cluster("sync", {"worker": ("10.77.0.1:2222", "10.77.0.2:2222")}), Task("worker", 0))
except ClusterError as error:
    print(error)
"""


ASaid = TypeVar("ASaid", bound=Said)


class Member:
    """A process on a host that takes part in a meeting, and its messages."""

    def __init__(self, host: Host, jobs: dict[str, list[str]], job: str, index: int, **request: Any) -> None:
        request |= {"mode": "async" if "ps" in jobs else "sync", "jobs": jobs, "task": [job, index]}
        self.process = host.popen(
            [sys.executable, "-m", "tests.process.meet", json.dumps(request)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.said: list[Said] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def until(self, kind: type[ASaid]) -> ASaid:
        """The next message of a class; messages that come before it are kept in `said`."""
        deadline = time.monotonic() + WAIT_SECS
        while True:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line, f"ended without {kind.__name__}: {self.said}"
            result: Said = unpack(line.encode(), Said)
            if isinstance(result, kind):
                return result
            self.said.append(result)

    def say(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()


def workers(made: Hosts, *order: int) -> dict[str, list[str]]:
    return {"worker": [f"{made[index].address}:{PORT}" for index in order]}


@pytest.fixture
def three() -> Iterator[Hosts]:
    with hosts(3) as machines:
        yield machines


@pytest.fixture
def running(three: Hosts) -> Iterator[list[Member]]:
    """Three members that have agreed and lose each other after 5 seconds of silence."""
    yield from _running(three, lost_after_secs=5)


@pytest.fixture
def patient(three: Hosts) -> Iterator[list[Member]]:
    """The same with a loss only after 30 seconds of silence, as by default."""
    yield from _running(three, lost_after_secs=30)


def _running(made: Hosts, lost_after_secs: float) -> Iterator[list[Member]]:
    jobs = workers(made, 0, 1, 2)
    members = [Member(made[index], jobs, "worker", index, lost_after_secs=lost_after_secs) for index in range(3)]
    for member in members:
        member.until(Agreed)
    yield members
    end(*members)


def end(*members: Member) -> None:
    for member in members:
        member.process.kill()
        member.process.wait(WAIT_SECS)


def test_a_link_that_is_cut_for_ten_seconds_and_restored(three: Hosts, patient: list[Member]) -> None:
    three.cut(1)
    patient[1].say("stop 10")  # said while the link is cut
    time.sleep(CUT_SECS)  # the failure itself, not a wait for something
    three.heal(1)
    for index in (0, 2):
        assert patient[index].until(Stop).task == "worker-1"
        assert not [event for event in patient[index].said if isinstance(event, Lost)]
    patient[2].say("stop 12")
    assert patient[1].until(Stop).task == "worker-2"
    assert not [event for event in patient[1].said if isinstance(event, Lost)]


def test_a_host_that_is_cut_off_for_good(three: Hosts, running: list[Member]) -> None:
    begun = time.monotonic()
    three.cut(1)
    try:
        lost = [running[0].until(Lost), running[2].until(Lost), running[1].until(Lost)]
        took = time.monotonic() - begun
    finally:
        three.heal(1)
    assert [event.task for event in lost] == ["worker-1", "worker-1", "worker-0"]
    assert "silent for" in lost[0].why
    assert "silent for" in lost[2].why
    assert 3 < took < 15


def test_a_killed_process_is_lost_at_once(running: list[Member]) -> None:
    running[2].process.kill()
    assert running[0].until(Lost).task == running[1].until(Lost).task == "worker-2"


def test_a_duplicate_index_on_a_third_host(three: Hosts) -> None:
    """Its cluster list is equal: a proxy, or a host that has another host's task and does not check its address."""
    jobs = workers(three, 0, 1)
    holders = [Member(three[index], jobs, "worker", index) for index in range(2)]
    for member in holders:
        member.until(Agreed)
    duplicate = Member(three[2], jobs, "worker", 1)
    error = duplicate.until(Failed)
    assert error.code == 2
    assert f"worker 1 is already held by host host1 pid {holders[1].process.pid}" in error.text
    holders[1].say("stop 10")  # the job has noticed nothing
    assert holders[0].until(Stop).task == "worker-1"
    assert {type(said) for said in holders[0].said} <= {Listening, Told}
    end(*holders)


def test_a_second_coordinator_on_a_third_host(three: Hosts) -> None:
    a, b, c = (host.address for host in (three[0], three[1], three[2]))
    jobs = {"chief": [f"{a}:2222"], "ps": [f"{a}:2223"], "worker": [f"{b}:2222"]}
    members = [Member(three[place], jobs, job, 0) for job, place in (("chief", 0), ("ps", 0), ("worker", 1))]
    for member in members:
        member.until(Agreed)
    error = Member(three[2], {**jobs, "chief": [f"{c}:2222"]}, "chief", 0).until(Failed)
    assert error.code == 2
    assert f"of chief-0 at {a}:2222, host host0 pid {members[0].process.pid}" in error.text
    members[2].say("stop 10")
    for member in members[:2]:
        member.until(Stop)
        assert not [event for event in member.said if isinstance(event, Lost)]
    end(*members)


def test_a_wrong_order_on_one_host(three: Hosts) -> None:
    right = [Member(three[index], workers(three, 0, 1, 2), "worker", index) for index in range(2)]
    for member in right:
        member.until(Listening)
    error = Member(three[2], workers(three, 1, 0, 2), "worker", 2).until(Failed)
    assert error.code == 2
    assert "cluster.worker: [10.77.0." in error.text
    mended = Member(three[2], workers(three, 0, 1, 2), "worker", 2)
    for member in [*right, mended]:
        member.until(Agreed)
    end(*right, mended)


def test_two_hosts_that_both_claim_to_lead(three: Hosts) -> None:
    both = [
        Member(three[0], workers(three, 0, 1), "worker", 0),
        Member(three[1], workers(three, 1, 0), "worker", 0),
    ]
    for member in both:
        error = member.until(Failed)
        assert error.code == 2
        assert "cluster.worker: [10.77.0." in error.text


def test_a_host_that_is_not_there_has_no_route_or_gives_no_answer(three: Hosts) -> None:
    jobs = {"worker": ["10.77.0.1:2222", "10.77.0.99:2222", "10.99.0.1:2222"]}
    error = Member(three[0], jobs, "worker", 0, timeout_secs=7).until(Failed)
    assert error.code == 138
    assert "worker-1 at 10.77.0.99:2222 (No route to host" in error.text
    assert "worker-2 at 10.99.0.1:2222 (Network is unreachable" in error.text


def test_a_foreign_address(three: Hosts) -> None:
    """A process with another host's task finds that out by itself, before it connects to any peer."""
    process = three[1].popen([sys.executable, "-c", FOREIGN], cwd=REPOSITORY, stdout=subprocess.PIPE)
    text, _ = process.communicate(timeout=WAIT_SECS)
    assert text.startswith("worker 0 (10.77.0.1:2222): is not an address of this host")


def test_the_control_port_is_closed_at_other_addresses(three: Hosts, running: list[Member]) -> None:
    command = ["cat", "/proc/net/tcp"]
    text, _ = three[0].popen(command, stdout=subprocess.PIPE).communicate(timeout=WAIT_SECS)
    listening = [line.split()[1] for line in text.splitlines()[1:] if line.split()[3] == "0A"]
    assert listening == ["01004D0A:0C96"], "10.77.0.1:3222"


def test_nothing_is_left() -> None:
    with hosts(2) as machines:
        member = Member(machines[0], workers(machines, 0, 1), "worker", 0)
        member.until(Listening)
        pids = [member.process.pid, *(machines[index]._namespace.pid for index in range(2)), machines._network.pid]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
