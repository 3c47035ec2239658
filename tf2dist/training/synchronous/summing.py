"""What sums the gradients of synchronous workers: NCCL, tf2dist's own all-reduce, or TensorFlow's ring."""

import ctypes
import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tf2dist.errors import ConfigError

NAMES = {"nccl": "NCCL's", "tf2dist": "tf2dist's own", "tensorflow": "TensorFlow's ring over gRPC"}
NCCL = "libnccl.so.2"


def choose(choice: str, gpus: Sequence[Sequence[str]], has_nccl: Sequence[bool]) -> tuple[str, str]:
    """One of `NAMES`, and why.

    TensorFlow itself never takes NCCL unless it is told to (its issue 50178).

    Args:
        choice: the option cluster.all_reduce.
        gpus: those of each worker, equally many, by names that are unique in the cluster.
        has_nccl: whether each worker has NCCL.

    Raises:
        ConfigError: what was asked for cannot be used.
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
