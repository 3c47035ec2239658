"""A network of one's own for a local cluster: TensorFlow's servers listen on every interface.

A TensorFlow server told ``localhost:2222`` binds port 2222 of all interfaces, without
authentication (https://github.com/tensorflow/tensorflow/blob/master/SECURITY.md). In a network
namespace that holds nothing but a loopback device, "all interfaces" is that device.
"""

import ctypes
import fcntl
import os
import socket
import struct
from contextlib import ExitStack

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


def enter_private_network() -> bool:
    """Moves this process, which must have one thread, into a fresh network with only loopback.

    Needs root, or a kernel that lets ordinary users make user namespaces. Returns whether it
    worked; where it did not, nothing has changed.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (OSError, AttributeError):  # not Linux
        return False
    if unshare(CLONE_NEWNET) != 0:
        if unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            return False
        write_maps(uid, gid)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    return True


def write_maps(uid: int, gid: int) -> None:
    """Maps the user and group to themselves, so that files keep their owner."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def unused_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET))
            sock.bind(("", 0))
            ports.append(sock.getsockname()[1])
        return ports
