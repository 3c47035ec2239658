"""A run as a job of Ray Train, which finds the places, starts all tasks together, and starts them again after a loss.

The script that `python -m tf2dist.render ray` prints calls `train`, in the driver. The methods of `GangBackend` run in
Ray Train's controller. All other functions run in its workers, one of which is made for each task.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from ray.train.backend import Backend
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tf2dist import linux
from tf2dist.cluster import ranks
from tf2dist.cluster.addresses import control_port
from tf2dist.errors import TaskLostError, TfDistError
from tf2dist.launch.single_run import report
from tf2dist.linux import SECRETS
from tf2dist.signals import Signals
from tf2dist.tf_constants import LEGACY_KERAS
from tf2dist.tools.engines.job_request import FAILED_FOR_GOOD

POLL_SECS = 1.0
FIRST_PORT = 20_000  # Ray's own processes listen at the ports from 10002 to 19999
NUM_OFFERED = 64  # ports of each task, of which other tasks on its node may take some
# Ray sets the number of threads to that of the worker's CPUs, and TensorFlow then uses so many in each of its pools.
UNSET = ("OMP_NUM_THREADS", "TF_CONFIG", LEGACY_KERAS, *SECRETS)
# Becomes the command of a task, which the kernel kills with its worker.
RUN = (
    "import os, sys; from tf2dist import linux\n"
    "linux.die_with_parent(int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
)


class Ending:
    """The exit code with which the whole job ends, once a task or the driver knows it."""

    def __init__(self) -> None:
        self._code: int | None = None

    def give(self, code: int) -> None:
        self._code = self._code or code

    def get(self) -> int | None:
        return self._code


@dataclass(kw_only=True)
class Gang(ray.train.BackendConfig):
    """The options that the gang must know."""

    control_port_shift: int
    stop_secs: float  # how long a task may take from SIGTERM to its end

    @property
    def backend_cls(self) -> "type[GangBackend]":
        return GangBackend


class GangBackend(Backend):
    """The methods that Ray Train calls for each new group of workers, whose order is that of the ranks."""

    def on_start(self, worker_group: Any, gang: Gang) -> None:
        """Gives every worker its rank, and all of them a new token."""
        shift = gang.control_port_shift
        addresses = ranks.distinct_addresses(worker_group.execute(offer_ports, shift), shift)
        token = secrets.token_hex(32)
        all_ranks = range(len(addresses))
        ray.get([worker_group.execute_single_async(rank, take_place, addresses, rank, token) for rank in all_ranks])

    def on_shutdown(self, worker_group: Any, gang: Gang) -> None:
        """Stops the tasks that are left when others are lost, so that they can save; afterwards Ray kills them."""
        for stopped in worker_group.execute_async(stop_command, gang.stop_secs):
            with contextlib.suppress(ray.exceptions.RayError):  # this one is lost
                ray.get(stopped, timeout=gang.stop_secs)


def offer_ports(control_port_shift: int) -> tuple[str, list[int]]:
    """The address of this node, and free ports."""
    ports = linux.unused_ports(4 * NUM_OFFERED)
    free = (port for port in ports if linux.is_free(control_port(port, control_port_shift)))
    # Stable, so that the order remains random. There may be none so high.
    return ray.util.get_node_ip_address(), sorted(free, key=lambda port: port < FIRST_PORT)[:NUM_OFFERED]


def take_place(addresses: Sequence[str], rank: int, token: str) -> None:
    """Puts the rank into the environment of this worker, for its command."""
    for name in UNSET:
        os.environ.pop(name, None)
    # Without --gpus Ray leaves all GPUs of the node visible, also those that it has given to others.
    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {ranks.OWN[0]: ",".join(addresses), ranks.OWN[1]: str(rank), SECRETS[0]: token}


commands: "list[subprocess.Popen[bytes]]" = []  # of this worker; one at most
is_stopping = threading.Event()


def run_command(command: Sequence[str]) -> None:
    """Runs the command of this worker's task. Raises TfDistError with its exit code, unless that is 0."""
    # The Python of Ray has tf2dist, and another one may come first in PATH.
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}
    arguments = [sys.executable, "-P", "-c", RUN, str(os.getpid()), *command]
    # In a session of its own it gets no signal that is for Ray's processes.
    commands.append(subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
    if code := commands[0].wait():
        error = TfDistError(f"the command of this task has ended with exit code {code}")
        error.exit_code = code if code > 0 else 128 - code
        raise error


def stop_command(secs: float) -> None:
    """Stops the command in order, and waits for its end."""
    for command in commands:
        if not is_stopping.is_set():  # a second SIGTERM would end it at once
            is_stopping.set()
            command.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(secs)


def run_loop(loop: Callable[[], Any], ending: Any, stop_secs: float) -> None:
    """Runs the loop of one task. Ray Train starts all again if it raises an error."""
    if ray.get(ending.get.remote()) is not None:
        return
    threading.Thread(target=_stop_at_ending, args=(ending, stop_secs), daemon=True).start()
    try:
        loop()
    except TfDistError as error:
        if error.exit_code in FAILED_FOR_GOOD:
            ray.get(ending.give.remote(error.exit_code))
        if not is_stopping.is_set() and ray.get(ending.get.remote()) is None:
            raise


def _stop_at_ending(ending: Any, stop_secs: float) -> None:
    while ray.get(ending.get.remote()) is None:
        time.sleep(POLL_SECS)
    stop_command(stop_secs)


def train(loop: Callable[[], Any], gang: Gang, scaling_config: Any, failure_config: Any) -> int:
    """Trains with a worker for each task; returns the exit code. A signal stops all tasks in order."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    ending, stop_secs = ray.remote(Ending).options(num_cpus=0, scheduling_strategy=here).remote(), gang.stop_secs
    trainer = DataParallelTrainer(
        lambda: run_loop(loop, ending, stop_secs),
        backend_config=gang,
        scaling_config=scaling_config,
        run_config=ray.train.RunConfig(failure_config=failure_config),
    )
    errors: list[Exception] = []
    # In the main thread Ray Train would kill the tasks at Ctrl-C. This one is left behind if they do not stop in time.
    thread = threading.Thread(target=_fit, args=(trainer, errors), daemon=True)
    with Signals() as stop, stop.deferred():
        thread.start()
        while thread.is_alive() and not stop.signum:
            thread.join(POLL_SECS)
        if stop.signum:
            ending.give.remote(128 + stop.signum)
        deadline = time.monotonic() + stop_secs
        while thread.is_alive() and not stop.is_urgent and time.monotonic() < deadline:
            thread.join(POLL_SECS)
    code: int | None = ray.get(ending.get.remote())
    return report(TaskLostError(str(errors[0]))) if code is None and errors else code or 0


def _fit(trainer: Any, errors: list[Exception]) -> None:
    try:
        trainer.fit()
    except Exception as error:
        errors.append(error)
