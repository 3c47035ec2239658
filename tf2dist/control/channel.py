"""A channel between two hosts: each proves to the other that it knows the key of the job, then they send messages.

    accepting side                                   dialing side
    greeting, nonce A                           ->
                                                <-   greeting, nonce D
                                                <-   mac("dial")
    mac("accept")                               ->
    length, message                             ->
                                                <-   length, message

Every mac is an HMAC-SHA256 over its label and both nonces, so a proof is of no use in another connection or in the
other direction. Before the dialing side has proved itself, it sees a greeting, a nonce and nothing else. The token
keeps out other jobs; messages are neither encrypted nor authenticated, see docs/security.md. This module does no
input or output, so that tests can check every byte; `messages` defines what the messages hold.
"""

import hmac
import os
import struct

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
