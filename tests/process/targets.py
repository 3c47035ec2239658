"""What the forked tasks of these tests do; they run without TensorFlow."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

Send = Callable[[dict[str, Any]], None]


def succeed(payload: dict[str, Any], send: Send) -> int:
    print("hello from", payload["name"], os.environ.get("COLOUR"), flush=True)
    send({"event": "said", "name": payload["name"]})
    return 0


def fail(payload: dict[str, Any], send: Send) -> int:
    raise RuntimeError("this target is broken")


def leave(payload: dict[str, Any], send: Send) -> int:
    sys.exit(7)


def wait(payload: dict[str, Any], send: Send) -> int:
    """Waits for ever, with a child of its own, and tells when it has begun."""
    if payload.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    send({"event": "waiting", "pid": os.getpid(), "child": child})
    threading.Event().wait()
    return 0


def listen(payload: dict[str, Any], send: Send) -> int:
    """Listens on every interface, as TensorFlow's servers do."""
    server = socket.create_server(("", payload["port"]))
    interfaces = [name for _, name in socket.if_nameindex()]
    send({"event": "waiting", "interfaces": interfaces})
    server.accept()
    return 0


def hear(payload: dict[str, Any], send: Send) -> int:
    """Waits for one line from the launcher and says it."""
    send({"event": "waiting"})
    send({"event": "said", **json.loads(sys.stdin.readline())})
    return 0
