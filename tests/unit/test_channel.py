"""Two ends of a channel without sockets: proofs, macs, and invalid bytes of every kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf2dist.control import channel
from tf2dist.control.channel import Channel, WireError

KEY = b"k" * 32
MESSAGE = "grüße".encode()


def pass_on(source: Channel, target: Channel) -> list[bytes]:
    data = bytes(source.unsent)
    source.unsent.clear()
    return target.receive(data)


def pair(key: bytes = KEY) -> tuple[Channel, Channel]:
    """Both ends, the dialing one first, after the handshake."""
    dialing, accepting = Channel(KEY, dials=True), Channel(key, dials=False)
    pass_on(accepting, dialing)
    pass_on(dialing, accepting)
    pass_on(accepting, dialing)
    return dialing, accepting


def test_messages_go_both_ways() -> None:
    dialing, accepting = pair()
    assert dialing.open
    assert accepting.open
    for source, target in ((dialing, accepting), (accepting, dialing)):
        source.send(MESSAGE)
        source.send(b"\x00\n")
        assert pass_on(source, target) == [MESSAGE, b"\x00\n"]


def test_byte_by_byte() -> None:
    dialing, accepting = Channel(KEY, dials=True), Channel(KEY, dials=False)
    for _ in range(3):
        for source, target in ((accepting, dialing), (dialing, accepting)):
            while source.unsent:
                target.receive(bytes([source.unsent.pop(0)]))
    dialing.send(MESSAGE)
    received = [message for byte in bytes(dialing.unsent) for message in accepting.receive(bytes([byte]))]
    assert received == [MESSAGE]


def test_another_key() -> None:
    with pytest.raises(WireError, match="the job token differs"):
        pair(b"x" * 32)


def test_a_stranger_receives_a_nonce_and_nothing_else() -> None:
    accepting = Channel(KEY, dials=False)
    assert len(accepting.unsent) == channel.NONCE_BYTES
    accepting.unsent.clear()
    with pytest.raises(WireError):
        accepting.receive(channel.Nonces().new() + bytes(32))
    assert not accepting.unsent
    assert not accepting.open
    with pytest.raises(WireError, match="before the other side has proved itself"):
        accepting.send(MESSAGE)


def test_an_accepting_side_that_does_not_know_the_key() -> None:
    dialing = Channel(KEY, dials=True)
    with pytest.raises(WireError, match="token differs"):
        dialing.receive(channel.Nonces().new() + bytes(32))


def test_another_program() -> None:
    with pytest.raises(WireError, match="another program"):
        Channel(KEY, dials=True).receive(b"SSH-2.0-OpenSSH_9.6 and a few more bytes than a nonce has")


def test_a_proof_cannot_be_reflected() -> None:
    """A peer without the key may send back what it receives, on the same connection or on another one."""
    accepting, dialing = Channel(KEY, dials=False), Channel(KEY, dials=True)
    nonce = bytes(accepting.unsent)
    dialing.receive(nonce)
    with pytest.raises(WireError):  # as if the dialing side had accepted
        dialing.receive(bytes(dialing.unsent)[channel.NONCE_BYTES :])
    other = Channel(KEY, dials=False)
    with pytest.raises(WireError):  # the proof of one connection in another
        other.receive(bytes(dialing.unsent))
    mirror = Channel(KEY, dials=False)
    with pytest.raises(WireError):  # our own nonce, sent back
        mirror.receive(bytes(mirror.unsent) + bytes(32))


def test_a_connection_relayed_back_to_its_process_proves_nothing() -> None:
    """Both ends know the key, so a relay could make them prove themselves to each other."""
    nonces = channel.Nonces()
    accepting, dialing = Channel(KEY, dials=False, nonces=nonces), Channel(KEY, dials=True, nonces=nonces)
    with pytest.raises(WireError, match="relayed back to us"):
        pass_on(accepting, dialing)
    assert not dialing.unsent
    assert not dialing.proved
    other = Channel(KEY, dials=True)
    pass_on(Channel(KEY, dials=False, nonces=nonces), other)
    assert other.proved, "to others the nonce is as good as any"


def test_a_message_cannot_be_replayed_reflected_or_reordered() -> None:
    dialing, accepting = pair()
    dialing.send(b"first")
    first = bytes(dialing.unsent)
    dialing.unsent.clear()
    dialing.send(b"second")
    second = bytes(dialing.unsent)
    with pytest.raises(WireError, match="altered or replayed"):
        dialing.receive(first)  # reflected
    with pytest.raises(WireError):
        pair()[1].receive(first)  # in another connection
    assert accepting.receive(first) == [b"first"]
    with pytest.raises(WireError):
        accepting.receive(first)  # again
    dialing, accepting = pair()
    with pytest.raises(WireError):
        accepting.receive(second)  # one left out


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_every_altered_byte_is_detected(place: int, change: int) -> None:
    dialing, accepting = pair()
    dialing.send(MESSAGE)
    data = bytearray(dialing.unsent)
    data[place % len(data)] ^= change
    try:
        received = accepting.receive(bytes(data) + bytes(channel.MAX_MESSAGE_BYTES))
    except WireError:
        return
    assert not received


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6), st.booleans(), st.booleans())
def test_garbage_is_an_error_or_nothing(pieces: list[bytes], dials: bool, proved: bool) -> None:
    channel = pair()[0 if dials else 1] if proved else Channel(KEY, dials)
    for piece in pieces:
        try:
            assert channel.receive(piece) == []
        except WireError:
            return
    assert channel.open == proved


def test_limits() -> None:
    dialing, accepting = pair()
    with pytest.raises(WireError, match="at most 65536"):
        dialing.send(bytes(channel.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(WireError, match="announces 65537 bytes"):
        accepting.receive(channel.LENGTH.pack(channel.MAX_MESSAGE_BYTES + 1))
    while len(dialing.unsent) <= channel.MAX_UNSENT_BYTES:
        dialing.send(bytes(channel.MAX_MESSAGE_BYTES))
    with pytest.raises(WireError, match="does not read"):
        dialing.send(b"x")
