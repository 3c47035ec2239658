"""What an address means: who can reach it, and which process holds its port on this host.

A TensorFlow server asks nobody for a password and listens on every interface of its host
(https://github.com/tensorflow/tensorflow/blob/master/SECURITY.md), so an address is a border.
"""

import fcntl
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError

SIOCGIFADDR = 0x8915
LISTENING = "0A"  # the state in /proc/net/tcp
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
    return [ipaddress.ip_address(text) for text in dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos)]


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
    """The addresses of this host's interfaces: one IPv4 each, and every IPv6."""
    found: list[Ip] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found.append(ipaddress.IPv4Address(answer[20:24]))
    for line in _lines("/proc/net/if_inet6"):
        found.append(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
    return found


def ephemeral_ports() -> range:
    """The ports that the system gives to outgoing connections; empty if it does not say."""
    lines = _lines("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, lines[0].split()) if lines else (0, -1)
    return range(first, last + 1)


def port_holder(port: int) -> str:
    """The process that listens on a port of this host, as "pid 123 (command line)"; "" if it cannot be seen."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in _lines(f"/proc/net/{table}")[1:]]
    inodes = {row[9] for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port}
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for folder in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if not any(_target(entry) in sockets for entry in (folder / "fd").iterdir()):
                continue
            command = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:  # another user's, or gone
            continue
        words = " ".join(re.sub(r"[^\x20-\x7e]+", " ", command).split())
        return f"pid {folder.name} ({words[:80]})"
    return ""


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
