"""Addresses: what a name resolves to, who can reach an address, which process holds a port, and where a task listens.

A TensorFlow server has no authentication and listens on every interface of its host
(https://github.com/tensorflow/tensorflow/blob/master/SECURITY.md), so anyone who can reach it can run code there.
Beside its port a task has a control port, at which its launching process listens, and free ones.
"""

import contextlib
import errno
import ipaddress
import socket

import psutil

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import CONTROL_PORT_SHIFT
from tf2dist.errors import ClusterError, TaskLostError

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
Endpoint = tuple[int, tuple[str, int]]  # a family of `socket`, an address and a port
BACKLOG = 64  # connections that the kernel keeps waiting; all other tasks may connect in the same moment


def split(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of "host:port"."""
    # From the right: an IPv6 address has colons of its own.
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def ip_in(host: str) -> Ip | None:
    """The address in a text, as IPv4 if it is IPv4-mapped; None for a name."""
    try:
        return as_ipv4(ip_of(host.strip("[]")))
    except ValueError:
        return None


def canonical_host(address: str) -> str:
    """One text for all spellings of the host in "host:port", without looking up names; loopback addresses are one."""
    # Names are case-insensitive, and a trailing dot only marks them as complete.
    host, _ = split(address)
    ip = ip_in(host)
    return "localhost" if ip and ip.is_loopback else str(ip or host.lower().removesuffix("."))


def resolve(host: str, port: int) -> list[Endpoint]:
    """The addresses of a name, each with the port, for a socket; IPv4 first. May wait long for a name server.

    Raises:
        socket.gaierror: the name is unknown.
    """
    # Resolvers order the addresses of a name differently; all hosts must prefer the same family.
    return sorted(_look_up(host, port), key=lambda endpoint: endpoint[0] != socket.AF_INET)


def resolve_own(cluster: Cluster, task: Task, port: int) -> list[Endpoint]:
    """The addresses of this host's own task, with another port."""
    host, _ = split(cluster.address(task))
    try:
        return resolve(host, port)
    except socket.gaierror:
        raise TaskLostError(
            f"{cluster.label(task)}: this host does not know the name {host}; correct it, or use an address"
        ) from None


def ips_of(host: str) -> list[Ip]:
    """All addresses of a name, without duplicates; none if it is unknown. May wait long for a name server."""
    try:
        return list(dict.fromkeys(ip_of(address[0]) for _, address in _look_up(host, 0)))
    except OSError:
        return []


def _look_up(host: str, port: int) -> list[Endpoint]:
    try:
        # Without the type there would be an entry for each kind of socket.
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # it cannot be encoded as a host name
        raise socket.gaierror(socket.EAI_NONAME, "name unknown") from None
    return [(int(family), (str(address[0]), int(address[1]))) for family, _, _, _, address in infos]


def ip_of(text: str) -> Ip:
    """Parses an address; the system may append the name of an interface, as in "fe80::1%eth0".

    Raises:
        ValueError: it is a name, or empty.
    """
    return ipaddress.ip_address(text.partition("%")[0])


def as_ipv4(ip: Ip) -> Ip:
    """The IPv4 address in an IPv4-mapped IPv6 address, such as ::ffff:10.0.0.1; any other address unchanged."""
    return getattr(ip, "ipv4_mapped", None) or ip


def is_public(ip: Ip) -> bool:
    """Whether the address is routed in the internet."""
    # Not all of these properties look at the IPv4 address inside an IPv6 one: `is_multicast` does not.
    ip = as_ipv4(ip)
    # Some multicast addresses count as global; no host has one as its own.
    return bool(ip.is_global) and not ip.is_multicast


def check_not_public(cluster: Cluster, task: Task, *, allow_public: bool) -> None:
    """Refuses an address that can be reached from the internet, unless the user allows it."""
    host, _ = split(cluster.address(task))
    public = [ip for ip in ips_of(host) if is_public(ip)]
    if public and not allow_public:
        resolved = "" if str(public[0]) == host else f" is {public[0]} and"
        raise ClusterError(
            f"{cluster.label(task)}:{resolved} can be reached from the internet, where anybody could run "
            "code in TensorFlow's server; use a private address, or give cluster.allow_public=true"
        )


def exposure_warning(cluster: Cluster, task: Task) -> str:
    """The warning about who can reach the task's server, even one at localhost; "" if the host has only a loopback."""
    _, port = split(cluster.address(task))
    # The interfaces and not the task's address, since the server ignores which address it was given.
    ips = interface_addresses()
    if all(ip.is_loopback for ip in ips):
        return ""
    public = [str(ip) for ip in ips if is_public(ip)]
    listed = f" ({', '.join(public)} included, which can be reached from the internet)" if public else ""
    return (
        f"TensorFlow's server has no password and listens on every interface of this host{listed}: anyone who can "
        f"reach port {port} can run any graph, and so read and write files with this user's rights; keep it in a "
        "private network"
    )


def interface_addresses() -> list[Ip]:
    """All addresses of this host's interfaces."""
    entries = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    return [ip_of(entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]


def port_holder(port: int) -> str:
    """The process that listens on a port of this host, as "pid 123 (command line)"; "" if it cannot be found."""
    with contextlib.suppress(OSError, psutil.Error):  # no /proc, or the process has just ended
        for connection in psutil.net_connections("tcp"):
            pid, endpoint = connection.pid, connection.laddr
            if pid and connection.status == psutil.CONN_LISTEN and endpoint and endpoint.port == port:
                command = " ".join(" ".join(psutil.Process(pid).cmdline()).split())
                return f"pid {pid} ({command[:80]})"
    return ""


def control_address(address: str, shift: int = CONTROL_PORT_SHIFT) -> tuple[str, int]:
    """Host and control port of the task whose TensorFlow port is at "host:port"."""
    host, port = split(address)
    return host, control_port(port, shift)


def control_port(port: int, shift: int) -> int:
    """The control port of the task whose TensorFlow port this is."""
    # Above 65535 there are no ports. All hosts derive the same port from the cluster list.
    return port + shift if port + shift <= 65535 else port - shift


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
    """Listens at the task's own address alone, or at all addresses if this host does not have it (behind a proxy)."""
    _, port = control_address(cluster.address(task), shift)
    # The addresses are tried in order, so the port is open at all addresses only if no other way is left.
    return _listen_at(cluster.label(task), [*_reachable(cluster, task, port), (socket.AF_INET, ("", port))])


def listen_at_own(cluster: Cluster, task: Task) -> socket.socket:
    """Listens at a free port of the task's own address, which the kernel chooses."""
    return _listen_at(cluster.label(task), _reachable(cluster, task, 0))


def _listen_at(name: str, candidates: list[Endpoint]) -> socket.socket:
    """Listens at the first of the candidates that is an address of this host.

    Args:
        name: of the task, for errors.
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
