"""Addresses on the network: whether they belong to this host, and whether anyone answers there."""

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from tests.hosts import with_hosts_file
from tf2dist.cluster import reachability
from tf2dist.cluster.addresses import Ip
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError, Interrupted, TaskLostError
from tf2dist.linux import unused_ports

WORKER = Task("worker", 0)


def at(*addresses: str) -> Cluster:
    return Cluster("sync", {"worker": addresses})


def test_a_free_port_of_this_host_is_accepted() -> None:
    (port,) = unused_ports(1)
    for host in ("localhost", "127.0.0.1", socket.gethostname()):
        reachability.check_own_address(at(f"{host}:{port}"), WORKER)


def test_addresses_of_a_family_that_the_kernel_lacks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a kernel without IPv6, for which the resolver may name IPv6 addresses all the same."""
    (port,), no_family = unused_ports(1), (99, socket.SOCK_STREAM, 6, "", ("::1", 1))
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [no_family, *known(*args, **options)])
    reachability.check_own_address(at(f"127.0.0.1:{port}"), WORKER)
    with pytest.raises(ClusterError, match="is not an address of this host"):
        reachability.check_own_address(at("10.255.255.1:2222"), WORKER)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"worker 0 \(10.255.255.1:2222\): is not an address of this host"):
        reachability.check_own_address(at("10.255.255.1:2222"), WORKER)


def test_an_unknown_name_is_worth_a_retry() -> None:
    """It may be published later."""
    for port in ("2222", "2223"):
        with pytest.raises(TaskLostError, match=r"does not know the name no-such-host\.invalid"):
            reachability.check_own_address(at(f"no-such-host.invalid:{port}"), WORKER)
    messages: list[str] = []
    with pytest.raises(TaskLostError, match=r"worker 0 \(no-such-host\.invalid:1\): after . s .* startup_timeout_secs"):
        reachability.wait_for_own_name(at("no-such-host.invalid:1"), WORKER, 0.5, messages.append)


def test_only_the_own_name_is_waited_for_while_it_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host's name in this place is a mistake, of which the user learns at once."""
    messages: list[str] = []
    own = socket.gethostname()
    monkeypatch.setattr(reachability, "ips_of", lambda host: [ipaddress.ip_address("10.255.255.1")])
    for host, options in (("another", {}), (f"not-{own}", {}), (own, {"must_lead_here": False})):
        reachability.wait_for_own_name(at(f"{host}:1"), WORKER, 600, messages.append, **options)
    reachability.wait_for_own_name(at(f"{own}.tf2dist:1"), WORKER, 1.5, messages.append)
    assert messages == [f"waiting for this host's own name {own}.tf2dist to lead here and not to 10.255.255.1, 1 s"]


def test_an_own_name_that_leads_here_at_last_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    before = iter(["10.255.255.1"])
    monkeypatch.setattr(reachability, "ips_of", lambda _: [ipaddress.ip_address(next(before, "127.0.0.1"))])
    began_at = time.monotonic()
    reachability.wait_for_own_name(at(f"{socket.gethostname()}:1"), WORKER, 60, lambda text: None)
    assert 0.2 < time.monotonic() - began_at < 30


def test_waiting_for_the_own_name_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal, even while the name server does not answer at all."""
    answer = threading.Event()

    def silent(host: str) -> list[Ip]:
        os.kill(os.getpid(), signal.SIGUSR1)
        answer.wait(30)
        return []

    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = signal.signal(signal.SIGUSR1, end)
    monkeypatch.setattr(reachability, "ips_of", silent)
    try:
        with pytest.raises(Interrupted):
            reachability.wait_for_own_name(at("late:1"), WORKER, 600, lambda text: None)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with pytest.raises(TaskLostError):
            reachability.wait_for_own_name(at("late:1"), WORKER, 0.5, lambda text: None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    answer.set()


NAMES = """
127.0.0.1 localhost me
10.1.2.3 one other
10.1.2.4 two
"""


def test_two_names_of_one_address_are_refused(tmp_path: Path) -> None:
    script = """
from tf2dist.cluster import reachability
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError
def look(*addresses):
    try:
        reachability.check_no_alias(Cluster("sync", {"worker": addresses}), Task("worker", 0), 600.0, print)
    except ClusterError as error:
        print(error)
look("one:2222", "two:2222", "no-such-host.invalid:2222", "other:2223")
look("one:2222", "two:2222", "other:2222")
look("10.1.2.3:2222", "one:2222")
"""
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text(NAMES)
    process = with_hosts_file(hosts_file, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=30)[0].splitlines() == [
        "worker 2 (other:2222): is 10.1.2.3, the same address as worker 0 (one:2222); every task needs its own",
        "worker 1 (one:2222): is 10.1.2.3, the same address as worker 0 (10.1.2.3:2222); every task needs its own",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_taken_port_is_refused(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match="does the same task run here already"):
            reachability.check_own_address(at(address), WORKER)


def test_the_error_names_the_missing_tasks_and_why() -> None:
    messages: list[str] = []
    missing, there = unused_ports(2)
    with socket.create_server(("localhost", there)):
        cluster = at(f"localhost:{there}", f"localhost:{missing}", "no-such-host.invalid:1")
        with pytest.raises(TaskLostError) as caught:
            reachability.wait_for_peers(cluster, cluster.tasks, 0.1, 0.2, messages.append)
    assert f"worker-1 at localhost:{missing} (connection refused)" in str(caught.value)
    assert "worker-2 at no-such-host.invalid:1 (name unknown)" in str(caught.value)
    assert "worker-0" not in str(caught.value)


def test_hosts_that_drop_packets_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "PROBE_SECS", 0.2)
    with contextlib.ExitStack() as sockets:
        # The kernel drops what asks for a connection while nobody accepts those that wait already.
        gate = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(gate.getsockname())
        cluster = at(*[f"127.0.0.1:{gate.getsockname()[1]}"] * 20)
        began_at = time.monotonic()
        with pytest.raises(TaskLostError, match=r"worker-19 at 127\.0\.0\.1:[0-9]+ \(no answer\)"):
            reachability.wait_for_peers(cluster, cluster.tasks, 0.1, 30.0, lambda text: None)
        assert time.monotonic() - began_at < 2
        began_at = time.monotonic()
        reachability.wait_until_gone(cluster, cluster.tasks, 30)
        assert time.monotonic() - began_at < 2


def test_the_user_reads_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "LINE_EVERY_SECS", 0.2)
    lines: list[str] = []
    wait = reachability.Wait(30.0, lines.append, first_line_secs=0.05)
    while len(lines) < 3:
        wait.notify("worker-1")
    assert wait.secs >= 0.45
    assert all(line.startswith("waiting for worker-1, ") for line in lines)
    assert not wait.is_over


def test_tasks_that_do_not_answer_in_time_are_left_out() -> None:
    never = threading.Event()
    answers = reachability.ask_all(lambda task: task.index or never.wait(30), [WORKER, Task("worker", 7)], 0.5)
    never.set()
    assert answers == {Task("worker", 7): 7}


def test_a_task_that_loads_its_data_is_waited_for_longer() -> None:
    loading, absent = unused_ports(2)
    with pytest.raises(TaskLostError, match=f"still waiting for worker-0 at localhost:{absent}"):
        reachability.wait_for_peers(at(f"localhost:{absent}"), [WORKER], 0.1, 0.2, lambda text: None)
    servers: list[socket.socket] = []
    timer = threading.Timer(0.3, lambda: servers.append(socket.create_server(("localhost", loading))))
    timer.start()
    reachability.wait_for_peers(at(f"localhost:{loading}"), [WORKER], 0.1, 30.0, lambda text: None)
    servers.pop().close()


def test_waiting_ends_when_the_last_task_listens() -> None:
    (port,) = unused_ports(1)
    servers: list[socket.socket] = []
    timer = threading.Timer(0.3, lambda: servers.append(socket.create_server(("localhost", port))))
    timer.start()
    reachability.wait_for_peers(at(f"localhost:{port}"), [WORKER], 30, 0.0, lambda text: None)
    assert servers
    began_at = time.monotonic()
    reachability.wait_until_gone(at(f"localhost:{port}"), [WORKER], 0.3)
    assert 0.3 <= time.monotonic() - began_at < 2
    servers[0].close()
    reachability.wait_until_gone(at(f"localhost:{port}"), [WORKER], 30)
