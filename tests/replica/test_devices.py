"""The GPUs that each task gets, given their number, and how tasks share cores."""

import contextlib
import functools
import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tf2dist.cluster.sources import local
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import ClusterConfig, DevicesConfig, RunConfig
from tf2dist.errors import ConfigError
from tf2dist.process import devices

ASYNC = local(RunConfig(mode="async"), {}).cluster
SYNC = local(RunConfig(mode="sync"), {}).cluster
# Host "a" has the coordinator, a ps, two workers and an evaluator; "b", which is written in two ways, has two workers.
ON_HOSTS = {
    "chief": ("a:1",),
    "ps": ("a:2",),
    "worker": ("a:3", "a:4", "b:5", "B.:6"),
    "evaluator": ("a:7",),
}


def chosen(mode: str, num_gpus: int, *, divided: bool = True) -> list[list[int]]:
    jobs = ON_HOSTS if mode == "async" else {job: ON_HOSTS[job] for job in ("worker", "evaluator")}
    cluster = Cluster(mode, jobs)
    return [devices.choose_gpus(num_gpus, cluster, worker, divided=divided) for worker in cluster.training_tasks]


def test_local_workers_get_gpus_round_robin() -> None:
    for cluster in (ASYNC, SYNC):
        assert [devices.choose_gpus(2, cluster, Task("worker", i)) for i in range(3)] == [
            [0],
            [1],
            [0],
        ]
        assert devices.choose_gpus(0, cluster, Task("worker", 1)) == []


def test_coordinator_and_ps_get_no_gpu() -> None:
    for task in (Task("ps", 0), Task("chief", 0)):
        for divided in (True, False):
            assert devices.choose_gpus(2, ASYNC, task, divided=divided) == []


@pytest.mark.parametrize(
    ("mode", "num_gpus", "expected"),
    [
        ("sync", 0, [[], [], [], []]),
        ("sync", 1, [[0], [0], [0], [0]]),
        ("sync", 2, [[0], [1], [0], [1]]),
        ("sync", 5, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ("async", 5, [[0], [1], [0], [1]]),
    ],
)
def test_the_workers_of_a_host_divide_its_gpus(mode: str, num_gpus: int, expected: list[list[int]]) -> None:
    assert chosen(mode, num_gpus) == expected


def test_a_worker_keeps_the_gpus_that_the_user_has_chosen_for_it() -> None:
    assert chosen("sync", 2, divided=False) == [[0, 1]] * 4
    assert chosen("async", 2, divided=False) == [[0]] * 4


@pytest.mark.parametrize(
    ("num_gpus", "divided", "expected"), [(0, True, []), (2, True, []), (3, True, [2]), (5, True, [2]), (1, False, [0])]
)
def test_an_evaluator_gets_a_gpu_that_is_free(num_gpus: int, divided: bool, expected: list[int]) -> None:
    cluster = Cluster("async", ON_HOSTS)
    result = devices.choose_gpus(num_gpus, cluster, Task("evaluator", 0), divided=divided)
    assert result == expected


def test_gpus_have_the_names_of_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f, 3")
    assert devices.names_of([1, 0]) == ["3", "GPU-8f"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices.names_of([1, 0]) == ["1", "0"]


def test_the_fraction_that_is_advised_is_accepted() -> None:
    cluster, task = local(RunConfig(cluster=ClusterConfig(num_workers=6)), {}).cluster, Task("worker", 0)
    check = functools.partial(devices.check_fraction, cluster=cluster, task=task, divided=True)
    with pytest.raises(ConfigError, match=r"6 workers share a GPU, so it must be at most 0\.16;"):
        check(0.17, 1)
    check(0.16, 1)


@pytest.mark.parametrize("fraction", [0.5, 0.51])
def test_fractions_of_one_gpu_add_up_to_at_most_one(fraction: float) -> None:
    cluster, task = Cluster("async", ON_HOSTS), Task("worker", 0)
    check = functools.partial(devices.check_fraction, fraction, cluster=cluster, task=task)
    check(2, divided=True)
    check(1, divided=False)
    with contextlib.nullcontext() if fraction == 0.5 else pytest.raises(ConfigError, match="2 workers share a GPU"):
        check(1, divided=True)


@pytest.mark.parametrize(
    ("variables", "divided"),
    [
        ({}, True),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, False),
        # Of two tasks of a step on one node, as SLURM sets them with --gres=gpu:4, with --gpus-per-task=2 and with a
        # GPU for both; and by a script that gives each its own.
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0,1,2,3"}, True),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "2,3"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1", "SLURM_STEP_GPUS": "0"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0,1,2,3"}, False),
    ],
)
def test_tasks_divide_the_gpus_that_nobody_has_given_to_one_of_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], divided: bool
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert devices.are_divided(Cluster("sync", ON_HOSTS)) == divided
    assert devices.are_divided(SYNC), "those of a local cluster always do"


def test_gpus_behind_cgroups_keep_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two workers on different GPUs of a node would seem to share one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("SLURM_STEP_GPUS", raising=False)
    assert devices.names_of([1]) == ["1"]
    monkeypatch.setenv("SLURM_STEP_GPUS", "2,3")
    assert devices.names_of([0, 1]) == ["2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.names_of([0]) == ["1"], "the user has chosen"


@pytest.mark.thorough
def test_graphs_are_optimized_for_cpus_where_no_task_has_a_gpu() -> None:
    """The coordinator of many hosts makes the graphs of workers whose devices it does not know."""
    code = """if True:
        from dataclasses import replace
        import tensorflow as tf
        from tensorflow.python.eager import context
        from tf2dist.process import devices
        from tf2dist.cluster.spec import Cluster, Task
        from tf2dist.config.schema import DevicesConfig
        clusters = {"sync": Cluster("sync", {"worker": ("localhost:1", "localhost:2")}),
                    "async": Cluster("async", {j: ("localhost:1",) for j in ("chief", "ps", "worker")})}
        for mode, is_managed, gpus, expected in [("async", False, [], False), ("sync", True, ["gpu"], False),
                                                 ("sync", False, ["gpu"], False),
                                                 ("sync", False, [], True), ("async", True, [], True)]:
            tf.config.list_physical_devices = lambda kind: gpus
            tf.config.set_visible_devices = lambda mine, kind: None
            tf.config.experimental.set_memory_growth = lambda gpu, grows: None
            context.context()._config = None
            task = clusters[mode].training_tasks[0]
            devices.configure(DevicesConfig(), replace(clusters[mode], is_managed=is_managed), task)
            rewriting = context.context().config.graph_options.rewrite_options
            assert (rewriting.meta_optimizer_iterations == rewriting.ONE) == expected, (mode, is_managed, gpus)
            spins = not context.context().config.experimental.disable_thread_spinning
            assert spins == (not is_managed), "both are set"
    """
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize(
    ("cores", "mode", "gpus", "threads"),
    [
        (3, "async", [], {"worker": "1", "ps": None, "chief": None}),
        (4, "async", [], {"worker": None, "ps": None, "chief": None}),  # two cores for each worker
        (3, "async", ["gpu"], {"worker": None, "ps": None, "chief": None}),
        (3, "sync_replicas", [], {"worker": "1", "ps": None, "chief": None}),
        (3, "sync", [], {"worker": None}),
    ],
)
def test_how_many_threads_execute_the_calls_of_tasks_that_share_a_host(
    monkeypatch: pytest.MonkeyPatch, cores: int, mode: str, gpus: list[str], threads: dict[str, str | None]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    for name in ("set_visible_devices", "experimental.set_memory_growth"):
        monkeypatch.setattr(f"tensorflow.config.{name}", lambda *_: None)
    for name in ("optimize_graphs_for_cpus", "share_cores"):
        monkeypatch.setattr(devices, name, lambda *_: None)
    cluster = Cluster(mode, {job: ("localhost:1",) * (2 if job == "worker" else 1) for job in threads}, is_managed=True)
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "")  # so that it is set back in the end
    for job, number in threads.items():
        os.environ.pop("TF_NUM_INTEROP_THREADS", None)
        devices.configure(DevicesConfig(), cluster, Task(job, 0))
        assert os.environ.get("TF_NUM_INTEROP_THREADS") == number, job


@pytest.mark.slow
def test_tasks_of_one_host_share_its_cores() -> None:
    """Runs in a process of its own, because TensorFlow accepts these settings only before its first operation."""
    code = """if True:
        from dataclasses import replace
        import tensorflow as tf
        from tensorflow.python.eager import context
        from tf2dist.process import devices
        from tf2dist.cluster.spec import Cluster, Task
        from tf2dist.config.schema import DevicesConfig
        for num_cores, num_workers, threads in [(2, 3, 1), (64, 3, 21), (8, 1, 8)]:
            server_config = tf.compat.v1.ConfigProto()
            devices.share_cores(server_config, num_cores, num_workers)
            for config in (server_config, context.context().config):
                assert config.experimental.disable_thread_spinning, config
                assert config.intra_op_parallelism_threads == threads, config
        cluster, task = Cluster("sync", {"worker": ("localhost:1", "localhost:2")}), Task("worker", 0)
        for is_managed in (False, True):
            server_config = devices.configure(DevicesConfig(), replace(cluster, is_managed=is_managed), task)
            assert server_config.experimental.disable_thread_spinning == is_managed
        assert float(tf.reduce_sum(tf.ones([1000]))) == 1000
    """
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert completed.returncode == 0, completed.stderr
