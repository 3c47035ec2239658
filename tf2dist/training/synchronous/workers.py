"""Synchronous workers as one of them sees them: who they are, what they can do together, and what sums their gradients.

The gradients are summed by NCCL, by tf2dist's own all-reduce, or by TensorFlow's ring.
"""

import ctypes
import functools
import importlib.util
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import Snapshot, Weights, describe, in_file, of_description, pack, unpack
from tf2dist.cluster import reachability
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ConfigError, TrainingError
from tf2dist.files import raising
from tf2dist.process import devices, heartbeat
from tf2dist.process.strategy import (
    LEAVE_TIMEOUT_SECS,
    barrier,
    broadcast,
    from_all,
    sum_over_workers,
)
from tf2dist.training.synchronous.all_reduce import AllReduce, connect
from tf2dist.training.synchronous.peers import SECRET_BYTES

NAMES = {"nccl": "NCCL's", "tf2dist": "tf2dist's own", "tensorflow": "TensorFlow's ring over gRPC"}
NCCL = "libnccl.so.2"


def choose(choice: str, gpus: Sequence[Sequence[str]], has_nccl: Sequence[bool]) -> tuple[str, str]:
    """One of `NAMES`, and why.

    TensorFlow itself never takes NCCL unless it is told to (its issue 50178).

    Args:
        choice: the option cluster.all_reduce.
        gpus: those of each worker, equally many, by names that are unique in the cluster.
        has_nccl: whether each worker has NCCL.
    """
    why_not = _why_not_nccl(gpus, has_nccl)
    several = len(gpus[0]) > 1
    if choice == "nccl" and why_not:
        raise ConfigError(f"cluster.all_reduce (nccl): {why_not}; leave it out")
    if choice == "tf2dist" and several:
        raise ConfigError(
            f"cluster.all_reduce (tf2dist): is between workers, and each has {len(gpus[0])} GPUs; leave it out, or use "
            "a worker for each GPU"
        )
    if choice != "auto":
        return choice, f"cluster.all_reduce={choice}"
    if not why_not:
        return "nccl", "every replica has a GPU of its own"
    return ("tensorflow", f"a worker has several GPUs, and {why_not}") if several else ("tf2dist", why_not)


def _why_not_nccl(gpus: Sequence[Sequence[str]], has_nccl: Sequence[bool]) -> str:
    names = [name for worker in gpus for name in worker]
    if not names:
        return "there are no GPUs"
    # It refuses two ranks on one GPU (its issue 1241), and parts of one (MIG).
    name, most = Counter(names).most_common(1)[0]
    if most > 1:
        return f"{most} workers share GPU {name}"
    if parts := [name for name in names if "/MIG-" in name]:
        return f"{parts[0]} is a part of a GPU"
    lacking = [f"worker {index}" for index, has in enumerate(has_nccl) if not has]
    return f"{lacking[0]} has no NCCL ({NCCL})" if lacking else ""


def has_nccl() -> bool:
    """Whether TensorFlow finds NCCL, which it loads when it is first used."""
    package = importlib.util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or []) if package else []
    if any(Path(folder, "nccl", "lib", NCCL).exists() for folder in folders):
        return True
    try:
        ctypes.CDLL(NCCL)
    except OSError:
        return False
    return True


FINISH_TIMEOUT_SECS = 7 * 86400.0  # worker 0 may have much to write before; if it hangs, its launcher ends it
MOST_GATHERED = 4  # numbers of a worker
PIECE_BYTES = 1 << 20  # of an array that is sent; with four times as much the memory for copies doubles


class Workers:
    """All workers together, as one of them calls them.

    All workers must call the same methods in the same order, since each call waits for the others. There are two
    exceptions: `batch_size_per_replica` is local, and in `leave_last` only worker 0 waits.

    Attributes:
        index: the index of this worker.
        count: the number of workers.
        num_replicas: the number of GPUs of all workers, or of workers where there are no GPUs.
        communication: how TensorFlow sums gradients, where it does.
    """

    def __init__(self, cluster: Cluster, task: Task, strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
        self.cluster, self.task, self.strategy = cluster, task, strategy
        self.index = cluster.training_tasks.index(task)
        self.count = cluster.num_workers
        self.num_replicas: int = strategy.num_replicas_in_sync
        self.communication = tf.distribute.experimental.CommunicationOptions()
        # Traced once for each shape, and without AutoGraph, whose rewriting takes longer than the tracing.
        self._sum = tf.function(functools.partial(sum_over_workers, strategy, self.count), autograph=False)

    def batch_size_per_replica(self, batch_size_per_worker: int) -> int:
        """The batch size of each GPU of a worker."""
        local_replicas = self.num_replicas // self.count
        batch_size, rest = divmod(batch_size_per_worker, local_replicas)
        if rest:
            raise ConfigError(
                f"train.batch_size_per_worker ({batch_size_per_worker}): must be a multiple of the "
                f"{local_replicas} GPUs of a worker"
            )
        return batch_size

    def add_up(self, own: np.ndarray) -> np.ndarray:
        """The sum over all workers of the arrays that they pass, of any shape."""
        summed: np.ndarray = self._sum(tf.constant(own)).numpy()
        return summed

    def gather(self, own: Sequence[float]) -> np.ndarray:
        """The numbers that all workers pass, equally many each and at most `MOST_GATHERED`, float64 [count, n]."""
        # Each worker fills its own row, so the sum holds the rows of all. All rows have one length, however
        # many numbers are passed, since the sum of each shape is traced, which takes 20 ms of every start.
        rows = np.zeros([self.count, MOST_GATHERED])
        rows[self.index, : len(own)] = own
        return self.add_up(rows)[:, : len(own)]

    def broadcast(self, packed: bytes) -> bytes:
        """The bytes that worker 0 passes."""
        return broadcast(self.strategy, packed)

    def broadcast_start(self, start: Snapshot | Weights | None) -> Snapshot | Weights | None:
        """The start that worker 0 has read, which alone reads the run directory."""
        if self.count == 1:
            return start
        return of_description(*self.broadcast_arrays(describe(start), start.arrays if start else {}))

    def broadcast_arrays(self, head: Any, arrays: dict[str, np.ndarray]) -> tuple[Any, dict[str, np.ndarray]]:
        """The value of JSON and the arrays by name that worker 0 passes."""
        own = arrays if self.index == 0 else {}
        small = {name: array for name, array in own.items() if array.nbytes <= PIECE_BYTES}
        large = [(name, array.dtype.str, array.shape) for name, array in own.items() if name not in small]
        (head, large), received = unpack(self.broadcast(pack([head, large], small)))
        # A broadcast takes several times the memory of what it sends.
        for name, dtype, shape in large:
            pieces = self._pieces(own.get(name), math.prod(shape) * np.dtype(dtype).itemsize)
            if self.index:
                received[name] = _in_temporary_file((piece.view(dtype) for piece in pieces), tuple(shape))
            else:
                received[name] = own[name]
                for _ in pieces:  # sends them
                    pass
        return head, received

    def _pieces(self, own: np.ndarray | None, num_bytes: int) -> Iterator[np.ndarray]:
        """The bytes of an array of worker 0, piece by piece."""
        flat = np.empty(0, np.uint8) if own is None else own.reshape(-1).view(np.uint8)
        for first in range(0, num_bytes, PIECE_BYTES):
            piece, part = np.zeros(PIECE_BYTES, np.uint8), flat[first : first + PIECE_BYTES]
            piece[: len(part)] = part
            # A sum of whole numbers is exact. A variable, as `broadcast` makes it, stays in memory until Python looks
            # for garbage.
            yield self.add_up(piece.view(np.int64)).view(np.uint8)[: num_bytes - first]
            heartbeat.progress()

    def make_all_reduce(self, choice: str, timeout_secs: float) -> AllReduce | None:
        """Chooses what adds up the gradients, and connects the workers for our own all-reduce.

        Returns:
            Our own all-reduce; None for TensorFlow's, which is NCCL if `communication` says so, or for one worker.

        Args:
            choice: the option cluster.all_reduce, which all workers have alike.
        """
        own_gpus = devices.own_gpus()
        own = json.dumps([own_gpus, bool(own_gpus) and has_nccl()])  # not looked for in vain: it is large
        replies = [json.loads(text) for text in from_all("all-reduce", own, self.cluster, self.task, timeout_secs)]
        # All workers see the same, so all of them decide alike.
        kind, why = choose(choice, [gpus for gpus, _ in replies], [has_nccl for _, has_nccl in replies])
        all_reduce = self._connect() if kind == "tf2dist" else None
        if kind == "tf2dist" and all_reduce is None and self.count > 1:
            why = "not all workers can connect to each other"
            if choice == kind:
                raise ConfigError(f"cluster.all_reduce ({choice}): {why}; leave it out")
            kind = "tensorflow"
        if kind == "nccl":
            implementation = tf.distribute.experimental.CommunicationImplementation.NCCL
            self.communication = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
        if self.num_replicas > 1:
            print(f"the all-reduce is {NAMES[kind]}: {why}", flush=True)
        return all_reduce

    def _connect(self) -> AllReduce | None:
        # Every worker draws a secret, and that of worker 0 counts.
        secret = self.broadcast(os.urandom(SECRET_BYTES))
        return connect(self.cluster, self.task, secret, self.gather)

    def wait_for_all(self) -> None:
        """Waits until all workers have finished.

        A worker that ended earlier would cut off others that still read from it the result of an all-reduce.
        """
        barrier("finished", FINISH_TIMEOUT_SECS)

    def leave_last(self) -> None:
        """On worker 0, waits until all others have left, since they use the coordination service that it hosts."""
        if self.task == self.cluster.leader:
            others = [task for task in self.cluster.training_tasks if task != self.task]
            reachability.wait_until_gone(self.cluster, others, LEAVE_TIMEOUT_SECS)


def _in_temporary_file(pieces: Iterable[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    with raising(
        f"TMPDIR ({tempfile.gettempdir()}): what the run begins with cannot be written there",
        "make room, or set TMPDIR to another folder",
        TrainingError,
    ):
        return in_file(pieces, shape)
