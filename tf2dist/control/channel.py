"""Messages between two hosts that prove to each other that they know the same key: bytes in, bytes out.

    accepting side                                   dialing side
    nonce A                                     ->
                                                <-   nonce D, mac("dial")
    mac("accept")                               ->
    length, mac("accepted", number), message       ->
                                                <-   length, mac("dialed", number), message

Every mac is HMAC-SHA256 over its label, both nonces and, for a message, its number and bytes: nothing
said in another connection, in the other direction, or before can be said again. What is sent can be
read by whoever listens on the way; it cannot be changed. Before the dialing side has proved itself it
sees a nonce and nothing else. Whoever hears a nonce of its own process is connected with itself, by way of
somebody who passes on what others say, and says nothing more. There is no input or output here, so that
every byte can be tested; `messages` says what the messages hold.
"""

import hashlib
import hmac
import os
import struct

SEED_BYTES = 16
RANDOM_BYTES = 32
MARK_BYTES = 8
NONCE_BYTES = RANDOM_BYTES + MARK_BYTES
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 16 * MAX_MESSAGE_BYTES
LENGTH = struct.Struct(">I")
NUMBER = struct.Struct(">Q")


class WireError(Exception):
    """What has come is not what a member of the job sends."""


class Nonces:
    """Makes the nonces of one process, and knows which are its own, however long ago it has made them.

    A nonce is 16 random bytes, what a secret of the process makes of them, which looks random to all
    others, and a checksum, which tells it from what another program says first.
    """

    def __init__(self) -> None:
        self._secret = os.urandom(RANDOM_BYTES)

    def new(self) -> bytes:
        seed = os.urandom(SEED_BYTES)
        return (random := seed + self._sign(seed)) + _mark(random)

    def made(self, nonce: bytes) -> bool:
        return hmac.compare_digest(nonce[SEED_BYTES:RANDOM_BYTES], self._sign(nonce[:SEED_BYTES]))

    def _sign(self, seed: bytes) -> bytes:
        return hmac.digest(self._secret, seed, "sha256")[: RANDOM_BYTES - SEED_BYTES]


def _mark(random: bytes) -> bytes:
    return hashlib.sha256(b"tf2dist control" + random).digest()[:MARK_BYTES]


class Channel:
    """One end of a connection.

    Attributes:
        unsent: bytes for the other side; whoever has written some takes them off.
        open: whether the other side has proved that it knows the key.
        proved: whether this side has sent its own proof.

    Args:
        key: the secret of the job.
        dials: whether this is the side that has opened the connection.
        nonces: those of the process; where two ends in one process are meant to talk, each has its own.
    """

    def __init__(self, key: bytes, dials: bool, nonces: Nonces | None = None) -> None:
        self.unsent = bytearray()
        self.open = False
        self.proved = False
        self._key, self._dials = key, dials
        self._nonces = nonces or Nonces()
        self._mine, self._theirs = self._nonces.new(), b""
        self._received = bytearray()
        self._num_sent = self._num_received = 0
        if not dials:
            self.unsent += self._mine

    def send(self, message: bytes) -> None:
        """Appends a message to `unsent`.

        Raises:
            WireError: it is too long, the other side reads nothing, or it has not proved itself yet.
        """
        if not self.open:
            raise WireError("nothing is said before the other side has proved itself")
        if len(message) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(message)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise WireError("reads nothing")
        label = b"dialed" if self._dials else b"accepted"
        self.unsent += LENGTH.pack(len(message)) + self._mac(label, NUMBER.pack(self._num_sent), message) + message
        self._num_sent += 1

    def receive(self, data: bytes) -> list[bytes]:
        """Takes bytes of any length and gives the messages that are whole.

        Raises:
            WireError: a proof or a mac is wrong, or what came is too long.
        """
        self._received += data
        if not self.open:
            self._shake_hands()
        messages: list[bytes] = []
        while self.open and (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _shake_hands(self) -> None:
        if not self._theirs:
            if len(self._received) < NONCE_BYTES:
                return
            self._theirs = self._take(NONCE_BYTES)
            if not hmac.compare_digest(self._theirs[RANDOM_BYTES:], _mark(self._theirs[:RANDOM_BYTES])):
                raise WireError("another program answers there")
            if self._nonces.made(self._theirs):
                raise WireError("our own call is passed back to us there")
            if self._dials:
                self.unsent += self._mine + self._mac(b"dial")
                self.proved = True
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
        if len(self._received) < LENGTH.size + MAC_BYTES + length:
            return None
        del self._received[: LENGTH.size]
        mac, message = self._take(MAC_BYTES), self._take(length)
        label = b"accepted" if self._dials else b"dialed"
        if not hmac.compare_digest(mac, self._mac(label, NUMBER.pack(self._num_received), message)):
            raise WireError("a message was changed, or said twice")
        self._num_received += 1
        return message

    def _take(self, count: int) -> bytes:
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _mac(self, label: bytes, *parts: bytes) -> bytes:
        nonces = (self._theirs, self._mine) if self._dials else (self._mine, self._theirs)
        return hmac.digest(self._key, b"\0".join([label, *nonces, *parts]), "sha256")
