"""Private hosts for tests: network namespaces with an address each, on a bridge that can be cut.

    with hosts(3) as h:
        process = h[0].popen([sys.executable, "-m", "tf2dist", ...])    # h[0].address is "10.77.0.1"
        h.cut(1)
        h.heal(1)

Everything, including the bridge, is in a separate network namespace, from which nothing
leads to this machine's own network. A namespace lives as long as a process in it that reads from
the tests, so it ends with them, however they end.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_SECS = 20.0
HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, and TCP with its time stamps


class Namespace:
    """A network and a host name, held by a process that waits for the end of its input."""

    def __init__(self, name: str, parent: "Namespace | None" = None) -> None:
        users = ["--user", "--map-root-user"] if os.geteuid() and not parent else []
        script = f"hostname {name} && ip link set lo up && echo ready && exec cat"
        self._process = subprocess.Popen(
            [*(parent.enter if parent else []), "unshare", *users, "--net", "--uts", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then close this in order
        )
        assert self._process.stdout
        assert self._process.stderr
        self.pid = self._process.pid  # unshare and nsenter replace themselves by the command
        if self._process.stdout.readline() != "ready\n":
            why = self._process.stderr.read().strip()
            self.close()
            raise OSError(why)

    @property
    def enter(self) -> list[str]:
        """The prefix of a command that runs on this host."""
        users = ["--user", "--preserve-credentials"] if os.geteuid() else []
        return ["nsenter", "--target", str(self.pid), *users, "--net", "--uts"]

    def ip(self, words: str) -> str:
        return self._run("ip", words)

    def tc(self, words: str) -> None:
        self._run("tc", words)

    def _run(self, program: str, words: str) -> str:
        command = [*self.enter, program, *words.split()]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
        if completed.returncode:
            raise OSError(f"{program} {words}: {completed.stderr.strip()}")
        return completed.stdout

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Host:
    """One host.

    Attributes:
        name: what `socket.gethostname` gives in its processes.
        address: its IPv4 address.
    """

    def __init__(self, index: int, network: Namespace) -> None:
        self.name, self.address = f"host{index}", f"10.77.0.{index + 1}"
        self._processes: list[subprocess.Popen[str]] = []
        self._namespace = Namespace(self.name, network)
        try:
            network.ip(f"link add veth{index} type veth peer name eth0 netns {self._namespace.pid}")
            network.ip(f"link set veth{index} master bridge0 up")
            self._namespace.ip(f"addr add {self.address}/24 dev eth0")
            self._namespace.ip("link set eth0 up")
        except OSError:
            self.close()
            raise

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a process on the host; its whole process group ends with the host."""
        options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True, **options}
        process: subprocess.Popen[str] = subprocess.Popen([*self._namespace.enter, *command], **options)
        self._processes.append(process)
        return process

    def pids(self) -> list[int]:
        """The processes that run on the host, without the one that holds it."""
        network = os.readlink(f"/proc/{self._namespace.pid}/ns/net")
        found = []
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            with contextlib.suppress(OSError):  # it has just ended
                if os.readlink(path) == network:
                    found.append(int(path.parts[2]))
        return [pid for pid in found if pid != self._namespace.pid]

    def received_and_sent(self) -> tuple[int, int]:
        """The bytes of processes of the host, each way, without the headers of the packets."""
        (device,) = json.loads(self._namespace.ip("-json -statistics link show eth0"))
        counted = [device["stats64"][way] for way in ("rx", "tx")]
        received, sent = (one["bytes"] - HEADER_BYTES * one["packets"] for one in counted)
        return received, sent

    def transferred(self) -> int:
        """The bytes that processes of the host have sent and received, without the headers of the packets."""
        return sum(self.received_and_sent())

    def limit(self, bytes_per_sec: int, **bucket: int) -> None:
        """Sends no faster from now on."""
        self._namespace.tc(token_bucket("eth0", bytes_per_sec, **bucket))

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_SECS)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    with contextlib.suppress(OSError):  # what it did not read is not missed
                        stream.close()
        self._namespace.close()


class Hosts:
    """The hosts by index, and the cables between them."""

    def __init__(self, count: int) -> None:
        self._network = Namespace("network")
        self._hosts: list[Host] = []
        try:
            self._network.ip("link add bridge0 type bridge")
            self._network.ip("link set bridge0 up")
            for index in range(count):
                self._hosts.append(Host(index, self._network))
        except OSError:
            self.close()
            raise

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def cut(self, index: int) -> None:
        """Drops every packet from now on without notifying either side, as when a switch on the way fails."""
        self._network.ip(f"link set veth{index} nomaster")

    def heal(self, index: int) -> None:
        self._network.ip(f"link set veth{index} master bridge0")

    def limit(self, bytes_per_sec: int, **bucket: int) -> None:
        """Lets every host send, and receive, no faster from now on; skips the test if the system has no such limit."""
        try:
            for index, host in enumerate(self._hosts):
                host.limit(bytes_per_sec, **bucket)
                self._network.tc(token_bucket(f"veth{index}", bytes_per_sec, **bucket))
        except OSError as error:  # no program tc, or a kernel without tbf
            pytest.skip(f"links cannot be limited here: {error}")

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        self._network.close()


def token_bucket(device: str, bytes_per_sec: int, burst_ms: int = 10, queue_ms: int = 1000) -> str:
    """For `tc`: a limit of the rate at which a device sends.

    Args:
        burst_ms: what the bucket holds, at that rate: so much may leave at once.
        queue_ms: what is above the rate waits, up to so much of it; then packets are dropped, and TCP slows down.
    """
    burst = bytes_per_sec * burst_ms // 1000
    return f"qdisc add dev {device} root tbf rate {8 * bytes_per_sec}bit burst {burst} latency {queue_ms}ms"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Hosts 10.77.0.1 and up; skips the test if the system allows none."""
    for program in ("ip", "nsenter", "unshare", "hostname"):
        if not shutil.which(program):
            pytest.skip(f"separate hosts need the program {program}")
    try:
        machines = Hosts(count)
    except OSError as error:
        pytest.skip(f"separate hosts cannot be made here: {error}")
    try:
        yield machines
    finally:
        machines.close()


def with_hosts_file(path: Path, command: list[str], **options: Any) -> "subprocess.Popen[str]":
    """Starts a process that sees the given file as /etc/hosts, with all later changes."""
    if not shutil.which("unshare"):
        pytest.skip("a file of host names of one's own needs the program unshare")
    users = ["--user", "--map-root-user"] if os.geteuid() else []
    unshare = ["unshare", *users, "--mount", "--propagation", "private", "sh", "-c"]
    mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
    tried = subprocess.run([*unshare, mount, str(path), "true"], capture_output=True, timeout=TIMEOUT_SECS, check=False)
    if tried.returncode:
        pytest.skip(f"a file of host names of one's own cannot be had here: {tried.stderr.decode().strip()}")
    return subprocess.Popen([*unshare, mount, str(path), *command], **options)
