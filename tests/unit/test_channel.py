"""Two ends of a channel without sockets: greetings, proofs, and invalid bytes of every kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf2dist.hosts import connections
from tf2dist.hosts.connections import GREETING, Channel, VersionError, WireError

KEY = b"k" * 32
MESSAGE = "grüße".encode()


def pass_on(source: Channel, target: Channel) -> list[bytes]:
    data = bytes(source.unsent)
    source.unsent.clear()
    return target.receive(data)


def pair(key: bytes = KEY) -> tuple[Channel, Channel]:
    """Both ends, the dialing one first, after the handshake."""
    dialing, accepting = Channel(KEY, dials=True), Channel(key, dials=False)
    for _ in range(2):
        pass_on(accepting, dialing)
        pass_on(dialing, accepting)
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
    while accepting.unsent or dialing.unsent:
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
    assert len(accepting.unsent) == connections.HELLO_BYTES
    accepting.unsent.clear()
    with pytest.raises(WireError):
        accepting.receive(GREETING + bytes(connections.NONCE_BYTES + connections.MAC_BYTES))
    assert not accepting.unsent
    assert not accepting.open


def test_an_accepting_side_that_does_not_know_the_key() -> None:
    dialing = Channel(KEY, dials=True)
    with pytest.raises(WireError, match="token differs"):
        dialing.receive(GREETING + bytes(connections.NONCE_BYTES + connections.MAC_BYTES))


def test_another_program() -> None:
    with pytest.raises(WireError, match="another program"):
        Channel(KEY, dials=True).receive(b"SSH-2.0-OpenSSH_9.6 and a few more bytes than a greeting and a nonce")


@pytest.mark.parametrize("dials", [True, False])
def test_another_version(dials: bool) -> None:
    with pytest.raises(VersionError, match=f"another version of tf2dist: protocol 99, here {connections.VERSION}"):
        Channel(KEY, dials).receive(connections.NAME + bytes([99]) + bytes(connections.NONCE_BYTES))


def test_a_proof_cannot_be_reflected() -> None:
    """A peer without the key may send back what it receives, on the same connection or on another one."""
    accepting, dialing = Channel(KEY, dials=False), Channel(KEY, dials=True)
    hello = bytes(dialing.unsent)
    pass_on(accepting, dialing)
    proof = bytes(dialing.unsent)[len(hello) :]
    with pytest.raises(WireError):  # as if the dialing side had accepted
        dialing.receive(proof)
    with pytest.raises(WireError):  # the proof of one connection in another
        Channel(KEY, dials=False).receive(hello + proof)
    mirror = Channel(KEY, dials=False)
    with pytest.raises(WireError):  # our own nonce, sent back
        mirror.receive(bytes(mirror.unsent) + bytes(connections.MAC_BYTES))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6), st.booleans())
def test_garbage_is_an_error_or_nothing(pieces: list[bytes], dials: bool) -> None:
    channel = Channel(KEY, dials)
    for piece in pieces:
        try:
            assert channel.receive(piece) == []
        except WireError:
            return
    assert not channel.open


def test_a_length_that_is_damaged() -> None:
    with pytest.raises(WireError, match="announces 1048577 bytes"):
        pair()[1].receive(connections.LENGTH.pack(connections.MAX_MESSAGE_BYTES + 1))
