"""What an address means: who can reach it, and which process holds its port on this host.

A TensorFlow server asks nobody for a password and listens on every interface of its host
(https://github.com/tensorflow/tensorflow/blob/master/SECURITY.md), so an address is a border.
"""

import contextlib
import ipaddress
import re
import socket
from typing import Any

import psutil

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def split(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolve(host: str) -> list[Ip]:
    """All addresses of a name, each once; none if nobody knows it."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(ip_of(str(info[4][0])) for info in infos))


def ip_of(text: str) -> Ip:
    """An address as the system writes it, which may name an interface behind it, as in "fe80::1%eth0"."""
    return ipaddress.ip_address(text.partition("%")[0])


def is_public(ip: Ip) -> bool:
    """Whether the internet routes it; an IPv4 address written as IPv6 counts as what it is."""
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    return bool(mapped.is_global) and not mapped.is_multicast


def check_not_public(cluster: Cluster, task: Task, *, allow_public: bool) -> None:
    """Closed by default: see the head of this file.

    Raises:
        ClusterError: the task's own address is one that the internet routes, and that is not allowed.
    """
    address = cluster.address(task)
    host, _ = split(address)
    public = [ip for ip in resolve(host) if is_public(ip)]
    if public and not allow_public:
        which = "" if str(public[0]) == host else f" is {public[0]} and"
        raise ClusterError(
            f"{task.job} {task.index} ({address}):{which} can be reached from the internet, where anybody could run "
            "code in TensorFlow's server; use a private address, or give cluster.allow_public=true"
        )


def exposure(cluster: Cluster, task: Task) -> str:
    """What the user has to know, at localhost too; "" on a host that has nothing but its loopback."""
    _, port = split(cluster.address(task))
    ips = interface_addresses()
    if all(ip.is_loopback for ip in ips):
        return ""
    public = [str(ip) for ip in ips if is_public(ip)]
    also = f" ({', '.join(public)} included, which the internet routes)" if public else ""
    return (
        f"TensorFlow's server has no password and listens on every interface of this host{also}: whoever can reach "
        f"port {port} can run any graph, so read and write files with this user's rights; keep it in a private network"
    )


def interface_addresses() -> list[Ip]:
    """All addresses of this host's interfaces."""
    found = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    return [ip_of(each.address) for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]


def port_holder(port: int) -> str:
    """The process that listens on a port of this host, as "pid 123 (command line)"; "" if it cannot be seen.

    Of several that share a socket it is the one that has forked the others, such as a web server's first process.
    """
    with contextlib.suppress(OSError, psutil.Error):  # no /proc, or the process has just ended
        pids = [each.pid for each in psutil.net_connections("tcp") if each.pid and _listens(each, port)]
        if pids:
            holder = _first_of_family(psutil.Process(pids[0]), port)
            words = " ".join(re.sub(r"[^\x20-\x7e]+", " ", " ".join(holder.cmdline())).split())
            return f"pid {holder.pid} ({words[:80]})"
    return ""


def _first_of_family(process: psutil.Process, port: int) -> psutil.Process:
    with contextlib.suppress(psutil.AccessDenied):  # the parent is another user's
        while (parent := process.parent()) and any(_listens(each, port) for each in parent.net_connections("tcp")):
            process = parent
    return process


def _listens(connection: Any, port: int) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port)
