"""The ports of a task beside TensorFlow's: its control port, at which its launching process listens, and free ones."""

import errno
import socket

from tf2dist.cluster.addresses import Endpoint, ip_in, ip_of, resolve_own, split
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import CONTROL_PORT_SHIFT
from tf2dist.errors import ClusterError

BACKLOG = 64  # connections that the kernel keeps waiting; all other tasks may connect in the same moment


def control_address(address: str, shift: int = CONTROL_PORT_SHIFT) -> tuple[str, int]:
    """Host and control port of the task whose TensorFlow port is at "host:port"."""
    host, port = split(address)
    # Above 65535 there are no ports. All hosts derive the same port from the cluster list.
    return host, port + shift if port + shift <= 65535 else port - shift


def check_control_ports(cluster: Cluster, shift: int) -> None:
    """Raises ClusterError if a task's control port is also a port or the control port of another task."""
    users = {split(cluster.address(task)): f"the port of {task}" for task in cluster.tasks}
    for task in cluster.tasks:
        host, port = control_address(cluster.address(task), shift)
        if (host, port) in users:
            raise ClusterError(
                f"{cluster.label(task)}: its control port {port} is {users[host, port]}; "
                f"give other ports, or another cluster.control_port_shift than {shift}, the same to every task"
            )
        # Control ports may also meet each other: one shifted up and one shifted down.
        users[host, port] = f"the control port of {task}"


def listen_at_control_port(cluster: Cluster, task: Task, shift: int) -> socket.socket:
    """Listens at the task's own address alone, or at all addresses if this host does not have it (behind a proxy).

    Raises:
        ClusterError: the port is taken.
        TaskLostError: the name is unknown.
    """
    _, port = control_address(cluster.address(task), shift)
    # The addresses are tried in order, so the port is open at all addresses only if no other way is left.
    return _listen_at(cluster.label(task), [*_reachable(cluster, task, port), (socket.AF_INET, ("", port))])


def listen_at_own(cluster: Cluster, task: Task) -> socket.socket:
    """Listens at a free port of the task's own address, which the kernel chooses.

    Raises:
        ClusterError: the address is not one of this host.
        TaskLostError: the name is unknown.
    """
    return _listen_at(cluster.label(task), _reachable(cluster, task, 0))


def _listen_at(name: str, candidates: list[Endpoint]) -> socket.socket:
    """Listens at the first of the candidates that is an address of this host.

    Args:
        name: of the task, for errors.

    Raises:
        ClusterError: none of them is, or the port is taken.
    """
    # The name may also stand for addresses that are not this host's; the kernel refuses those.
    for family, address in candidates:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # a kernel without IPv6 refuses the socket
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise ClusterError(
                    f"{name}: its control port {address[1]} is taken on this host; does the same task run here "
                    "already? Otherwise give another cluster.control_port_shift, the same to every task"
                ) from None
            if error.errno == errno.EADDRNOTAVAIL:  # not an address of this host
                continue
            raise ClusterError(f"{name}: cannot listen at its control port {address[1]}: {error.strerror}") from None
        # A connection may be closed between the readiness of the socket and `accept`, which would then block.
        listener.setblocking(False)
        return listener
    raise ClusterError(f"{name}: this host has no address to listen at")


def _reachable(cluster: Cluster, task: Task, port: int) -> list[Endpoint]:
    """The addresses by which other hosts reach this one under the name of its task, with another port."""
    host, _ = split(cluster.address(task))
    endpoints = resolve_own(cluster, task, port)
    # Somebody who writes a loopback address means it: all tasks are on this host.
    if host == "localhost" or ip_in(host):
        return endpoints
    # Some systems give a host's own name a loopback address, which other hosts cannot reach.
    return [(family, address) for family, address in endpoints if not ip_of(address[0]).is_loopback]
