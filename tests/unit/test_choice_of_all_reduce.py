"""Which all-reduce synchronous workers take."""

import pytest

from tf2dist.errors import ConfigError
from tf2dist.training.synchronous import workers

TWO_HOSTS = [["a/0"], ["b/0"]]
SHARED = [["a/0"], ["a/0"]]
SEVERAL = [["a/0", "a/1"], ["b/0", "b/1"]]
PARTS = [["a/MIG-1"], ["a/MIG-2"]]


@pytest.mark.parametrize(
    ("choice", "gpus", "has_nccl", "expected"),
    [
        ("auto", [[], []], [True, True], ("tf2dist", "there are no GPUs")),
        ("auto", TWO_HOSTS, [True, True], ("nccl", "every replica has a GPU of its own")),
        ("auto", TWO_HOSTS, [True, False], ("tf2dist", "worker 1 has no NCCL (libnccl.so.2)")),
        ("auto", SHARED, [True, True], ("tf2dist", "2 workers share GPU a/0")),
        ("auto", PARTS, [True, True], ("tf2dist", "a/MIG-1 is a part of a GPU")),
        ("auto", SEVERAL, [True, True], ("nccl", "every replica has a GPU of its own")),
        (
            "auto",
            SEVERAL,
            [False, False],
            ("tensorflow", "a worker has several GPUs, and worker 0 has no NCCL (libnccl.so.2)"),
        ),
        ("nccl", SEVERAL, [True, True], ("nccl", "cluster.all_reduce=nccl")),
        ("tf2dist", TWO_HOSTS, [True, True], ("tf2dist", "cluster.all_reduce=tf2dist")),
        ("tensorflow", TWO_HOSTS, [True, True], ("tensorflow", "cluster.all_reduce=tensorflow")),
    ],
)
def test_the_choice(choice: str, gpus: list[list[str]], has_nccl: list[bool], expected: tuple[str, str]) -> None:
    assert workers.choose(choice, gpus, has_nccl) == expected


@pytest.mark.parametrize(
    ("choice", "gpus", "message"),
    [
        ("nccl", [[], []], r"cluster.all_reduce \(nccl\): there are no GPUs; leave it out"),
        ("nccl", SHARED, r"cluster.all_reduce \(nccl\): 2 workers share GPU a/0; leave it out"),
        ("tf2dist", SEVERAL, r"cluster.all_reduce \(tf2dist\): is between workers, and each has 2 GPUs"),
    ],
)
def test_what_cannot_be_used_is_refused(choice: str, gpus: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workers.choose(choice, gpus, [True, True])
