"""How a task reports errors that TensorFlow words in many ways."""

import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import ClosureInputError

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ConfigError, Interrupted, LeaderLostError, NotFiniteError, TaskLostError, TrainingError
from tf2dist.process import strategy
from tf2dist.task import as_own_error
from tf2dist.training.parameter_server import serving


def test_running_out_of_memory_is_named() -> None:
    expected = "OOM when allocating tensor with shape[100000000000000] and type float"
    for error in (tf.errors.ResourceExhaustedError(None, None, expected), MemoryError(expected)):
        mine = as_own_error(error)
        assert isinstance(mine, TrainingError)
        assert mine.exit_code == 1
        assert str(mine) == f"out of memory; try a smaller train.batch_size_per_worker ({expected})"


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnavailableError(None, None, "Connection reset by peer, /job:ps/replica:0/task:0"),
        tf.errors.UnavailableError(None, None, "recvmsg: Socket closed"),
        tf.errors.AbortedError(None, None, "Connection reset: /job:worker/replica:0/task:1"),
        tf.errors.UnavailableError(None, None, "tasks are unhealthy (stopped sending heartbeats): /job:worker/task:1"),
        tf.errors.UnavailableError(None, None, "Stream IDs exhausted"),
        tf.errors.UnknownError(None, None, "Could not start gRPC server"),
        ClosureInputError(tf.errors.UnavailableError(None, None, "Connection refused, /job:ps/replica:0/task:0")),
    ],
    ids=str,
)
def test_a_lost_peer_is_worth_a_retry(error: Exception) -> None:
    mine = as_own_error(error)
    assert isinstance(mine, TaskLostError)
    assert mine.exit_code == 138


def test_of_the_error_for_a_lost_peer_the_informative_line_is_reported() -> None:
    expected = "Graph execution error:\n\nDetected at node train\nError from /job:worker/task:0: no heartbeats\nmore"
    mine = as_own_error(tf.errors.UnavailableError(None, None, expected))
    assert str(mine) == "lost another task: Error from /job:worker/task:0: no heartbeats"


def test_the_lost_task_is_named_in_one_line() -> None:
    expected = (
        "Graph execution error:\n\nDetected at node while/CollectiveReduceV2_1\nCollective ops is aborted by: Error "
        "reported from /job:worker/task:2: The following tasks are unhealthy (stopped sending heartbeats):\n"
        "/job:worker/replica:0/task:2\nThe tasks have crashed. Check the task logs"
    )
    assert str(as_own_error(tf.errors.UnavailableError(None, None, expected))) == "lost worker-2: sent no heartbeats"
    expected = (
        "Graph execution error:\n\naborted by: Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat\n"
    )
    mine = as_own_error(tf.errors.DeadlineExceededError(None, None, expected))
    assert isinstance(mine, TaskLostError)
    assert str(mine) == "lost another task: RPC: /tensorflow.CoordinationService/Heartbeat"


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InternalError(None, None, "Task is already in error before the barrier was called\n\nRPC: /Barrier"),
        tf.errors.FailedPreconditionError(None, None, "Agent must be in CONNECTED state. It is currently in ERROR."),
    ],
    ids=["service", "agent"],
)
def test_a_barrier_after_a_suspension_is_worth_a_retry(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "wait_at_barrier", Mock(side_effect=error))
    with pytest.raises(TaskLostError, match=f"^lost touch with the other workers: {str(error).splitlines()[0]}$"):
        strategy.barrier("finished", 1.0)


def test_devices_that_a_plugin_configures_too_late_are_refused() -> None:
    tf.constant(0)  # creates the context
    with pytest.raises(RuntimeError) as error:
        tf.config.threading.set_intra_op_parallelism_threads(tf.config.threading.get_intra_op_parallelism_threads() + 1)
    mine = as_own_error(error.value)
    assert isinstance(mine, ConfigError)
    assert "use the options devices.*" in str(mine)


def test_other_errors_stay_unchanged() -> None:
    for error in (ValueError("/job:ps"), tf.errors.InvalidArgumentError(None, None, "peer"), NotFiniteError("nan")):
        assert as_own_error(error) is error


@pytest.mark.parametrize(
    ("message", "error"),
    [({"final": "loss=0.1"}, None), ({"final": None}, Interrupted), ({"failure": "out of memory"}, LeaderLostError)],
)
def test_a_server_ends_as_its_coordinator_does(
    message: dict[str, Any], error: type[Exception] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished, stopped and saved, or failed."""
    monkeypatch.setattr(serving, "start_server", lambda *_: None)
    monkeypatch.setattr(serving, "_shutdown_message", lambda: message)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # SIGTERM would be ignored in the tests after this one
    cluster = Cluster("async", {"chief": ("a:1",), "ps": ("a:2",), "worker": ("a:3",)})
    with pytest.raises(error) if error else contextlib.nullcontext():
        assert serving.serve(cluster, Task("ps", 0), None, tmp_path, 0.0, 0.0) == message
