"""Connections between the hosts of a job: the handshake and the messages, the sockets, and the dialing.

`Channel` is one end of a connection. Each side proves to the other that it knows the key of the job, then they send
messages:

    accepting side                                   dialing side
    greeting, nonce A                           ->
                                                <-   greeting, nonce D
                                                <-   mac("dial")
    mac("accept")                               ->
    length, message                             ->
                                                <-   length, message

Every mac is an HMAC-SHA256 over its label and both nonces, so a proof is of no use in another connection or in the
other direction. Before the dialing side has proved itself, it sees a greeting, a nonce and nothing else. The token
keeps out other jobs; messages are neither encrypted nor authenticated, see docs/security.md. A channel does no input
or output, so that tests can check every byte; `hosts.protocol` defines what the messages hold.

`Links` are all control connections of a process: non-blocking sockets, all of them served by one thread. A connection
has a deadline until it belongs to a member: port scanners open connections and send nothing. After that it expects
certain messages, because a process of another version may send others.

`Dialer` connects to one address, again and again until it answers, and knows why it does not.
"""

import contextlib
import errno
import hmac
import math
import os
import queue
import selectors
import socket
import struct
import threading
import time
from typing import Any, Protocol

from tf2dist.cluster.addresses import resolve
from tf2dist.errors import brief_reason
from tf2dist.hosts.protocol import Call, Wire
from tf2dist.messages import MessageError, pack, unpack

VERSION = 4  # of this protocol and of the messages; 4: messages without macs
NAME = b"tf2dist"
GREETING = NAME + bytes([VERSION])
NONCE_BYTES = 32
HELLO_BYTES = len(GREETING) + NONCE_BYTES
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 20  # a length that was damaged must not fill our memory
LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The other side has sent something that no member of the job sends."""


class VersionError(WireError):
    """The other side is of another version of tf2dist."""


class Channel:
    """One end of a connection.

    Attributes:
        unsent: bytes for the other side; the caller writes them to the socket and removes what it has written.
        open: whether the other side has proved that it knows the key.
        proved: whether this side has sent its own proof.

    Args:
        key: the secret of the job.
        dials: whether this side has opened the connection.
    """

    def __init__(self, key: bytes, dials: bool) -> None:
        self.unsent = bytearray()
        self.open = False
        self.proved = False
        self._key, self._dials = key, dials
        self._mine, self._theirs = os.urandom(NONCE_BYTES), b""
        self._received = bytearray()
        self.unsent += GREETING + self._mine

    def send(self, message: bytes) -> None:
        """Appends a message to `unsent`, once the channel is open."""
        self.unsent += LENGTH.pack(len(message)) + message

    def receive(self, data: bytes) -> list[bytes]:
        """Takes received bytes, in pieces of any length, and returns the messages that are complete.

        Raises:
            WireError: another program or version is there, its proof is wrong, or a message is too long.
        """
        self._received += data
        if not self.open:
            self._shake_hands()
        messages: list[bytes] = []
        while self.open and (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _shake_hands(self) -> None:
        # First come the other side's greeting and nonce. Only the dialing side answers with its proof at once.
        if not self._theirs:
            if len(self._received) < HELLO_BYTES:
                return
            greeting, self._theirs = self._take(len(GREETING)), self._take(NONCE_BYTES)
            if not greeting.startswith(NAME):
                raise WireError("another program answers there")
            if greeting != GREETING:
                raise VersionError(f"another version of tf2dist: protocol {greeting[-1]}, here {VERSION}")
            if self._dials:
                self.unsent += self._mac(b"dial")
                self.proved = True

        # Then comes the other side's proof. The accepting side proves itself only to a caller that has done so.
        if len(self._received) < MAC_BYTES:
            return
        expected = self._mac(b"accept" if self._dials else b"dial")
        if not hmac.compare_digest(self._take(MAC_BYTES), expected):
            raise WireError("the job token differs")
        if not self._dials:
            self.unsent += self._mac(b"accept")
            self.proved = True
        self.open = True

    def _next(self) -> bytes | None:
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"announces {length} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
        if len(self._received) < LENGTH.size + length:
            return None
        del self._received[: LENGTH.size]
        return self._take(length)

    def _take(self, count: int) -> bytes:
        chunk = bytes(self._received[:count])
        del self._received[:count]
        return chunk

    def _mac(self, label: bytes) -> bytes:
        # Both sides put the accepting side's nonce first.
        nonces = (self._theirs, self._mine) if self._dials else (self._mine, self._theirs)
        return hmac.digest(self._key, b"\0".join([label, *nonces]), "sha256")


HANDSHAKE_SECS = 5.0  # for a peer to prove itself and send its first message
FAREWELL_SECS = 1.0
READ_BYTES = 64 * 1024


class Link:
    """One connection.

    Attributes:
        owner: the task or member at the other end, set by the handler; None while that is not known.
        expects: the messages that may come next, a union of classes.
        heard_at: when the last bytes came, in seconds of the monotonic clock.
        deadline: when the connection is abandoned, by the same clock; infinite once it belongs to a member.
        peer: the address of a process that has connected to us; "" for a connection that we have dialed.
        denied: whether the other side closed the connection after it had received our proof.
        other_version: whether the other side is of another version of tf2dist.
    """

    def __init__(self, sock: socket.socket, channel: Channel, dialed: bool) -> None:
        self.owner: Any = None
        self.expects: Any = Call
        self.heard_at = time.monotonic()
        self.deadline = self.heard_at + HANDSHAKE_SECS
        self.denied = self.other_version = False
        self.peer = ""
        self.closed = self.finishing = self.shut = False  # shut: we have closed our sending half
        self.sock, self.channel, self.dialed = sock, channel, dialed
        self.connecting = dialed

    def send(self, message: Wire) -> None:
        """Sends a message. Does nothing if the connection is closed, of which `on_closed` has told the handler."""
        if not (self.closed or self.finishing):
            self.channel.send(pack(message))

    def ask(self, message: Wire, answers: Any) -> None:
        """Sends a message that only `answers`, a union of classes, may answer."""
        self.expects = answers
        self.send(message)

    def keep(self, expects: Any) -> None:
        """Makes this a member's connection: without a deadline, and for the messages `expects`."""
        self.expects = expects
        self.deadline = math.inf

    def finish(self) -> None:
        """Sends what is unsent, then waits for the other side to close, for at most `FAREWELL_SECS`.

        If we closed first while bytes of the other side are unread here, the kernel would send a reset, which could
        destroy what the other side has not read yet.
        """
        self.finishing = True
        self.deadline = min(self.deadline, time.monotonic() + FAREWELL_SECS if self.channel.open else 0.0)


class Handler(Protocol):
    def on_open(self, link: Link) -> None:
        """The process at the other end of a connection that we have dialed has proved itself."""

    def on_message(self, link: Link, message: Wire) -> None:
        """One of the messages in `Link.expects` has come."""

    def on_closed(self, link: Link, why: str) -> None: ...


class Links:
    """All control connections of a process. Only `wake` may be called from another thread than the meeting's."""

    def __init__(self, key: bytes, handler: Handler) -> None:
        self.all: list[Link] = []
        self._key, self._handler = key, handler

    def open(self, listener: socket.socket) -> None:
        """Accepts connections at `listener` from now on, until `end`."""
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        # `select` waits for sockets alone, so another thread ends its wait by a byte through this pair.
        self._awake, self._waker = socket.socketpair()
        for sock in (self._awake, self._waker):
            sock.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def wake(self) -> None:
        """Ends the waiting of `poll`; may be called from any thread."""
        # A full buffer wakes the other thread as well, and after `end` there is nobody to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def dial(self, family: int, address: tuple[str, int], owner: Any) -> Link:
        """Begins to connect; `Handler.on_open` or `on_closed` is called when that has succeeded or failed."""
        link = self._add(socket.socket(family, socket.SOCK_STREAM), dialed=True)
        link.owner = owner
        error = link.sock.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):  # `_on_connected` completes one that is in progress
            self.close(link, reason(OSError(error, os.strerror(error))))
        return link

    def _add(self, sock: socket.socket, dialed: bool) -> Link:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or Nagle's algorithm delays small messages
        link = Link(sock, Channel(self._key, dialed), dialed)
        self.all.append(link)
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        return link

    def poll(self, timeout_secs: float) -> None:
        """Waits for something to happen, at most `timeout_secs`, and handles it."""
        # A socket can nearly always be written to: if we always asked for that, `select` would never wait.
        for link in self.all:
            writes = link.connecting or link.channel.unsent or (link.finishing and not link.shut)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
            self._selector.modify(link.sock, events, link)
        for key, mask in self._selector.select(timeout_secs):
            if key.fileobj is self._awake:
                self._awake.recv(READ_BYTES)
            elif key.fileobj is self._listener:
                self._accept()
            elif not key.data.closed:  # something earlier in this poll may have closed it
                self._serve(key.data, mask)
        now = time.monotonic()
        for link in [link for link in self.all if link.deadline <= now]:
            self.close(link, "no answer")

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no file descriptors are left: do not spin until some are free
            time.sleep(0.05)
            return
        self._add(sock, dialed=False).peer = str(address[0])

    def _serve(self, link: Link, mask: int) -> None:
        try:
            if link.connecting and mask & selectors.EVENT_WRITE:
                self._on_connected(link)
            # Before the reading, which may end the connection: the other side must learn our version.
            if mask & selectors.EVENT_WRITE and link.channel.unsent:
                # A program that calls `fit` may have given SIGPIPE its default effect, which would end it.
                del link.channel.unsent[: link.sock.send(link.channel.unsent, socket.MSG_NOSIGNAL)]
            if mask & selectors.EVENT_READ:
                self._read(link)
            if not link.closed and link.finishing and not (link.shut or link.channel.unsent):
                link.shut = True
                link.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass  # the next poll goes on with the rest
        except (OSError, WireError, MessageError) as error:
            link.other_version = isinstance(error, VersionError)
            self.close(link, reason(error))
        except (ValueError, RecursionError) as error:  # such as an address without a port, or nested brackets
            self.close(link, f"a malformed message ({error!r:.80})")

    def _on_connected(self, link: Link) -> None:
        # `select` only says that the attempt to connect has ended; this option says how.
        error = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        link.connecting = False

    def _read(self, link: Link) -> None:
        data = link.sock.recv(READ_BYTES)
        if not data:
            self.close(link, "the connection was closed")
            return
        link.heard_at = time.monotonic()
        if link.finishing:  # our last message is on its way; of the other side only the close matters now
            return
        was_open = link.channel.open
        messages = link.channel.receive(data)
        if link.dialed and link.channel.open and not was_open:
            self._handler.on_open(link)
        for message in messages:
            if not (link.closed or link.finishing):
                self._handler.on_message(link, unpack(message, link.expects))

    def close(self, link: Link, why: str) -> None:
        if link.closed:
            return
        link.closed = True
        # The other side answers a correct proof with its own; if it closes instead, ours was probably wrong.
        link.denied = link.dialed and link.channel.proved and not link.channel.open and why != "no answer"
        self.all.remove(link)
        self._selector.unregister(link.sock)
        link.sock.close()
        self._handler.on_closed(link, why)

    def end(self) -> None:
        """Gives the peers time to read our last messages, then closes everything."""
        self._selector.unregister(self._listener)
        for link in self.all:
            link.finish()
        while self.all:
            self.poll(0.1)
        self._selector.close()
        for sock in (self._awake, self._waker, self._listener):
            sock.close()


def reason(error: Exception) -> str:
    """A few words about what is wrong with a connection."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer"
    return brief_reason(error)


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
