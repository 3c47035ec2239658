"""Packets: a message is decoded to what was encoded, and invalid packets are refused by name."""

import json
import os
import socket
from typing import Any, get_args

import numpy as np
import pytest

from tf2dist import messages
from tf2dist.launch.forkserver import poster
from tf2dist.messages import (
    MAX_PACKET_BYTES,
    Alive,
    Event,
    LongCall,
    MessageError,
    Note,
    ProgressMessage,
    Ready,
    ResultMessage,
    Saved,
    Stalled,
    Start,
    Status,
    TaskMessage,
    ToLauncher,
    ToServer,
    Warned,
    pack,
    receive,
    unpack,
)

MESSAGES = [
    Alive(task="worker-0"),
    LongCall(30, "load (mine.py:3)", is_users=True, task="worker-0"),
    Stalled(30, "load (mine.py:3)", is_users=True, task="worker-0"),
    Saved(7, stopping=False, task="chief-0"),
    ProgressMessage(7, 20, {"loss": 0.5, "mae": float("inf")}, task="chief-0"),
    ResultMessage({"cluster": {"ps": 1}, "staleness": None, "workers": [1.5, 2]}, task="chief-0"),
    Ready(pid=7, isolated=True, ports=(2222, 2223)),
    Start("ps-0", "module:function", {"any": ["json"]}, "ps-0.log", None),
    Start("ps-0", "module:function", None, "ps-0.log", ("folder", "other")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_unchanged(message: Any) -> None:
    data = pack(message)
    assert b"\n" not in data
    result = unpack(data, Event | ToServer)
    assert result == message
    assert type(result) is type(message)


@pytest.mark.parametrize("excess", [0, 1, 10**6])
def test_a_message_may_be_of_any_length(excess: int) -> None:
    """Beyond what a packet holds, and beyond what the buffer of the socket holds."""
    begin, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with begin, end:
        poster(begin)(Alive())
        message = Note("x" * (MAX_PACKET_BYTES - len(pack(Note(""))) + excess))
        poster(begin)(message)
        poster(begin)(Alive())
        begin.close()
        files = len(os.listdir("/proc/self/fd"))
        assert [receive(end, Event) for _ in range(4)] == [Alive(), message, Alive(), None]
        assert len(os.listdir("/proc/self/fd")) == files


def test_the_result_of_a_metric_may_be_a_large_matrix() -> None:
    result = ResultMessage({"test_confusion": np.random.default_rng(0).random((200, 200)).tolist()})
    begin, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with begin, end:
        poster(begin)(result)
        assert receive(end, Event) == result


def of(**fields: Any) -> bytes:
    return json.dumps({"type": "Saved", "task": "chief-0", "step": 7, "stopping": True} | fields).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "without a type"),
        (b'{"step": 3}', "without a type"),
        (b'{"type": 3}', "without a type"),
        (of(type="Start"), r"unknown type \(Start\)"),
        (of(type="__import__"), "unknown type"),
        (of(step="7"), "Saved.step: '7'"),
        (of(step=True), "Saved.step: True"),
        (of(step=7.5), r"Saved.step: 7\.5"),
        (of(step=None), "Saved.step: None"),
        (of(stopping=1), "Saved.stopping: 1"),
        (of(more=1), r"Saved: more"),
        (pack(Ready(7, True, (1,))).replace(b"[1]", b'["1"]'), "Ready.ports: '1'"),
        (pack(Ready(7, True, (1,))).replace(b"[1]", b"1"), "Ready.ports: 1"),
    ],
)
def test_an_invalid_packet_is_refused_by_name(data: bytes, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        unpack(data, Event)


def test_a_float_may_be_written_as_an_integer() -> None:
    progress = {"type": "ProgressMessage", "task": "t", "step": 1, "target_step": 2, "metrics": {"loss": 0.5}}
    result = unpack(json.dumps(progress | {"steps_per_sec": 3}).encode(), Event)
    assert result == ProgressMessage(1, 2, {"loss": 0.5}, 3.0, task="t")
    assert type(result.steps_per_sec) is float


def test_a_number_without_end_is_refused() -> None:
    progress = {"type": "ProgressMessage", "task": "t", "step": 1, "target_step": 2, "metrics": {"loss": 0.5}}
    with pytest.raises(MessageError, match=r"ProgressMessage\.steps_per_sec"):
        unpack(json.dumps(progress | {"steps_per_sec": 10**400}).encode(), Event)


def test_all_messages_of_a_task_carry_its_name() -> None:
    said: list[Any] = []
    to_launcher = ToLauncher("worker-1", said.append)
    to_launcher.send(Saved(4, stopping=True))
    to_launcher.status("a")
    to_launcher.note("b")
    to_launcher.warn("c")
    assert said == [
        Saved(4, stopping=True, task="worker-1"),
        Status("a", task="worker-1"),
        Note("b", task="worker-1"),
        Warned("c", task="worker-1"),
    ]
    assert all(issubclass(kind, TaskMessage) for kind in get_args(messages.FromTask))
