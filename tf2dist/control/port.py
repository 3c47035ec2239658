"""The control port of a task, at which its launching process listens; TensorFlow has another port."""

import socket

from tf2dist.cluster.addresses import split
from tf2dist.cluster.listening import listen_at, own_addresses
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import CONTROL_PORT_SHIFT
from tf2dist.errors import ClusterError


def control_address(address: str, shift: int = CONTROL_PORT_SHIFT) -> tuple[str, int]:
    """Host and control port of the task whose TensorFlow port is at "host:port"."""
    host, port = split(address)
    # Above 65535 there are no ports. All hosts derive the same port from the cluster list.
    return host, port + shift if port + shift <= 65535 else port - shift


def check_ports(cluster: Cluster, shift: int) -> None:
    """Raises ClusterError if a task's control port is also a port or the control port of another task."""
    taken = {split(cluster.address(task)): f"the port of {task}" for task in cluster.tasks}
    for task in cluster.tasks:
        host, port = control_address(cluster.address(task), shift)
        if (host, port) in taken:
            raise ClusterError(
                f"{cluster.label(task)}: its control port {port} is {taken[host, port]}; "
                f"give other ports, or another cluster.control_port_shift than {shift}, the same to every task"
            )
        # Control ports may also meet each other: one shifted up and one shifted down.
        taken[host, port] = f"the control port of {task}"


def listen(cluster: Cluster, task: Task, shift: int) -> socket.socket:
    """Listens at the task's own address alone, or at all addresses if this host does not have it (behind a proxy).

    Raises:
        ClusterError: the port is taken.
        TaskLostError: the name is unknown.
    """
    host, port = control_address(cluster.address(task), shift)
    # The addresses are tried in order, so the port is open at all addresses only if no other way is left.
    name = cluster.label(task)
    return listen_at(name, [*own_addresses(name, host, port), (socket.AF_INET, ("", port))])
