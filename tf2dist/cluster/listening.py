"""Listening sockets at a task's own address."""

import errno
import socket

from tf2dist.cluster.addresses import Endpoint, ip_of, resolve, split
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError, TaskLostError

BACKLOG = 64  # connections that the kernel keeps waiting; all other tasks may connect in the same moment


def listen_at_own(cluster: Cluster, task: Task) -> socket.socket:
    """Listens at a free port of the task's own address, which the kernel chooses.

    Raises:
        ClusterError: the address is not one of this host.
        TaskLostError: the name is unknown.
    """
    name = cluster.label(task)
    return listen_at(name, own_addresses(name, split(cluster.address(task))[0], 0))


def listen_at(name: str, candidates: list[Endpoint]) -> socket.socket:
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


def own_addresses(name: str, host: str, port: int) -> list[Endpoint]:
    """The addresses by which other hosts reach this one under the name `host`.

    Raises:
        TaskLostError: the name is unknown.
    """
    try:
        found = resolve(host, port)
    except socket.gaierror:
        raise TaskLostError(f"{name}: this host does not know the name {host}; correct it, or use an address") from None
    # Somebody who writes a loopback address means it: all tasks are on this host.
    if host == "localhost" or _is_address(host):
        return found
    # Some systems give a host's own name a loopback address, which other hosts cannot reach.
    return [(family, address) for family, address in found if not ip_of(address[0]).is_loopback]


def _is_address(host: str) -> bool:
    try:
        return bool(ip_of(host))
    except ValueError:
        return False
