"""An authenticated channel between two hosts: each proves to the other that it knows the key of the job.

    accepting side                                   dialing side
    nonce A                                     ->
                                                <-   nonce D, mac("dial")
    mac("accept")                               ->
    length, mac("accepted", number), message       ->
                                                <-   length, mac("dialed", number), message

Every mac is an HMAC-SHA256 over its label, both nonces and, for a message, its number and bytes. A message
can therefore not be replayed in another connection, in the other direction, or a second time. Messages are
authenticated but not encrypted: others on the network can read them and cannot change them. Before the
dialing side has proved itself, it sees a nonce and nothing else. A process that receives one of its own
nonces is connected with itself through a relay, and ends the handshake. This module does no input or
output, so that tests can check every byte; `messages` defines what the messages hold.
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
MAX_UNSENT_BYTES = 16 * MAX_MESSAGE_BYTES  # a peer that does not read must not fill our memory
LENGTH = struct.Struct(">I")
NUMBER = struct.Struct(">Q")


class WireError(Exception):
    """The other side has sent something that no member of the job sends, or a message cannot be sent to it."""


class Nonces:
    """Makes the nonces of one process and recognises all of them later, without a list of them.

    A nonce has three parts: 16 random bytes; 16 bytes of their HMAC with a secret of the process, which
    look random to everybody else; and a checksum, which tells a nonce from the first bytes of another
    program's protocol.
    """

    def __init__(self) -> None:
        self._secret = os.urandom(RANDOM_BYTES)

    def new(self) -> bytes:
        seed = os.urandom(SEED_BYTES)
        return (random := seed + self._sign(seed)) + _mark(random)

    def is_own(self, nonce: bytes) -> bool:
        # compare_digest takes equally long wherever the bytes differ, so the time of the answer reveals nothing.
        return hmac.compare_digest(nonce[SEED_BYTES:RANDOM_BYTES], self._sign(nonce[:SEED_BYTES]))

    def _sign(self, seed: bytes) -> bytes:
        return hmac.digest(self._secret, seed, "sha256")[: RANDOM_BYTES - SEED_BYTES]


def _mark(random: bytes) -> bytes:
    return hashlib.sha256(b"tf2dist control" + random).digest()[:MARK_BYTES]


class Channel:
    """One end of a connection.

    Attributes:
        unsent: bytes for the other side; the caller writes them to the socket and removes what it has written.
        open: whether the other side has proved that it knows the key.
        proved: whether this side has sent its own proof.

    Args:
        key: the secret of the job.
        dials: whether this side has opened the connection.
        nonces: shared by all channels of the process. Two ends within one process can only talk to each other
            if each has its own.
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
            WireError: the message is too long, or the other side does not read or has not proved itself yet.
        """
        if not self.open:
            raise WireError("nothing can be sent before the other side has proved itself")
        if len(message) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(message)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise WireError("does not read")
        label = b"dialed" if self._dials else b"accepted"
        # The number is covered by the mac and not sent: both sides count, so a message that is missing, repeated or out
        # of order has a wrong mac.
        self.unsent += LENGTH.pack(len(message)) + self._mac(label, NUMBER.pack(self._num_sent), message) + message
        self._num_sent += 1

    def receive(self, data: bytes) -> list[bytes]:
        """Takes received bytes, in pieces of any length, and returns the messages that are complete.

        Raises:
            WireError: a proof or a mac is wrong, or a message is too long.
        """
        self._received += data
        if not self.open:
            self._shake_hands()
        messages: list[bytes] = []
        while self.open and (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _shake_hands(self) -> None:
        # First comes the other side's nonce. Only the dialing side answers it with its proof at once.
        if not self._theirs:
            if len(self._received) < NONCE_BYTES:
                return
            self._theirs = self._take(NONCE_BYTES)
            if not hmac.compare_digest(self._theirs[RANDOM_BYTES:], _mark(self._theirs[:RANDOM_BYTES])):
                raise WireError("another program answers there")
            if self._nonces.is_own(self._theirs):
                raise WireError("our own connection is relayed back to us there")
            if self._dials:
                self.unsent += self._mine + self._mac(b"dial")
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
        # The length comes before the mac, so it is not authenticated yet.
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"announces {length} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
        if len(self._received) < LENGTH.size + MAC_BYTES + length:
            return None
        del self._received[: LENGTH.size]
        mac, message = self._take(MAC_BYTES), self._take(length)
        label = b"accepted" if self._dials else b"dialed"
        if not hmac.compare_digest(mac, self._mac(label, NUMBER.pack(self._num_received), message)):
            raise WireError("a message was altered or replayed")
        self._num_received += 1
        return message

    def _take(self, count: int) -> bytes:
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _mac(self, label: bytes, *parts: bytes) -> bytes:
        # Both sides put the accepting side's nonce first. All parts but the last have a fixed length for each label, so
        # different parts never give the same bytes.
        nonces = (self._theirs, self._mine) if self._dials else (self._mine, self._theirs)
        return hmac.digest(self._key, b"\0".join([label, *nonces, *parts]), "sha256")
