"""The GPUs that each task gets, given a list of invented GPUs, and how tasks share cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tf2dist.cluster.spec import Cluster, Task, local
from tf2dist.config.schema import ClusterConfig, DevicesConfig
from tf2dist.errors import ConfigError
from tf2dist.process import devices

GPUS = ["gpu0", "gpu1"]
ASYNC = local("async", ClusterConfig(num_workers=3), list(range(1, 9)))
SYNC = local("sync", ClusterConfig(num_workers=3), list(range(1, 9)))


def test_local_workers_get_gpus_round_robin() -> None:
    for cluster in (ASYNC, SYNC):
        chosen = [devices.choose_gpus(GPUS, cluster, Task("worker", i), share_host=True) for i in range(3)]
        assert chosen == [["gpu0"], ["gpu1"], ["gpu0"]]


def test_coordinator_and_ps_get_no_gpu() -> None:
    for task in (Task("ps", 0), Task("chief", 0)):
        assert devices.choose_gpus(GPUS, ASYNC, task, share_host=True) == []
        assert devices.choose_gpus(GPUS, ASYNC, task, share_host=False) == []


def test_a_worker_alone_on_its_host_gets_all_gpus() -> None:
    assert devices.choose_gpus(GPUS, SYNC, Task("worker", 1), share_host=False) == GPUS


def test_without_gpus_a_worker_gets_none() -> None:
    assert devices.choose_gpus([], SYNC, Task("worker", 1), share_host=True) == []


def test_the_memory_of_a_gpu_is_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES renumbers the GPUs; nvidia-smi keeps the numbers 0 to 2."""
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase "$*" in *=0) echo 16384;; *=1) echo 24576;; *=2) echo 8192;; *) exit 6;; esac')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.gpu_memory_mb(1) == 24576
    with pytest.raises(ConfigError, match="memory of GPU 3"):
        devices.gpu_memory_mb(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0")
    assert [devices.gpu_memory_mb(index) for index in (0, 1)] == [8192, 16384]
    with pytest.raises(ConfigError, match="memory of GPU 2"):
        devices.gpu_memory_mb(2)


def test_graphs_are_optimized_for_cpus_where_no_task_has_a_gpu() -> None:
    """The coordinator of many hosts makes the graphs of workers whose devices it does not know."""
    code = """if True:
        import tensorflow as tf
        from tensorflow.python.eager import context
        from tf2dist.process import devices
        from tf2dist.cluster.spec import Cluster, Task
        from tf2dist.config.schema import DevicesConfig
        clusters = {"sync": Cluster("sync", {"worker": ("localhost:1", "localhost:2")}),
                    "async": Cluster("async", {j: ("localhost:1",) for j in ("chief", "ps", "worker")})}
        for mode, share_host, gpus, expected in [("async", False, [], False), ("sync", True, ["gpu"], False),
                                                 ("sync", False, ["gpu"], False),
                                                 ("sync", False, [], True), ("async", True, [], True)]:
            tf.config.list_physical_devices = lambda kind: gpus
            tf.config.set_visible_devices = lambda mine, kind: None
            tf.config.experimental.set_memory_growth = lambda gpu, grows: None
            context.context()._config = None
            task = clusters[mode].training_tasks[0]
            devices.configure(DevicesConfig(), clusters[mode], task, share_host=share_host)
            rewriting = context.context().config.graph_options.rewrite_options
            assert (rewriting.meta_optimizer_iterations == rewriting.ONE) == expected, (mode, share_host, gpus)
            spins = not context.context().config.experimental.disable_thread_spinning
            assert spins == (not share_host), "both are set"
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("cores", "mode", "gpus", "threads"),
    [
        (3, "async", [], {"worker": "1", "ps": "5", "chief": None}),
        (4, "async", [], {"worker": None, "ps": "6", "chief": None}),  # two cores for each worker
        (3, "async", ["gpu"], {"worker": None, "ps": "5", "chief": None}),
        (3, "sync_replicas", [], {"worker": "1", "ps": "5", "chief": None}),
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
    cluster = Cluster(mode, {job: ("localhost:1",) * (2 if job == "worker" else 1) for job in threads})
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "")  # so that it is set back in the end
    for job, number in threads.items():
        os.environ.pop("TF_NUM_INTEROP_THREADS", None)
        devices.configure(DevicesConfig(), cluster, Task(job, 0), share_host=True)
        assert os.environ.get("TF_NUM_INTEROP_THREADS") == number, job


@pytest.mark.slow
def test_tasks_of_one_host_share_its_cores() -> None:
    """Runs in a process of its own, because TensorFlow accepts these settings only before its first operation."""
    code = """if True:
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
        for share_host in (False, True):
            server_config = devices.configure(DevicesConfig(), cluster, task, share_host=share_host)
            assert server_config.experimental.disable_thread_spinning == share_host
        assert float(tf.reduce_sum(tf.ones([1000]))) == 1000
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
