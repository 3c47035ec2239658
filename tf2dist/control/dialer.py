"""Connects to one address, again and again until it answers, and knows why it does not."""

import queue
import threading
import time
from typing import Any

from tf2dist.cluster.addresses import resolve
from tf2dist.control.connections import Link, Links, reason


class Dialer:
    """Connects to one address, again and again. A thread looks up its name, because a name server may be slow.

    Attributes:
        why: why there is no connection yet.
    """

    def __init__(self, links: Links, host: str, port: int, every_secs: float) -> None:
        self.why = "not tried yet"
        self._links, self._host, self._port, self._every_secs = links, host, port, every_secs
        self._link: Link | None = None
        self._num_calls = 0
        self._next_at = 0.0
        self._addresses: queue.SimpleQueue[list[tuple[int, tuple[str, int]]] | None] = queue.SimpleQueue()
        self._is_resolving = False

    def tick(self, owner: Any) -> None:
        """Dials if there is no connection and the next attempt is due."""
        # A dead link is replaced, and one that is open or still connecting is kept.
        if time.monotonic() < self._next_at or (self._link and not self._link.closed):
            return
        if not self._is_resolving:
            self._is_resolving = True
            # A daemon: a look-up cannot be cancelled, and must not keep the process from ending.
            threading.Thread(target=self._resolve, daemon=True).start()
            self._next_at = time.monotonic() + 0.01
            return
        try:
            addresses = self._addresses.get_nowait()
        except queue.Empty:
            self.why = "the name server does not answer" if self._num_calls == 0 else self.why
            self._next_at = time.monotonic() + 0.05
            return
        # The next attempt looks the name up again: its address may change, as that of a container that is replaced.
        self._is_resolving = False
        self._next_at = time.monotonic() + self._every_secs
        if addresses is None:
            self.why = "name unknown"
            return
        # A name may have several addresses: each attempt takes the next one.
        family, address = addresses[self._num_calls % len(addresses)]
        self._num_calls += 1
        try:
            self._link = self._links.dial(family, address, owner)
        except OSError as error:  # such as an IPv6 address on a kernel without IPv6
            self.why = reason(error)

    def _resolve(self) -> None:
        try:
            self._addresses.put(resolve(self._host, self._port))
        except OSError:
            self._addresses.put(None)
