"""A bare copy between two processes over the loopback: the limit of what tasks of one machine exchange by sockets."""

import socket
import subprocess
import sys
import time

import numpy as np

TIMEOUT_SECS = 120.0


def megabytes_per_sec(size: int, times: int) -> float:
    """Of arrays of `size` bytes that go to another process, which sends as many back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_SECS)
        arguments = [str(server.getsockname()[1]), str(size), str(times + 1)]
        other = subprocess.Popen([sys.executable, "-m", "tests.bench.loopback", *arguments])
        try:
            sock, _ = server.accept()
            with sock:
                array = np.ones(size, np.uint8)
                sock.settimeout(TIMEOUT_SECS)
                there_and_back(sock, array)  # the first time maps the memory
                start = time.perf_counter()
                for _ in range(times):
                    there_and_back(sock, array)
                secs = time.perf_counter() - start
        finally:
            other.kill()
            other.wait()
    return 2 * size * times / secs / 1e6


def there_and_back(sock: socket.socket, array: np.ndarray) -> None:
    sock.sendall(array.data)
    receive(sock, array)


def receive(sock: socket.socket, array: np.ndarray) -> None:
    """Fills an array."""
    left = array.data
    while left:
        count = sock.recv_into(left)
        if not count:
            raise ConnectionError("the other process is gone")
        left = left[count:]


def main(port: int, size: int, times: int) -> None:
    array = np.empty(size, np.uint8)
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_SECS) as sock:
        for _ in range(times):
            receive(sock, array)
            sock.sendall(array.data)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
