"""Bytes to and from all other workers at the same time, through a connection to each of them."""

import select
import socket
from collections import deque
from typing import NoReturn

from tf2dist.errors import brief_reason

Views = dict[int, memoryview]  # by the index of the worker


class LostWorkerError(Exception):
    """The connection to a worker has ended.

    Attributes:
        index: the index of that worker.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class Peers:
    """The connections of one worker. Every method raises LostWorkerError if a worker is gone.

    Attributes:
        indices: of the other workers.
        lost: the error that was raised, kept because TensorFlow replaces it by an exception of its own if a graph makes
            the call.

    Args:
        sockets: a connection to each of the others, by their indices; they belong to this object from now on.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self.indices = tuple(sockets)
        self.lost: LostWorkerError | None = None
        self._sockets, self._peers = sockets, {sock.fileno(): peer for peer, sock in sockets.items()}
        self._unsent: dict[int, deque[memoryview]] = {peer: deque() for peer in sockets}
        # If all workers sent first and received then, full buffers of the kernel could block all of them without end.
        for sock in sockets.values():
            sock.setblocking(False)

    def send(self, view: memoryview, *peers: int) -> None:
        """Queues bytes, which must not change before `flush`, and sends at once what the kernel takes."""
        for peer in peers:
            self._unsent[peer].append(view)
            self._push(peer)

    def receive(self, missing: Views) -> None:
        """Fills the views, and sends meanwhile what is queued."""
        # An empty view is filled, and receiving nothing would seem to be the end of the connection.
        missing = {peer: view for peer, view in missing.items() if view}
        ready = list(missing)  # trying first mostly saves a system call
        while missing:
            for peer in ready:
                missing[peer] = self._pull(peer, missing[peer])
                if not missing[peer]:
                    del missing[peer]
            ready = self._wait(missing) if missing else []

    def announce(self) -> None:
        """Sends all others a sign, which they expect by `meet`."""
        self.send(memoryview(b"."), *self.indices)

    def meet(self) -> None:
        """Waits for the next sign of each of the others; before it come the bytes that they have sent earlier."""
        self.receive({peer: memoryview(bytearray(1)) for peer in self.indices})

    def flush(self) -> None:
        """Sends what is queued."""
        while any(self._unsent.values()):
            self._wait({})

    def close(self) -> None:
        """Closes all connections."""
        for sock in self._sockets.values():
            sock.close()

    def _wait(self, missing: Views) -> list[int]:
        """Waits until something can be done, and sends; returns of whom of `missing` something can be received."""
        poll = select.poll()
        for peer, sock in self._sockets.items():
            if wanted := (select.POLLOUT if self._unsent[peer] else 0) | (select.POLLIN if peer in missing else 0):
                poll.register(sock, wanted)
        # POLLERR and POLLHUP stand for both, so that a call is made, which raises the reason.
        ready = [(self._peers[number], events) for number, events in poll.poll()]
        for peer, events in ready:
            if events & ~select.POLLIN:
                self._push(peer)
        return [peer for peer, events in ready if peer in missing and events & ~select.POLLOUT]

    def _push(self, peer: int) -> None:
        """Sends what the kernel takes."""
        unsent, sock = self._unsent[peer], self._sockets[peer]
        try:
            while unsent:
                view = unsent[0]
                count = sock.send(view)
                if count < len(view):
                    unsent[0] = view[count:]
                else:
                    unsent.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(peer, error)

    def _pull(self, peer: int, into: memoryview) -> memoryview:
        """Receives what is there; returns the part of `into` that is still to be filled."""
        try:
            count = self._sockets[peer].recv_into(into)
            if not count:
                raise ConnectionError("the connection was closed")
        except BlockingIOError:
            return into
        except OSError as error:
            self._lose(peer, error)
        return into[count:]

    def _lose(self, peer: int, error: OSError) -> NoReturn:
        self.lost = LostWorkerError(peer, brief_reason(error))
        raise self.lost from None
