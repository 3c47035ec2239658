"""The all-reduce through real sockets, with a thread for each worker."""

import itertools
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf2dist.cluster.addresses import listen_at_own
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError
from tf2dist.training.synchronous import peers
from tf2dist.training.synchronous.all_reduce import ONE_HOP_BYTES, AllReduce, connect
from tf2dist.training.synchronous.peers import LostWorkerError
from tf2dist.training.synchronous.shared_memory import SharedMemory, open_shared_memory

TIMEOUT_SECS = 30


def connected(num_workers: int, with_memory: bool = False) -> list[AllReduce]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_workers)]
    for one, other in itertools.combinations(range(num_workers), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    memories: list[SharedMemory | None] = [None] * num_workers
    if with_memory:
        memories = shared(num_workers)
        assert all(memories)
    return [AllReduce(index, mine, memories[index]) for index, mine in enumerate(sockets)]


def shared(num_workers: int, secrets: Sequence[bytes] = ()) -> list[SharedMemory | None]:
    """What `open_shared_memory` returns for each worker; all are threads of this process."""
    together = Together(num_workers)
    secrets = secrets or [b"secret"] * num_workers
    return at_once(
        [
            partial(open_shared_memory, index, num_workers, secret, partial(together.gather, index))
            for index, secret in enumerate(secrets)
        ]
    )


class Together:
    """Gathers the numbers of threads for `connect`; a real run does so through TensorFlow's cluster."""

    def __init__(self, num_workers: int) -> None:
        self._barrier = threading.Barrier(num_workers)
        self._rows: list[Sequence[float]] = [()] * num_workers

    def gather(self, index: int, own: Sequence[float]) -> np.ndarray:
        self._rows[index] = own
        self._barrier.wait(TIMEOUT_SECS)
        rows = np.array(self._rows, np.float64)
        self._barrier.wait(TIMEOUT_SECS)  # before anybody passes the next ones
        return rows


def at_once(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all functions, each run in its own thread; threads that hang are abandoned."""
    futures: list[Future[Any]] = [Future() for _ in functions]

    def run(future: "Future[Any]", function: Callable[[], Any]) -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    for pair in zip(futures, functions, strict=True):
        threading.Thread(target=run, args=pair, daemon=True).start()
    return [future.result(TIMEOUT_SECS) for future in futures]


@pytest.mark.parametrize("with_memory", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("num_workers", [2, 3, pytest.param(7, marks=pytest.mark.thorough), 13])
@pytest.mark.parametrize("size", [1, 1_000, ONE_HOP_BYTES // 4, ONE_HOP_BYTES // 4 + 1, 300_003])
def test_the_sum_is_bitwise_equal_on_all_workers(num_workers: int, size: int, with_memory: bool) -> None:
    """This also holds for vectors much larger than the sockets' buffers, and for several calls in a row."""
    workers, random = connected(num_workers, with_memory), np.random.default_rng(size)
    for length in (size, size, 10, 2 * size, size):
        vectors = random.normal(size=[num_workers, length]).astype(np.float32)
        expected = vectors[0].copy()
        for vector in vectors[1:]:
            expected += vector
        calls = [partial(worker, own) for worker, own in zip(workers, vectors, strict=True)]
        for result in at_once(calls):
            np.testing.assert_array_equal(result, expected)
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("with_memory", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("num_workers", [2, 11])
@pytest.mark.parametrize("size", [1_000, 300_003])
def test_narrow_floats_are_summed_as_float32_and_rounded_once(
    num_workers: int, size: int, dtype: Any, with_memory: bool
) -> None:
    workers, random = connected(num_workers, with_memory), np.random.default_rng(size)
    vectors = random.normal(size=[num_workers, size]).astype(dtype)
    expected = vectors[0].astype(np.float32)
    for vector in vectors[1:]:
        expected += vector.astype(np.float32)
    for result in at_once([partial(worker, own) for worker, own in zip(workers, vectors, strict=True)]):
        assert result.dtype == dtype
        np.testing.assert_array_equal(result.astype(np.float32), expected.astype(dtype).astype(np.float32))
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("with_memory", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("num_workers", [2, 3, 9])
def test_arrays_of_any_length_are_gathered_in_order(num_workers: int, with_memory: bool) -> None:
    """Also after a sum, whose end the others may still read from the shared memory."""
    workers, random = connected(num_workers, with_memory), np.random.default_rng(num_workers)
    for most in (1, 10, 100_000):
        at_once([partial(worker, np.ones(200_000, np.float32)) for worker in workers])
        lengths = random.integers(0, most + 1, num_workers)
        ids = [random.integers(0, 1 << 40, length) for length in lengths]
        rows = [random.normal(size=[length, 5]).astype(ml_dtypes.bfloat16) for length in lengths]
        none = np.zeros([0, 3], np.float32)
        calls = [partial(worker.gather, *own, none) for worker, *own in zip(workers, ids, rows, strict=True)]
        for all_ids, all_rows, nothing in at_once(calls):
            np.testing.assert_array_equal(all_ids, np.concatenate(ids))
            np.testing.assert_array_equal(all_rows.view(np.uint16), np.concatenate(rows).view(np.uint16))
            assert nothing.shape == (0, 3)
    for worker in workers:
        worker.close()


def test_a_sum_and_arrays_take_one_hop() -> None:
    workers = connected(3)
    vectors = np.random.default_rng(0).normal(size=[3, 1000]).astype(np.float32)
    expected = vectors[0] + vectors[1] + vectors[2]
    ids = [np.arange(length, dtype=np.int32) for length in (2, 0, 3)]
    calls = [partial(worker.sum_and_gather, *own) for worker, *own in zip(workers, vectors, ids, strict=True)]
    for total, all_ids in at_once(calls):
        np.testing.assert_array_equal(total, expected)
        assert all_ids.tolist() == [0, 1, 0, 1, 2]


class Counting(peers.Peers):
    """Counts what it sends."""

    sent: list[int]

    def send(self, view: memoryview, *to: int) -> None:
        self.sent += [len(view)] * len(to)
        super().send(view, *to)


@pytest.mark.parametrize(
    ("num_workers", "num_bytes", "num_messages", "most_bytes"),
    [
        (7, 31_400, 6, 6 * 31_400),  # to all others
        (16, 1_000, 4, 15 * 1_000),  # passed on whole
        (16, 31_400, 8, 3.1 * 31_400),  # in parts
        (24, 31_400, 10, 3.5 * 31_400),
        (24, 320_000, 10, 3.5 * 320_000),
        (24, 640_000, 46, 2 * 640_000),  # large messages, each of which goes where it is summed
    ],
)
def test_messages_of_a_worker(num_workers: int, num_bytes: int, num_messages: int, most_bytes: float) -> None:
    workers = connected(num_workers)
    for worker in workers:
        worker._peers.__class__, worker._peers.sent = Counting, []  # type: ignore[attr-defined]
    at_once([partial(worker, np.ones(num_bytes // 4, np.float32)) for worker in workers])
    sent: list[int] = workers[3]._peers.sent  # type: ignore[attr-defined]
    assert len(sent) == num_messages
    assert sum(sent) <= most_bytes


def test_tensorflow_uses_the_sum_without_a_copy() -> None:
    first, second = connected(2)
    sums: list[np.ndarray] = []

    def add(own: np.ndarray) -> np.ndarray:
        sums.append(first(own))
        return sums[-1]

    def in_a_graph() -> np.ndarray:
        call = tf.function(lambda own: tf.numpy_function(add, [own], tf.float32), autograph=False)
        return np.asarray(memoryview(call(tf.ones([300, 1000]))))

    found, _ = at_once([in_a_graph, partial(second, np.ones([300, 1000], np.float32))])
    assert found.ctypes.data == sums[0].ctypes.data
    assert (found == 2).all()
    assert found.shape == (300, 1000)


@pytest.mark.parametrize(("size", "with_memory"), [(100, False), (100_000, True)])
def test_a_result_is_not_changed_by_the_next_call(size: int, with_memory: bool) -> None:
    workers = connected(2, with_memory)
    first, _ = at_once([partial(worker, np.ones(size, np.float32)) for worker in workers])
    at_once([partial(worker, np.zeros(size, np.float32)) for worker in workers])
    assert first.tolist() == [2.0] * size


def test_a_worker_waits_until_the_others_have_read_its_memory() -> None:
    """The second worker is late in each call, and a call of a small array comes between two large ones."""
    first, second = connected(2, with_memory=True)

    def calls(worker: AllReduce, delay_secs: float) -> list[float]:
        results = []
        for number, size in enumerate((200_000, 10, 200_000, 200_000)):
            time.sleep(delay_secs)  # the delay itself
            results.append(float(worker(np.full(size, number, np.float32)).max()))
        return results

    assert at_once([partial(calls, first, 0.0), partial(calls, second, 0.05)]) == [[0.0, 2.0, 4.0, 6.0]] * 2


class ReadsLate(AllReduce):
    """Goes on only a while after it has met the others, who may be in the next call by then."""

    def _meet(self) -> None:
        super()._meet()
        time.sleep(0.05)  # the delay itself


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_larger_array_does_not_replace_what_a_late_worker_reads(num_workers: int) -> None:
    workers = connected(num_workers, with_memory=True)
    workers[0].__class__ = ReadsLate

    def calls(worker: AllReduce) -> list[set[float]]:
        return [set(worker(np.full(size, size, np.float32)).tolist()) for size in (50_000, 100_000, 300_000, 60_000)]

    expected = [{float(num_workers * size)} for size in (50_000, 100_000, 300_000, 60_000)]
    assert at_once([partial(calls, worker) for worker in workers]) == [expected] * num_workers


def test_no_memory_is_shared_where_the_size_of_files_is_limited() -> None:
    before, limits = set(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, limits[1]))
    try:
        assert shared(2) == [None] * 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_not_that_of_the_other_workers_is_not_used() -> None:
    """As in containers, where a number of a process leads to another one."""
    before = set(os.listdir("/proc/self/fd"))
    assert shared(3, secrets=(b"one", b"one", b"two")) == [None] * 3
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("with_memory", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("num_workers", [3, 9])
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_lost_worker_ends_the_call_of_the_others(size: int, num_workers: int, with_memory: bool) -> None:
    """Here it is lost during a call. (A worker that is cut off closes no connection; launchers end that run.)"""
    workers, last = connected(num_workers, with_memory), num_workers - 1

    def lost_in_a_call(worker: AllReduce) -> int:
        with pytest.raises(LostWorkerError) as raised:
            worker(np.ones(size, np.float32))
        assert worker.lost is raised.value
        time.sleep(0.2)  # until its process ends
        worker.close()  # others may wait for it
        return raised.value.index

    timer = threading.Timer(0.2, workers[last].close)
    timer.start()
    assert at_once([partial(lost_in_a_call, worker) for worker in workers[:last]]) == [last] * last
    timer.join()


def join_all(num_workers: int, secrets: tuple[bytes, ...] = ()) -> list[Any]:
    cluster = Cluster("sync", {"worker": tuple(f"127.0.0.1:{1000 + index}" for index in range(num_workers))})
    together, secret = Together(num_workers), os.urandom(peers.SECRET_BYTES)

    def join(index: int) -> AllReduce | None:
        own = secrets[index] if secrets else secret
        return connect(cluster, Task("worker", index), own, partial(together.gather, index))

    return at_once([partial(join, index) for index in range(num_workers)])


def test_workers_find_each_other() -> None:
    workers = join_all(4)
    calls = [partial(worker, np.full(5, 10.0**index, np.float32)) for index, worker in enumerate(workers)]
    assert [result.tolist() for result in at_once(calls)] == [[1111.0] * 5] * 4


def test_all_workers_fall_back_if_one_of_them_must(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_one(cluster: Cluster, task: Task) -> socket.socket:
        if task.index == 1:
            raise ClusterError("no port is free")
        return listen_at_own(cluster, task)

    with monkeypatch.context() as patch:
        patch.setattr(peers, "listen_at_own", refuse_one)
        assert join_all(3) == [None] * 3
    assert "no port is free" in capsys.readouterr().out
    monkeypatch.setattr(peers, "CONNECT_SECS", 1.0)
    assert join_all(2, secrets=(b"a" * 32, b"b" * 32)) == [None] * 2
    assert "worker 0 is not connected with all others" in capsys.readouterr().out


def test_connections_without_the_secret_are_turned_away() -> None:
    """Those that connect first and send a wrong secret, or half of it, do not keep the worker out."""
    cluster = Cluster("sync", {"worker": ("127.0.0.1:1", "127.0.0.1:2")})
    first, second = (peers.Mesh(cluster, Task("worker", index)) for index in range(2))
    strangers = [socket.create_connection(("127.0.0.1", first.port)) for _ in range(3)]
    strangers[0].sendall(b"x" * peers.SECRET_BYTES + struct.pack(">I", 1))
    strangers[1].sendall(b"s" * 7)
    strangers[1].shutdown(socket.SHUT_WR)
    secret = b"s" * peers.SECRET_BYTES
    strangers[2].sendall(secret + b"\0\0")
    strangers[2].shutdown(socket.SHUT_WR)
    ports = [first.port, second.port]
    result = at_once([partial(first.connect, ports, secret), partial(second.connect, ports, secret)])
    result[0][1].sendall(b"hello")
    assert result[1][0].recv(5) == b"hello"
    assert strangers[0].recv(1) == b""
